"""Next-token cross entropy that never holds all logits.

Logits are made for a chunk of positions at a time and made again in the backward pass; from the logits on everything
is at least float32. Its twin, minigpt_jax/loss.py, takes both gradients in the forward pass instead.

S positions  C positions of one chunk  D hidden  V vocabulary
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

CHUNK = 1024
"""Positions whose logits exist at one time."""


def next_token_loss(
    hidden: Tensor,  # [S, D]
    head: Tensor,  # [V, D]
    targets: Tensor,  # int64 [S]
    loss_weights: Tensor,  # float [S]
    *,
    sparse: bool = False,
) -> Tensor:
    """Sum over positions of loss_weights * -log softmax(hidden @ head.T)[target], in nats.

    Dividing by the number of supervised tokens is the caller's: under accumulation the number is the window's.

    Args:
        hidden: last hidden states, in the compute dtype.
        head: output head; cast to the dtype of `hidden` for the product.
        targets: the right next token of each position; any valid id where the weight is 0.
        loss_weights: 0 takes a position out of the loss.
        sparse: gather what is supervised and make no logits for the rest. The sum is the same but for its order; worth
            it where a good part has no weight, as in conversations.

    Returns:
        A scalar in at least float32.
    """
    if sparse:
        supervised = loss_weights != 0
        hidden, targets, loss_weights = hidden[supervised], targets[supervised], loss_weights[supervised]
    high = torch.promote_types(hidden.dtype, torch.float32)
    cast_head = head.to(hidden.dtype)
    total = torch.zeros((), dtype=high, device=hidden.device)
    # Without a supervised position the one chunk is empty: its sum is 0, and so is every gradient.
    for start in range(0, max(1, hidden.shape[0]), CHUNK):
        chunk = slice(start, start + CHUNK)
        parts = hidden[chunk], cast_head, targets[chunk], loss_weights[chunk].to(high)
        loss = checkpoint(_chunk_loss, *parts, use_reentrant=False)
        assert isinstance(loss, Tensor)
        total = total + loss
    return total


def _chunk_loss(hidden: Tensor, head: Tensor, targets: Tensor, loss_weights: Tensor) -> Tensor:
    """The chunk's summed loss. hidden [C, D], head [V, D], targets [C], loss_weights [C]."""
    logits = torch.einsum("cd,vd->cv", hidden.to(loss_weights.dtype), head.to(loss_weights.dtype))
    losses = F.cross_entropy(logits, targets, reduction="none")
    return torch.sum(loss_weights * losses)
