"""The next token of each row from its scores. The twin is minigpt_torch/sampling.py.

Settings are arrays, one entry a row: rows that are generated together need not agree, and one compilation serves all.
A token is drawn by a uniform number that comes from outside (minigpt_jax/generation.py): the same number gives the same
token in either framework, whatever other rows there are.

B rows  N tokens of one decoding call  V vocabulary  A alternatives
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from minigpt_jax.logprobs import MOST_LOGPROBS


class Sampling(NamedTuple):
    """How each row's next token is chosen, in this order."""

    repetition_penalty: jax.Array  # float [B] scores of ids that the row holds: divided by it, negative ones multiplied
    temperature: jax.Array  # float [B] scores are divided by it; 0 takes the highest
    top_k: jax.Array  # int32 [B] only the k highest; 0 takes all
    top_p: jax.Array  # float [B] only the highest whose probabilities reach p together, at least one
    min_p: jax.Array  # float [B] only those at least this part as probable as the highest


def sample(
    scores: jax.Array,  # float [B, V]
    seen: jax.Array,  # bool [B, V] ids that the row holds already
    sampling: Sampling,
    uniform: jax.Array,  # float [B] in [0, 1)
) -> jax.Array:  # int32 [B]
    """The id that each row goes on with."""
    penalty = sampling.repetition_penalty[:, None]
    # Dividing a negative score would reward what it is meant to punish.
    penalized = jnp.where(scores > 0, scores / penalty, scores * penalty)
    scores = jnp.where(seen, penalized, scores)
    highest = jnp.argmax(scores, axis=-1)
    is_drawn = sampling.temperature > 0
    drawn = jax.lax.cond(jnp.any(is_drawn), _draw, lambda *_: highest, scores, sampling, uniform)
    return jnp.where(is_drawn, drawn, highest).astype(jnp.int32)


class Logprobs(NamedTuple):
    """What the model held of an id and of the likeliest ones in its place, before any setting."""

    own: jax.Array  # float [B]
    top_ids: jax.Array  # int32 [B, A], the likeliest first
    top: jax.Array  # float [B, A]


def logprobs_of(scores: jax.Array, ids: jax.Array) -> Logprobs:
    """Log-probabilities by scores [B, V] of ids [B] and of the likeliest."""
    logprobs = jax.nn.log_softmax(scores)
    top, top_ids = jax.lax.top_k(logprobs, min(MOST_LOGPROBS, scores.shape[-1]))
    return Logprobs(logprobs[jnp.arange(len(ids)), ids], top_ids, top)


def no_logprobs(shape: tuple[int, ...], scores: jax.Array) -> Logprobs:
    """Zeros in the place of `shape` [B, N] ids' log-probabilities by scores [B, V]."""
    one = jax.eval_shape(logprobs_of, scores, jax.ShapeDtypeStruct(shape[:1], jnp.int32))
    return jax.tree.map(lambda leaf: jnp.zeros((*shape, *leaf.shape[1:]), leaf.dtype), one)


def looked_up(
    ids: jax.Array,  # int32 [B, L] of each row, and beyond them whatever was there
    lengths: jax.Array,  # int32 [B]
    following: jax.Array,  # int32 [B] the id that comes after them
    count: int,
) -> tuple[jax.Array, jax.Array]:  # int32 [B, count], int32 [B]
    """What followed the newest earlier place of each row's last two ids (Saxena, 2023), and how much of it there is."""
    slots = ids.shape[1]
    numbers = jnp.arange(len(lengths))
    last = ids[numbers, jnp.maximum(lengths - 1, 0)]
    # Place p: ids[p - 1] and ids[p] are the pair; ids[p + 1] has to be there.
    places = jnp.arange(1, slots)
    is_pair = (ids[:, :-1] == last[:, None]) & (ids[:, 1:] == following[:, None])
    is_pair &= places < lengths[:, None] - 1
    place = jnp.max(jnp.where(is_pair, places, 0), axis=-1)
    taken = place[:, None] + 1 + jnp.arange(count)
    guess = ids[numbers[:, None], jnp.minimum(taken, slots - 1)]
    return guess, jnp.where(place > 0, jnp.minimum(lengths - 1 - place, count), 0)


def _draw(scores: jax.Array, sampling: Sampling, uniform: jax.Array) -> jax.Array:
    vocab_size = scores.shape[-1]
    temperature = jnp.where(sampling.temperature > 0, sampling.temperature, 1)
    scores = (scores - scores.max(axis=-1, keepdims=True)) / temperature[:, None]
    ranked = _ranked(scores)
    ranks = jnp.arange(vocab_size)
    top_k = jnp.where(sampling.top_k > 0, jnp.minimum(sampling.top_k, vocab_size), vocab_size)[:, None]
    weights = jnp.where(ranks < top_k, jnp.exp(ranked), 0)
    weights /= weights.sum(axis=-1, keepdims=True)
    reached = jnp.cumsum(weights, axis=-1) - weights  # by the ranks before
    top_p = sampling.top_p[:, None]
    # Sums of rounded weights may reach 1 before the last of them.
    is_kept = (ranks < top_k) & ((reached < top_p) | (ranks == 0) | (top_p >= 1))
    is_kept &= ranked >= jnp.log(sampling.min_p)[:, None]
    lowest = jnp.min(jnp.where(is_kept, ranked, 0), axis=-1, keepdims=True)
    # In order of the ids: ids of equal scores are kept or left out together.
    reached = jnp.cumsum(jnp.where(scores >= lowest, jnp.exp(scores), 0), axis=-1)
    total = reached[:, -1:]
    return jnp.argmax(reached > uniform[:, None] * total, axis=-1)


def _ranked(scores: jax.Array) -> jax.Array:
    """The highest of each row first; none is above 0.

    The bits of numbers that are not negative, read as integers, are in the order of the numbers, and XLA sorts integers
    several times as fast on a CPU.
    """
    bits = jax.lax.bitcast_convert_type(-scores, jnp.dtype(f"int{8 * scores.dtype.itemsize}"))
    return -jax.lax.bitcast_convert_type(jnp.sort(bits, axis=-1), scores.dtype)
