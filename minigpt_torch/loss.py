"""Next-token cross entropy that never holds all logits.

minigpt_torch/chunks.py makes logits for a chunk of positions at a time. Its twin is minigpt_jax/loss.py.

S positions  C positions of one chunk  D hidden  V vocabulary
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from minigpt_torch.chunks import chunk_logits, over_chunks

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
    total = torch.zeros((), dtype=high, device=hidden.device)
    positions, constants = (hidden, targets, loss_weights.to(high)), (head.to(hidden.dtype),)
    for loss in over_chunks(_chunk_loss, CHUNK, positions=positions, constants=constants):
        total = total + loss
    return total


def _chunk_loss(hidden: Tensor, targets: Tensor, loss_weights: Tensor, head: Tensor) -> Tensor:
    """The chunk's summed loss. hidden [C, D], targets [C], loss_weights [C], head [V, D]."""
    return torch.sum(loss_weights * token_losses(chunk_logits(hidden, head), targets))


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of each position [C], in nats. logits [C, V], targets [C]."""
    return F.cross_entropy(logits, targets, reduction="none")
