"""Next-token cross entropy that never holds all logits.

Logits are made for a chunk of positions at a time. When a gradient is wanted, the same pass returns the gradients of
the hidden states and of the head as well (the loss is a scalar, so backward only has to scale them): the cost in
time is that of the plain loss, the memory that of one chunk. From the logits on everything is at least float32.

S positions  C positions of one chunk  D hidden  V vocabulary
"""

from functools import partial

import jax
import jax.numpy as jnp

CHUNK = 1024
"""Positions whose logits exist at one time."""


def next_token_loss(
    hidden: jax.Array,  # [S, D]
    head: jax.Array,  # [V, D]
    targets: jax.Array,  # int32 [S]
    loss_weights: jax.Array,  # float [S]
) -> jax.Array:
    """Sum over positions of loss_weights * -log softmax(hidden @ head.T)[target], in nats.

    Dividing by the number of supervised tokens is the caller's: under accumulation the number is the window's.

    Args:
        hidden: last hidden states, in the compute dtype.
        head: output head; cast to the dtype of `hidden` for the product.
        targets: the right next token of each position; any valid id where the weight is 0.
        loss_weights: 0 takes a position out of the loss.

    Returns:
        A scalar in at least float32.
    """
    count = hidden.shape[0]
    padding = -count % min(CHUNK, count)
    if padding:
        hidden = jnp.pad(hidden, ((0, padding), (0, 0)))
        targets, loss_weights = jnp.pad(targets, (0, padding)), jnp.pad(loss_weights, (0, padding))
    return _summed_loss(hidden, head, targets, loss_weights)


@jax.custom_vjp
def _summed_loss(hidden: jax.Array, head: jax.Array, targets: jax.Array, loss_weights: jax.Array) -> jax.Array:
    high = jnp.promote_types(hidden.dtype, jnp.float32)
    cast_head = head.astype(hidden.dtype)

    def add_chunk(total: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        loss, _ = _chunk_loss(*chunk, head=cast_head, high=high)
        return total + loss, None

    return jax.lax.scan(add_chunk, jnp.zeros((), high), _chunks(hidden, targets, loss_weights))[0]


def _summed_loss_forward(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, loss_weights: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    high = jnp.promote_types(hidden.dtype, jnp.float32)
    cast_head = head.astype(hidden.dtype)

    def add_chunk(
        carry: tuple[jax.Array, jax.Array], chunk: tuple[jax.Array, ...]
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        total, head_gradient = carry
        loss, logits_gradient = _chunk_loss(*chunk, head=cast_head, high=high)
        logits_gradient = logits_gradient.astype(hidden.dtype)  # [C, V]
        head_gradient += jnp.einsum("cv,cd->vd", logits_gradient, chunk[0], preferred_element_type=high)
        return (total + loss, head_gradient), jnp.einsum("cv,vd->cd", logits_gradient, cast_head)

    start = (jnp.zeros((), high), jnp.zeros(head.shape, high))
    (total, head_gradient), hidden_gradient = jax.lax.scan(add_chunk, start, _chunks(hidden, targets, loss_weights))
    return total, (hidden_gradient.reshape(hidden.shape), head_gradient.astype(head.dtype))


def _summed_loss_backward(
    gradients: tuple[jax.Array, ...], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, None, None]:
    hidden_gradient, head_gradient = gradients
    return (
        (cotangent * hidden_gradient).astype(hidden_gradient.dtype),
        (cotangent * head_gradient).astype(head_gradient.dtype),
        None,
        None,
    )


_summed_loss.defvjp(_summed_loss_forward, _summed_loss_backward)


def _chunks(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Each [S, ...] as [S/C, C, ...]; S is a multiple of C."""
    count = arrays[0].shape[0]
    size = min(CHUNK, count)
    return tuple(array.reshape(count // size, size, *array.shape[1:]) for array in arrays)


@partial(jax.named_call, name="chunk_loss")
def _chunk_loss(
    hidden: jax.Array,  # [C, D]
    targets: jax.Array,  # [C]
    loss_weights: jax.Array,  # [C]
    *,
    head: jax.Array,  # [V, D]
    high: jnp.dtype,
) -> tuple[jax.Array, jax.Array]:
    """The chunk's summed loss and its gradient by the logits: weight * (softmax - one_hot(target)) [C, V]."""
    logits = jnp.einsum("cd,vd->cv", hidden, head, preferred_element_type=high)
    log_probabilities = jax.nn.log_softmax(logits, axis=-1)
    weights = loss_weights.astype(high)
    is_target = targets[:, None] == jnp.arange(head.shape[0])
    chosen = jnp.take_along_axis(log_probabilities, targets[:, None], axis=-1)[:, 0]
    loss = -jnp.sum(weights * chosen)
    gradient = weights[:, None] * (jnp.exp(log_probabilities) - is_target)
    return loss, gradient
