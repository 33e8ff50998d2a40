"""Knowledge distillation (Hinton et al., 2015): learn from the text and from a teacher's whole distribution.

Choices and names are those of its twin, minigpt_jax/distillation.py; what differs is the idiom alone.

S positions  C positions of one chunk  D hidden, student's and teacher's own  V vocabulary, of both
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from minigpt_torch.chunks import chunk_logits, over_chunks
from minigpt_torch.loss import CHUNK, token_losses


class DistillationResult(NamedTuple):
    """Sums over supervised tokens, in nats; scalars in at least float32."""

    loss: Tensor
    """alpha * cross_entropy + (1 - alpha) * temperature^2 * divergence."""
    cross_entropy: Tensor
    """Of the next token at temperature 1; a measure, without gradient."""
    divergence: Tensor
    """KL(teacher || student), both at the temperature; a measure, without gradient."""


def distillation_loss(
    hidden: Tensor,  # [S, D]
    head: Tensor,  # [V, D]
    teacher_hidden: Tensor,  # [S, teacher's D]
    teacher_head: Tensor,  # [V, teacher's D]
    targets: Tensor,  # int64 [S]
    loss_weights: Tensor,  # float [S]
    *,
    alpha: float,
    temperature: float,
) -> DistillationResult:
    """Sum over positions of loss_weights * (alpha * cross entropy + (1 - alpha) * T^2 * KL(teacher || student)).

    The divergence is taken at temperature T. T^2 keeps the size of its gradient, T * (softmax(student / T) -
    softmax(teacher / T)) by the student's logits, about the same at every temperature (Hinton et al., 2015, section 2).
    Dividing by the number of supervised tokens is the caller's. Supervised positions are gathered first, and no logits
    are made for the rest.

    Args:
        hidden: the student's last hidden states, in the compute dtype.
        head: the student's output head; cast to the dtype of `hidden` for the product.
        teacher_hidden: the teacher's last hidden states at the same positions; not differentiated.
        teacher_head: the teacher's output head, cast as the student's is; not differentiated.
        targets: the right next token of each position; any valid id where the weight is 0.
        loss_weights: 0 takes a position out of the loss.
        alpha: share of the cross entropy; 1 is `next_token_loss`.
        temperature: T above 0; logits of both are divided by it before the divergence.

    Raises:
        ValueError: student and teacher have vocabularies of different sizes.
    """
    if head.shape[0] != teacher_head.shape[0]:
        raise ValueError(f"vocabularies of different sizes: student {head.shape[0]}, teacher {teacher_head.shape[0]}")
    supervised = loss_weights != 0
    high = torch.promote_types(hidden.dtype, torch.float32)
    positions = (
        hidden[supervised], targets[supervised], loss_weights[supervised].to(high), teacher_hidden.detach()[supervised]
    )  # fmt: skip
    constants = head.to(hidden.dtype), teacher_head.detach().to(teacher_hidden.dtype)
    chunk_losses = partial(_chunk_losses, alpha=alpha, temperature=temperature)
    totals = torch.zeros(3, dtype=high, device=hidden.device)
    for sums in over_chunks(chunk_losses, CHUNK, positions=positions, constants=constants):
        totals = totals + sums
    loss, cross_entropy, divergence = totals
    return DistillationResult(loss, cross_entropy.detach(), divergence.detach())


def _chunk_losses(
    hidden: Tensor,  # [C, D]
    targets: Tensor,  # [C]
    loss_weights: Tensor,  # [C]
    teacher_hidden: Tensor,  # [C, teacher's D]
    head: Tensor,  # [V, D]
    teacher_head: Tensor,  # [V, teacher's D]
    *,
    alpha: float,
    temperature: float,
) -> Tensor:
    """The chunk's summed loss, cross entropy and divergence [3]."""
    logits = chunk_logits(hidden, head)
    cross_entropy = token_losses(logits, targets)
    teacher_logits = chunk_logits(teacher_hidden, teacher_head).to(logits.dtype)
    student = torch.log_softmax(logits / temperature, dim=-1)
    teacher = torch.log_softmax(teacher_logits / temperature, dim=-1)
    divergence = torch.sum(torch.exp(teacher) * (teacher - student), dim=-1)
    loss = alpha * cross_entropy + (1 - alpha) * temperature**2 * divergence
    return torch.stack((loss, cross_entropy, divergence)) @ loss_weights
