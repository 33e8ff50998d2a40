"""Generation in JAX: rows of tokens with a key/value cache of fixed size, read in buckets, extended in a compiled loop.

A row may guess ahead: where its last two tokens stood before, what followed them there is read along in the same pass,
and kept as far as it is what would have been chosen anyway. Nothing changes but the number of passes.

What is compiled depends on the number of rows, on the cache's slots and on the width of a bucket, never on the length
of a prompt. minigpt_jax/generation.py drives it; the twin is minigpt_torch/generate.py.

B rows  T tokens read at once  N tokens of one decoding call  V vocabulary
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from minigpt_jax.config import ModelConfig
from minigpt_jax.generation import STEPS, GenerationConfig
from minigpt_jax.kv_cache import CachedAttention, KVCache, empty_cache
from minigpt_jax.lora import layer_adapters
from minigpt_jax.lora_config import LoraConfig
from minigpt_jax.model import Transformer, model_graph
from minigpt_jax.sampling import Sampling, looked_up, sample

BUCKETS = (512, 256, 128, 64, 32, 16)
"""Tokens that are read at once; the rest of a prompt is padded to the narrowest that holds it."""

SLOT_MULTIPLE = 256
"""The cache's slots are this, or a power of two times it, up to what is asked for."""


class Rows(NamedTuple):
    """What is known of each row."""

    cache: KVCache
    ids: jax.Array  # int32 [B, L] tokens read, and beyond them whatever was there
    lengths: jax.Array  # int32 [B] how many
    scores: jax.Array  # float [B, V] of the token after them
    seen: jax.Array  # bool [B, V] ids among the tokens read


@partial(jax.jit, static_argnames=("graph", "lora"), donate_argnames="rows")
def _read(
    graph: nnx.GraphDef[Transformer],
    lora: LoraConfig | None,
    parameters: Any,
    adapters: Any,
    rows: Rows,
    tokens: jax.Array,  # int32 [B, T]
    counts: jax.Array,  # int32 [B] tokens that are real
) -> Rows:
    model = nnx.merge(graph, parameters)
    rows, hidden = _forward(model, lora, adapters, rows, tokens, counts)
    last = hidden[jnp.arange(len(counts)), jnp.maximum(counts, 1) - 1]  # [B, D]
    return _advanced(rows, tokens, counts, model.logits(last))


def _forward(
    model: Transformer, lora: LoraConfig | None, adapters: Any, rows: Rows, tokens: jax.Array, counts: jax.Array
) -> tuple[Rows, jax.Array]:
    """Hidden states [B, T, D] of tokens that come next; keys, values and ids are in their slots, nothing else moves."""
    batch, time = tokens.shape
    positions = rows.lengths[:, None] + jnp.arange(time)
    is_real = jnp.arange(time) < counts[:, None]
    attention = CachedAttention(rows.cache, positions=positions, is_real=is_real)
    hidden = model(
        tokens,
        segment_ids=is_real.astype(jnp.int32),
        positions=positions,
        adapters=None if lora is None else layer_adapters(adapters, lora),
        attends=[attention.of_layer(number) for number in range(model.config.num_layers)],
    )
    slots = jnp.where(is_real, positions, rows.cache.slots)
    ids = rows.ids.at[jnp.arange(batch)[:, None], slots].set(tokens, mode="drop")
    return rows._replace(cache=attention.cache, ids=ids), hidden.reshape(batch, time, -1)


def _advanced(rows: Rows, tokens: jax.Array, counts: jax.Array, scores: jax.Array) -> Rows:
    """The rows once the first `counts` of `tokens` [B, T] count as read, with the scores [B, V] of what follows."""
    is_read = jnp.arange(tokens.shape[1]) < counts[:, None]
    return rows._replace(
        lengths=rows.lengths + counts,
        scores=jnp.where(counts[:, None] > 0, scores, rows.scores),
        seen=_marked(rows.seen, tokens, is_read),
    )


def _marked(seen: jax.Array, tokens: jax.Array, is_real: jax.Array) -> jax.Array:
    """`seen` [B, V] with the real ones of `tokens` [B, T]."""
    numbers = jnp.arange(tokens.shape[0])[:, None]
    return seen.at[numbers, jnp.where(is_real, tokens, seen.shape[1])].set(True, mode="drop")


class _Decoding(NamedTuple):
    """The carry of the decoding loop."""

    rows: Rows
    is_active: jax.Array  # bool [B]
    new: jax.Array  # int32 [B, N] ids so far; -1 where there is none yet
    counts: jax.Array  # int32 [B] how many
    passes: jax.Array  # int32


@partial(jax.jit, static_argnames=("graph", "lora", "guesses"), donate_argnames="rows")
def _extend(
    graph: nnx.GraphDef[Transformer],
    lora: LoraConfig | None,
    parameters: Any,
    adapters: Any,
    rows: Rows,
    sampling: Sampling,
    uniforms: jax.Array,  # float [B, N]
    stop_ids: jax.Array,  # int32 [any]
    is_active: jax.Array,  # bool [B]
    steps: jax.Array,  # int32, at most N
    guesses: int,
) -> tuple[Rows, jax.Array, jax.Array]:
    """Rows, new ids [B, N] with a stop id among them and -1 where there is none, and passes through the model."""
    model = nnx.merge(graph, parameters)
    numbers, most = jnp.arange(len(is_active)), uniforms.shape[1]  # column `most` is none: a write there is dropped

    def goes_on(state: _Decoding) -> jax.Array:
        return jnp.any(state.is_active & (state.counts < steps))

    def choose(scores: jax.Array, seen: jax.Array, places: jax.Array) -> jax.Array:
        return sample(scores, seen, sampling, uniforms[numbers, jnp.minimum(places, most - 1)])

    def add_tokens(state: _Decoding) -> _Decoding:
        rows, counts = state.rows, state.counts
        writes = state.is_active & (counts < steps)
        first = choose(rows.scores, rows.seen, counts)
        new = state.new.at[numbers, jnp.where(writes, counts, most)].set(first, mode="drop")
        is_active = state.is_active & ~(writes & jnp.isin(first, stop_ids)) & (rows.lengths < rows.cache.slots)
        reads = writes & is_active
        room = jnp.minimum(steps - counts - 1, rows.cache.slots - rows.lengths - 1)
        guess, size = looked_up(rows.ids, rows.lengths, first, guesses)
        size = jnp.where(reads, jnp.minimum(size, room), 0)
        tokens = jnp.concatenate([first[:, None], guess], axis=1)  # [B, 1 + guesses]
        rows, hidden = _forward(model, lora, adapters, rows, tokens, jnp.where(reads, 1 + size, 0))
        scores = model.logits(hidden.reshape(-1, hidden.shape[-1])).reshape(*tokens.shape, -1)  # [B, 1 + guesses, V]
        # A guess counts when it is what would have been chosen in its place.
        right, seen = jnp.zeros_like(counts), _marked(rows.seen, first[:, None], reads[:, None])
        for number in range(guesses):
            chosen = choose(scores[:, number], seen, counts + 1 + number)
            is_right = (right == number) & (number < size) & (chosen == guess[:, number])
            is_right &= ~jnp.isin(chosen, stop_ids)
            right += is_right
            new = new.at[numbers, jnp.where(is_right, counts + 1 + number, most)].set(chosen, mode="drop")
            seen = _marked(seen, chosen[:, None], is_right[:, None])
        rows = _advanced(rows, tokens, jnp.where(reads, 1 + right, 0), scores[numbers, right])
        return _Decoding(rows, is_active, new, counts + writes * (1 + right), state.passes + 1)

    new = jnp.full(uniforms.shape, -1, jnp.int32)
    start = _Decoding(rows, is_active, new, jnp.zeros(len(is_active), jnp.int32), jnp.int32(0))
    end = jax.lax.while_loop(goes_on, add_tokens, start)
    return end.rows, end.new, end.passes


@partial(jax.jit, donate_argnames="rows")
def _kept(rows: Rows, lengths: jax.Array) -> Rows:
    lengths = jnp.minimum(rows.lengths, lengths)
    is_kept = jnp.arange(rows.ids.shape[1]) < lengths[:, None]
    return rows._replace(lengths=lengths, seen=_marked(jnp.zeros_like(rows.seen), rows.ids, is_kept))


@partial(jax.jit, static_argnames="times")
def _repeated(rows: Rows, times: int) -> Rows:
    return jax.tree.map(lambda leaf: jnp.repeat(leaf, times, axis=0), rows)


class JaxDecoder:
    """Rows of tokens that a model reads and continues: minigpt_jax/generation.py's `Decoder` in JAX.

    Args:
        config: the model's shape.
        parameters: in the layout of minigpt_jax/initialization.py.
        dtype: of the computation.
        adapters: a tree of adapters beside the parameters, with `lora` that they were made with.
    """

    def __init__(
        self,
        config: ModelConfig,
        parameters: Any,
        *,
        dtype: jnp.dtype = jnp.float32,
        adapters: Any = None,
        lora: LoraConfig | None = None,
    ):
        self._graph = model_graph(config, dtype=dtype, kernel="reference")
        self._config, self._dtype = config, dtype
        self._parameters, self._adapters, self._lora = parameters, adapters, lora
        self._rows: Rows | None = None
        self.passes = 0
        """Passes through the model that decoding has taken, reading not counted."""

    @property
    def lengths(self) -> list[int]:
        """Tokens that each row holds."""
        return [int(length) for length in self._known.lengths]

    @property
    def _known(self) -> Rows:
        assert self._rows is not None, "start comes first"
        return self._rows

    def start(self, *, rows: int, slots: int) -> None:
        """Empty rows, with room for at least `slots` tokens each."""
        size = SLOT_MULTIPLE
        while size < slots:
            size *= 2
        scores = jnp.promote_types(self._dtype, jnp.float32)
        vocab_size = self._config.vocab_size
        self._rows = Rows(
            empty_cache(self._config, rows=rows, slots=size, dtype=self._dtype),
            jnp.zeros((rows, size), jnp.int32),
            jnp.zeros(rows, jnp.int32),
            jnp.zeros((rows, vocab_size), scores),
            jnp.zeros((rows, vocab_size), bool),
        )

    def read(self, tokens: Sequence[Sequence[int]]) -> None:
        """Append tokens to each row; rows may get unlike numbers of them, also none."""
        counts = np.array([len(row) for row in tokens])
        done = 0
        while done < counts.max():
            left = counts.max() - done
            width = next((bucket for bucket in reversed(BUCKETS) if bucket >= left), BUCKETS[0])
            block = np.zeros((len(tokens), width), np.int32)
            for number, row in enumerate(tokens):
                part = row[done : done + width]
                block[number, : len(part)] = part
            real = np.clip(counts - done, 0, width).astype(np.int32)
            self._rows = _read(
                self._graph, self._lora, self._parameters, self._adapters, self._known, block, real
            )  # fmt: skip
            done += width

    def keep(self, lengths: Sequence[int]) -> None:
        """Forget what each row holds after its first `lengths` tokens; at least one more is read before decoding."""
        self._rows = _kept(self._known, np.array(lengths, np.int32))

    def repeat(self, times: int) -> None:
        """Each row `times` times over, one beside the other."""
        self._rows = _repeated(self._known, times)

    def extend(
        self,
        configs: Sequence[GenerationConfig],
        *,
        uniforms: NDArray[np.float32],  # [B, up to STEPS]
        stop_ids: Sequence[int],
        is_active: Sequence[bool],
    ) -> list[list[int]]:
        """New ids of the rows that are active: one for each column of `uniforms`, or up to the first stop id.

        A stop id is the last of its row's ids, and is not read: the row does not hold it.
        """
        steps = uniforms.shape[1]
        padded = np.zeros((len(configs), STEPS), np.float32)
        padded[:, :steps] = uniforms
        self._rows, new, passes = _extend(
            self._graph,
            self._lora,
            self._parameters,
            self._adapters,
            self._known,
            sampling_of(configs, dtype=self._known.scores.dtype),
            padded,
            np.array(stop_ids, np.int32),
            np.array(is_active),
            np.int32(steps),
            max(config.guesses for config in configs),
        )
        self.passes += int(passes)
        return [row[row >= 0].tolist() for row in np.asarray(new)]


def sampling_of(configs: Sequence[GenerationConfig], *, dtype: jnp.dtype) -> Sampling:
    """The settings of each row as arrays; `dtype` is that of the scores."""

    def column(name: str, dtype: Any) -> Any:
        return np.array([getattr(config, name) for config in configs], dtype)

    return Sampling(
        repetition_penalty=column("repetition_penalty", dtype),
        temperature=column("temperature", dtype),
        top_k=column("top_k", np.int32),
        top_p=column("top_p", dtype),
        min_p=column("min_p", dtype),
    )
