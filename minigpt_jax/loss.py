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

SPARSE_CHUNK = 256
"""The same where unsupervised positions are skipped: a chunk that has one to learn is computed whole."""


def next_token_loss(
    hidden: jax.Array,  # [S, D]
    head: jax.Array,  # [V, D]
    targets: jax.Array,  # int32 [S]
    loss_weights: jax.Array,  # float [S]
    *,
    sparse: bool = False,
) -> jax.Array:
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
    count = hidden.shape[0]
    size = min(SPARSE_CHUNK if sparse else CHUNK, count)
    if sparse:
        supervised_first = jnp.argsort(loss_weights == 0, stable=True)
        hidden, targets, loss_weights = (array[supervised_first] for array in (hidden, targets, loss_weights))
    padding = -count % size
    if padding:
        hidden = jnp.pad(hidden, ((0, padding), (0, 0)))
        targets, loss_weights = jnp.pad(targets, (0, padding)), jnp.pad(loss_weights, (0, padding))
    return _summed_loss(size, hidden, head, targets, loss_weights)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _summed_loss(
    size: int, hidden: jax.Array, head: jax.Array, targets: jax.Array, loss_weights: jax.Array
) -> jax.Array:
    """Over chunks of `size` positions, from the first one to the last that has a weight."""
    high = jnp.promote_types(hidden.dtype, jnp.float32)
    cast_head = head.astype(hidden.dtype)

    def add_chunk(number: jax.Array, total: jax.Array) -> jax.Array:
        loss, _ = _chunk_loss(*_chunk(number, size, hidden, targets, loss_weights), head=cast_head, high=high)
        return total + loss

    return jax.lax.fori_loop(0, _used_chunks(size, loss_weights), add_chunk, jnp.zeros((), high))


def _summed_loss_forward(
    size: int, hidden: jax.Array, head: jax.Array, targets: jax.Array, loss_weights: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    high = jnp.promote_types(hidden.dtype, jnp.float32)
    cast_head = head.astype(hidden.dtype)

    def add_chunk(number: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        total, head_gradient, hidden_gradient = sums
        chunk = _chunk(number, size, hidden, targets, loss_weights)
        loss, logits_gradient = _chunk_loss(*chunk, head=cast_head, high=high)
        logits_gradient = logits_gradient.astype(hidden.dtype)  # [C, V]
        head_gradient += jnp.einsum("cv,cd->vd", logits_gradient, chunk[0], preferred_element_type=high)
        by_hidden = jnp.einsum("cv,vd->cd", logits_gradient, cast_head)
        hidden_gradient = jax.lax.dynamic_update_slice_in_dim(hidden_gradient, by_hidden, number * size, axis=0)
        return total + loss, head_gradient, hidden_gradient

    start = (jnp.zeros((), high), jnp.zeros(head.shape, high), jnp.zeros_like(hidden))
    total, head_gradient, hidden_gradient = jax.lax.fori_loop(0, _used_chunks(size, loss_weights), add_chunk, start)
    return total, (hidden_gradient, head_gradient.astype(head.dtype))


def _summed_loss_backward(
    size: int, gradients: tuple[jax.Array, ...], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, None, None]:
    hidden_gradient, head_gradient = gradients
    return (
        (cotangent * hidden_gradient).astype(hidden_gradient.dtype),
        (cotangent * head_gradient).astype(head_gradient.dtype),
        None,
        None,
    )


_summed_loss.defvjp(_summed_loss_forward, _summed_loss_backward)


def _used_chunks(size: int, loss_weights: jax.Array) -> jax.Array:
    places = jnp.arange(1, loss_weights.shape[0] + 1)
    return -(-jnp.max(jnp.where(loss_weights != 0, places, 0)) // size)


def _chunk(number: jax.Array, size: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(jax.lax.dynamic_slice_in_dim(array, number * size, size) for array in arrays)


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
