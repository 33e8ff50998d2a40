"""Losses over positions, a chunk of them at a time: all logits never exist at once.

A summed loss is a scalar, so the pass that makes a chunk's logits also makes the gradients of the hidden states and of
the head, and backward only has to scale them: the cost in time is that of the plain loss, the memory that of one
chunk. From the logits on everything is at least float32. The twin, minigpt_torch/chunks.py, makes each chunk again in
the backward pass instead.

S positions  C positions of one chunk  D hidden  V vocabulary
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

Arrays = tuple[jax.Array, ...]

ChunkLosses = Callable[..., tuple[Arrays, jax.Array]]
"""(logits [C, V], one chunk of each per-position array, each constant) -> (losses, gradient).

`losses` are arrays [C] before weighting; `gradient` [C, V] is that of the first one by the logits.
"""


def supervised_first(loss_weights: jax.Array) -> jax.Array:
    """The order of positions int32 [S] that puts those with a weight first; each part stays as it was."""
    return jnp.argsort(loss_weights == 0, stable=True)


def whole_chunks(size: int, *arrays: jax.Array) -> Arrays:
    """Each array over positions, with as many zeros after it as the last chunk of `size` positions needs."""
    padding = -arrays[0].shape[0] % size
    return tuple(jnp.pad(array, ((0, padding), *[(0, 0)] * (array.ndim - 1))) for array in arrays)


def used_chunks(size: int, loss_weights: jax.Array) -> jax.Array:
    """How many chunks of `size` there are up to the last one that has a weight."""
    places = jnp.arange(1, loss_weights.shape[0] + 1)
    return -(-jnp.max(jnp.where(loss_weights != 0, places, 0)) // size)


def one_chunk(number: jax.Array, size: int, *arrays: jax.Array) -> Arrays:
    """Chunk `number` of each array over positions."""
    return tuple(jax.lax.dynamic_slice_in_dim(array, number * size, size) for array in arrays)


def chunk_logits(hidden: jax.Array, head: jax.Array) -> jax.Array:
    """Logits [C, V] in at least float32, of hidden [C, D] and head [V, D] of one dtype."""
    high = jnp.promote_types(hidden.dtype, jnp.float32)
    return jnp.einsum("cd,vd->cv", hidden, head, preferred_element_type=high)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def summed_losses(
    chunk_losses: ChunkLosses,
    num_losses: int,
    size: int,
    hidden: jax.Array,  # [S, D]
    head: jax.Array,  # [V, D]
    loss_weights: jax.Array,  # [S]
    positions: Arrays,  # each [S, ...]
    constants: Arrays,
) -> Arrays:
    """Sums over positions of loss_weight * loss, for each of the losses that `chunk_losses` makes.

    Args:
        chunk_losses: see `ChunkLosses`.
        num_losses: how many losses it makes.
        size: positions of one chunk; it divides S (`whole_chunks`).
        hidden: last hidden states, in the compute dtype.
        head: output head; cast to the dtype of `hidden` for the product.
        loss_weights: chunks after the last one that has a weight are not computed.
        positions: what else `chunk_losses` takes by position; not differentiated.
        constants: what it takes whole; not differentiated.

    Returns:
        As many scalars in at least float32. Gradients are those of the first one, by `hidden` and `head`.
    """
    high = jnp.promote_types(hidden.dtype, jnp.float32)
    cast_head = head.astype(hidden.dtype)

    def add_chunk(number: jax.Array, totals: Arrays) -> Arrays:
        chunk = one_chunk(number, size, hidden, loss_weights, *positions)
        sums, _ = _weighted_chunk(chunk_losses, cast_head, *chunk, constants=constants)
        return _added(totals, sums)

    return jax.lax.fori_loop(0, used_chunks(size, loss_weights), add_chunk, (jnp.zeros((), high),) * num_losses)


def _summed_losses_forward(
    chunk_losses: ChunkLosses,
    num_losses: int,
    size: int,
    hidden: jax.Array,
    head: jax.Array,
    loss_weights: jax.Array,
    positions: Arrays,
    constants: Arrays,
) -> tuple[Arrays, Arrays]:
    high = jnp.promote_types(hidden.dtype, jnp.float32)
    cast_head = head.astype(hidden.dtype)

    def add_chunk(number: jax.Array, carry: tuple[Arrays, jax.Array, jax.Array]) -> tuple[Arrays, jax.Array, jax.Array]:
        totals, head_gradient, hidden_gradient = carry
        chunk = one_chunk(number, size, hidden, loss_weights, *positions)
        sums, logits_gradient = _weighted_chunk(chunk_losses, cast_head, *chunk, constants=constants)
        logits_gradient = logits_gradient.astype(hidden.dtype)  # [C, V]
        head_gradient += jnp.einsum("cv,cd->vd", logits_gradient, chunk[0], preferred_element_type=high)
        by_hidden = jnp.einsum("cv,vd->cd", logits_gradient, cast_head)
        hidden_gradient = jax.lax.dynamic_update_slice_in_dim(hidden_gradient, by_hidden, number * size, axis=0)
        return _added(totals, sums), head_gradient, hidden_gradient

    start = ((jnp.zeros((), high),) * num_losses, jnp.zeros(head.shape, high), jnp.zeros_like(hidden))
    totals, head_gradient, hidden_gradient = jax.lax.fori_loop(0, used_chunks(size, loss_weights), add_chunk, start)
    return totals, (hidden_gradient, head_gradient.astype(head.dtype))


def _summed_losses_backward(
    chunk_losses: ChunkLosses, num_losses: int, size: int, gradients: Arrays, cotangents: Arrays
) -> tuple[jax.Array, jax.Array, None, None, None]:
    hidden_gradient, head_gradient = gradients
    cotangent = cotangents[0]
    return (
        (cotangent * hidden_gradient).astype(hidden_gradient.dtype),
        (cotangent * head_gradient).astype(head_gradient.dtype),
        None,
        None,
        None,
    )


summed_losses.defvjp(_summed_losses_forward, _summed_losses_backward)


@partial(jax.named_call, name="chunk_loss")
def _weighted_chunk(
    chunk_losses: ChunkLosses,
    head: jax.Array,
    hidden: jax.Array,  # [C, D]
    loss_weights: jax.Array,  # [C]
    *positions: jax.Array,  # each [C, ...]
    constants: Arrays,
) -> tuple[Arrays, jax.Array]:
    """The chunk's weighted sums, and the gradient [C, V] of the first one by the logits."""
    logits = chunk_logits(hidden, head)
    losses, gradient = chunk_losses(logits, *positions, *constants)
    weights = loss_weights.astype(logits.dtype)
    return tuple(jnp.sum(weights * loss) for loss in losses), weights[:, None] * gradient


def _added(totals: Arrays, sums: Arrays) -> Arrays:
    return tuple(total + part for total, part in zip(totals, sums, strict=True))
