"""Losses over positions, a chunk of them at a time: all logits never exist at once.

A chunk is made again in the backward pass. Its twin, minigpt_jax/chunks.py, takes both gradients in the forward pass
instead. From the logits on everything is at least float32.

C positions of one chunk  D hidden  V vocabulary
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def over_chunks(
    function: Callable[..., Any], size: int, *, positions: tuple[Tensor, ...], constants: tuple[Tensor, ...]
) -> Iterator[Any]:
    """`function(*one chunk of each position tensor, *constants)` for chunks of at most `size` positions, in order.

    What `function` makes inside is not kept for the backward pass.
    """
    # Without a position there is one empty chunk: its sum is 0, and so is every gradient.
    for start in range(0, max(1, positions[0].shape[0]), size):
        chunk = (tensor[start : start + size] for tensor in positions)
        yield checkpoint(function, *chunk, *constants, use_reentrant=False)


def chunk_logits(hidden: Tensor, head: Tensor) -> Tensor:
    """Logits [C, V] in at least float32, of hidden [C, D] and head [V, D] of one dtype."""
    high = torch.promote_types(hidden.dtype, torch.float32)
    return torch.einsum("cd,vd->cv", hidden.to(high), head.to(high))
