"""Rows of tokens with what a model knows of them, and what can be done to them without it.

A call of minigpt_jax/generate.py takes out the rows that it computes, with as many slots as they need, and puts them
back. What is compiled for a model then depends on that part alone, never on how many rows and slots there are.

The twin compiles nothing, needs less of this, and has it in minigpt_torch/generate.py.

B rows  R rows of a part  T tokens  L slots of a row  S slots of a row of a part  V vocabulary
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from minigpt_jax.kv_cache import KVCache


class Rows(NamedTuple):
    """What is known of each row."""

    cache: KVCache
    ids: jax.Array  # int32 [B, L] tokens read, and beyond them whatever was there
    lengths: jax.Array  # int32 [B] how many
    scores: jax.Array  # float [B, V] of the token after them
    seen: jax.Array  # bool [B, V] ids among the tokens read


# --- A part ---


def padded_numbers(takes_part: NDArray[np.bool_]) -> NDArray[np.int32]:
    """[R] numbers of the rows that take part, filled up to a power of two with B, which is no row's.

    Where that would be as many as there are, it is all of them, whether they take part or not.
    """
    (numbers,) = np.nonzero(takes_part)
    size = 1
    while size < len(numbers):
        size *= 2
    if size >= len(takes_part):
        return np.arange(len(takes_part), dtype=np.int32)
    return np.pad(numbers, (0, size - len(numbers)), constant_values=len(takes_part)).astype(np.int32)


def taken(rows: Rows, numbers: NDArray[np.int32], slots: int) -> Rows:
    """The rows of these numbers [R] with their first S slots; one that is no row's has no token.

    It may be `rows` itself: who gives it away puts something back before anybody reads `rows` again.
    """
    return rows if rows.ids.shape == (len(numbers), slots) else _taken(rows, numbers, slots)


def put_back(rows: Rows, part: Rows, numbers: NDArray[np.int32]) -> Rows:
    """The rows with those that were taken in their places."""
    return part if rows.ids.shape == part.ids.shape else _put_back(rows, part, numbers)


@partial(jax.jit, static_argnames="slots")
def _taken(rows: Rows, numbers: jax.Array, slots: int) -> Rows:
    def take(leaf: jax.Array, *place: Any) -> jax.Array:
        return leaf.at[numbers, *place].get(mode="fill", fill_value=0)

    return Rows(
        jax.tree.map(lambda leaf: take(leaf, slice(None), slice(slots)), rows.cache),
        take(rows.ids, slice(slots)),
        *map(take, (rows.lengths, rows.scores, rows.seen)),
    )


@partial(jax.jit, donate_argnames="rows")
def _put_back(rows: Rows, part: Rows, numbers: jax.Array) -> Rows:
    slots = part.cache.slots

    def put(leaf: jax.Array, new: jax.Array, *place: Any) -> jax.Array:
        return leaf.at[numbers, *place].set(new, mode="drop")

    return Rows(
        jax.tree.map(lambda leaf, new: put(leaf, new, slice(None), slice(slots)), rows.cache, part.cache),
        put(rows.ids, part.ids, slice(slots)),
        *map(put, (rows.lengths, rows.scores, rows.seen), (part.lengths, part.scores, part.seen)),
    )


# --- Tokens ---


def advanced(rows: Rows, tokens: jax.Array, counts: jax.Array, scores: jax.Array) -> Rows:
    """The rows once the first `counts` of `tokens` [B, T] count as read, with the scores [B, V] of what follows."""
    is_read = jnp.arange(tokens.shape[1]) < counts[:, None]
    return rows._replace(
        lengths=rows.lengths + counts,
        scores=jnp.where(counts[:, None] > 0, scores, rows.scores),
        seen=marked(rows.seen, tokens, is_read),
    )


def marked(seen: jax.Array, tokens: jax.Array, is_real: jax.Array) -> jax.Array:
    """`seen` [B, V] with the real ones of `tokens` [B, T]."""
    numbers = jnp.arange(tokens.shape[0])[:, None]
    return seen.at[numbers, jnp.where(is_real, tokens, seen.shape[1])].set(True, mode="drop")


@partial(jax.jit, donate_argnames="rows")
def kept(rows: Rows, lengths: jax.Array) -> Rows:
    """The rows with no more than their first `lengths` [B] tokens."""
    lengths = jnp.minimum(rows.lengths, lengths)
    is_kept = jnp.arange(rows.ids.shape[1]) < lengths[:, None]
    return rows._replace(lengths=lengths, seen=marked(jnp.zeros_like(rows.seen), rows.ids, is_kept))


# --- Size ---


@partial(jax.jit, static_argnames="times")
def repeated(rows: Rows, times: int) -> Rows:
    """Each row `times` times over."""
    return jax.tree.map(lambda leaf: jnp.repeat(leaf, times, axis=0), rows)


@partial(jax.jit, static_argnames="slots")
def widened(rows: Rows, slots: int) -> Rows:
    """The rows with this many slots each, which is no less than they have."""
    more = slots - rows.cache.slots
    cache = jax.tree.map(lambda leaf: jnp.pad(leaf, ((0, 0), (0, 0), (0, more), (0, 0))), rows.cache)
    return rows._replace(cache=cache, ids=jnp.pad(rows.ids, ((0, 0), (0, more))))
