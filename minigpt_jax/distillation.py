"""Knowledge distillation (Hinton et al., 2015): learn from the text and from a teacher's whole distribution.

Choices: logits of student and teacher exist for one chunk of positions at a time, and the pass that makes them takes
the student's gradients as well (minigpt_jax/chunks.py). The teacher is not differentiated. The divergence is
KL(teacher || student): a student is charged for every token that its teacher holds possible.

S positions  C positions of one chunk  D hidden, student's and teacher's own  V vocabulary, of both
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from minigpt_jax.chunks import Arrays, chunk_logits, summed_losses, supervised_first, whole_chunks
from minigpt_jax.loss import SPARSE_CHUNK, token_losses


class DistillationResult(NamedTuple):
    """Sums over supervised tokens, in nats; scalars in at least float32."""

    loss: jax.Array
    """alpha * cross_entropy + (1 - alpha) * temperature^2 * divergence."""
    cross_entropy: jax.Array
    """Of the next token at temperature 1; a measure, without gradient."""
    divergence: jax.Array
    """KL(teacher || student), both at the temperature; a measure, without gradient."""


def distillation_loss(
    hidden: jax.Array,  # [S, D]
    head: jax.Array,  # [V, D]
    teacher_hidden: jax.Array,  # [S, teacher's D]
    teacher_head: jax.Array,  # [V, teacher's D]
    targets: jax.Array,  # int32 [S]
    loss_weights: jax.Array,  # float [S]
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
    size = min(SPARSE_CHUNK, hidden.shape[0])
    order = supervised_first(loss_weights)
    hidden, teacher_hidden, targets, loss_weights = whole_chunks(
        size, hidden[order], teacher_hidden[order], targets[order], loss_weights[order]
    )
    chunk_losses = partial(_chunk_losses, alpha=alpha, temperature=temperature)
    positions, constants = (targets, teacher_hidden), (teacher_head.astype(teacher_hidden.dtype),)
    loss, *measures = summed_losses(chunk_losses, 3, size, hidden, head, loss_weights, positions, constants)
    return DistillationResult(loss, *map(jax.lax.stop_gradient, measures))


def _chunk_losses(
    logits: jax.Array,  # [C, V]
    targets: jax.Array,  # [C]
    teacher_hidden: jax.Array,  # [C, teacher's D]
    teacher_head: jax.Array,  # [V, teacher's D]
    *,
    alpha: float,
    temperature: float,
) -> tuple[Arrays, jax.Array]:
    """Loss, cross entropy and divergence of each position [C], and the loss's gradient by the logits [C, V]."""
    (cross_entropy,), cross_entropy_gradient = token_losses(logits, targets)
    teacher_logits = chunk_logits(teacher_hidden, teacher_head).astype(logits.dtype)
    student = jax.nn.log_softmax(logits / temperature, axis=-1)
    teacher = jax.nn.log_softmax(teacher_logits / temperature, axis=-1)
    divergence = jnp.sum(jnp.exp(teacher) * (teacher - student), axis=-1)
    divergence_gradient = (jnp.exp(student) - jnp.exp(teacher)) / temperature
    share = (1 - alpha) * temperature**2
    loss = alpha * cross_entropy + share * divergence
    return (loss, cross_entropy, divergence), alpha * cross_entropy_gradient + share * divergence_gradient
