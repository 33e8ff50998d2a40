"""Generation in JAX: rows of tokens with a key/value cache, read in buckets, extended in a compiled loop.

A row may guess ahead: where its last two tokens stood before, what followed them there is read along in the same pass,
and kept as far as it is what would have been chosen anyway. Nothing changes but the number of passes.

A call computes the rows that take part in it alone, their number rounded up to a power of two, with as many slots as
the longest of them needs, rounded up likewise, and at least USUAL_SLOTS where rows may come to need them. So 16 rows of
up to 2048 tokens make at most 5 x 3 compilations of reading for each width of a bucket, and 5 x 3 of the loop for each
number of guesses, with and without log-probabilities; no length of a prompt makes its own.
minigpt_jax/generation.py drives it; the twin is minigpt_torch/generate.py.

B rows  R rows that take part  T tokens read at once  N tokens of one decoding call  G guesses
D hidden  V vocabulary
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from minigpt_jax.config import ModelConfig
from minigpt_jax.generation import STEPS, Extension, GenerationConfig
from minigpt_jax.int8 import int8_graph
from minigpt_jax.kv_cache import CachedAttention, empty_cache
from minigpt_jax.logprobs import TokenLogprob, token_logprobs
from minigpt_jax.lora import layer_adapters
from minigpt_jax.lora_config import LoraConfig
from minigpt_jax.model import Transformer, model_graph
from minigpt_jax.rows import Rows, advanced, kept, marked, padded_numbers, put_back, repeated, taken, widened
from minigpt_jax.sampling import Logprobs, Sampling, logprobs_of, looked_up, no_logprobs, sample

BUCKETS = (512, 256, 128, 64, 32, 16)
"""Tokens that are read at once; the rest of a prompt is padded to the narrowest that holds it."""

SLOT_MULTIPLE, USUAL_SLOTS = 128, 512
"""The slots that a call computes are the first, or a power of two times it: where no row is to outgrow USUAL_SLOTS, as
many as `start` asks for, so that a text is not held up by a second compilation in its middle; else at least these."""


@partial(jax.jit, static_argnames=("graph", "lora"), donate_argnames="rows")
def _read(
    graph: nnx.GraphDef[Transformer],
    lora: LoraConfig | None,
    parameters: Any,
    adapters: Any,
    rows: Rows,
    tokens: jax.Array,  # int32 [R, T]
    counts: jax.Array,  # int32 [R] tokens that are real
) -> Rows:
    model = nnx.merge(graph, parameters)
    rows, hidden = _forward(model, lora, adapters, rows, tokens, counts)
    last = hidden[jnp.arange(len(counts)), jnp.maximum(counts, 1) - 1]  # [R, D]
    return advanced(rows, tokens, counts, model.logits(last))


def _forward(
    model: Transformer, lora: LoraConfig | None, adapters: Any, rows: Rows, tokens: jax.Array, counts: jax.Array
) -> tuple[Rows, jax.Array]:
    """Hidden states [R, T, D] of tokens that come next; keys, values and ids are in their slots, nothing else moves."""
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


Choose = Callable[[jax.Array, jax.Array, int], jax.Array]
"""(scores [R, V], seen [R, V], which of a pass's tokens) -> the ids [R] that are chosen."""


class _New(NamedTuple):
    """What decoding has added."""

    ids: jax.Array  # int32 [R, N]; -1 where there is none yet
    logprobs: Logprobs | None  # [R, N]; None when nobody asked


class _Decoding(NamedTuple):
    """The carry of the decoding loop."""

    rows: Rows
    is_active: jax.Array  # bool [R]
    new: _New
    counts: jax.Array  # int32 [R] how many
    passes: jax.Array  # int32


@partial(jax.jit, static_argnames=("graph", "lora", "guesses", "gives_logprobs"), donate_argnames="rows")
def _extend(
    graph: nnx.GraphDef[Transformer],
    lora: LoraConfig | None,
    parameters: Any,
    adapters: Any,
    rows: Rows,
    sampling: Sampling,
    uniforms: jax.Array,  # float [R, N]
    stop_ids: jax.Array,  # int32 [any]
    is_active: jax.Array,  # bool [R]
    steps: jax.Array,  # int32, at most N
    guesses: int,
    gives_logprobs: bool,
) -> tuple[Rows, _New, jax.Array]:
    """Rows, what was added to them with a stop id among it, and passes through the model."""
    model = nnx.merge(graph, parameters)
    numbers, most = jnp.arange(len(is_active)), uniforms.shape[1]  # column `most` is none: a write there is dropped

    def goes_on(state: _Decoding) -> jax.Array:
        return jnp.any(state.is_active & (state.counts < steps))

    def choose(scores: jax.Array, seen: jax.Array, number: int, *, counts: jax.Array) -> jax.Array:
        return sample(scores, seen, sampling, uniforms[numbers, jnp.minimum(counts + number, most - 1)])

    def write(new: _New, ids: jax.Array, scores: jax.Array, places: jax.Array) -> _New:
        given = _New(ids, logprobs_of(scores, ids) if gives_logprobs else None)
        return jax.tree.map(lambda into, each: into.at[numbers, places].set(each, mode="drop"), new, given)

    def add_tokens(state: _Decoding) -> _Decoding:
        rows, counts = state.rows, state.counts
        writes = state.is_active & (counts < steps)
        first = choose(rows.scores, rows.seen, 0, counts=counts)
        new = write(state.new, first, rows.scores, jnp.where(writes, counts, most))
        is_active = state.is_active & ~(writes & jnp.isin(first, stop_ids))
        reads = writes & is_active
        guess, size = looked_up(rows.ids, rows.lengths, first, guesses)
        size = jnp.where(reads, jnp.minimum(size, steps - counts - 1), 0)
        tokens = jnp.concatenate([first[:, None], guess], axis=1)  # [R, 1 + G]
        rows, hidden = _forward(model, lora, adapters, rows, tokens, jnp.where(reads, 1 + size, 0))
        scores = model.logits(hidden.reshape(-1, hidden.shape[-1])).reshape(*tokens.shape, -1)  # [R, 1 + G, V]
        seen = marked(rows.seen, first[:, None], reads[:, None])
        right = _right_guesses(guess, size, scores, seen, stop_ids, partial(choose, counts=counts))
        for number in range(guesses):
            new = write(new, guess[:, number], scores[:, number], jnp.where(number < right, counts + 1 + number, most))
        rows = advanced(rows, tokens, jnp.where(reads, 1 + right, 0), scores[numbers, right])
        return _Decoding(rows, is_active, new, counts + writes * (1 + right), state.passes + 1)

    none = no_logprobs(uniforms.shape, rows.scores) if gives_logprobs else None
    new = _New(jnp.full(uniforms.shape, -1, jnp.int32), none)
    start = _Decoding(rows, is_active, new, jnp.zeros(len(is_active), jnp.int32), jnp.int32(0))
    end = jax.lax.while_loop(goes_on, add_tokens, start)
    return end.rows, end.new, end.passes


def _right_guesses(
    guess: jax.Array,  # int32 [R, G]
    size: jax.Array,  # int32 [R] how many there are
    scores: jax.Array,  # float [R, 1 + G, V] of what stands in their places, and of what follows them
    seen: jax.Array,  # bool [R, V]
    stop_ids: jax.Array,
    choose: Choose,
) -> jax.Array:  # int32 [R]
    """How many guesses are what is chosen in their places, up to the first that is not, or is a stop id."""
    right = jnp.zeros(len(size), jnp.int32)
    for number in range(guess.shape[1]):
        chosen = choose(scores[:, number], seen, 1 + number)
        is_right = (right == number) & (number < size) & (chosen == guess[:, number]) & ~jnp.isin(chosen, stop_ids)
        right += is_right
        seen = marked(seen, chosen[:, None], is_right[:, None])
    return right


class JaxDecoder:
    """Rows of tokens that a model reads and continues: minigpt_jax/generation.py's `Decoder` in JAX.

    Args:
        config: the model's shape.
        parameters: in the layout of minigpt_jax/initialization.py.
        dtype: of the computation.
        int8: the parameters are those of minigpt_jax/quantization.py's `int8_parameters`.
        adapters: a tree of adapters beside the parameters, with `lora` that they were made with.
    """

    def __init__(
        self,
        config: ModelConfig,
        parameters: Any,
        *,
        dtype: jnp.dtype = jnp.float32,
        int8: bool = False,
        adapters: Any = None,
        lora: LoraConfig | None = None,
    ):
        self._graph = (int8_graph if int8 else model_graph)(config, dtype=dtype, kernel="reference")
        self._config, self._dtype = config, dtype
        self._parameters, self._adapters, self._lora = parameters, adapters, lora
        self._rows: Rows | None = None
        self._fewest_slots = SLOT_MULTIPLE
        self.passes = 0
        """Passes through the model that decoding has taken, reading not counted."""

    @property
    def lengths(self) -> list[int]:
        """Tokens that each row holds."""
        lengths: list[int] = np.asarray(self._known.lengths).tolist()
        return lengths

    @property
    def _known(self) -> Rows:
        assert self._rows is not None, "start comes first"
        return self._rows

    def start(self, *, rows: int, slots: int) -> None:
        """Empty rows, which may come to hold `slots` tokens each; slots are added when they are needed."""
        scores = jnp.promote_types(self._dtype, jnp.float32)
        self._fewest_slots = size = _rounded_up(min(slots, USUAL_SLOTS))
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
        left = [*tokens, ()]  # the last stands in for rows that are none
        while longest := max(map(len, left)):
            width = next((bucket for bucket in reversed(BUCKETS) if bucket >= longest), BUCKETS[0])
            counts = np.array([min(len(row), width) for row in left], np.int32)
            block = np.zeros((len(left), width), np.int32)
            for into, row, count in zip(block, left, counts, strict=True):
                into[:count] = row[:count]
            numbers, part = self._take(counts[:-1])
            part = _read(
                self._graph, self._lora, self._parameters, self._adapters, part, block[numbers], counts[numbers]
            )  # fmt: skip
            self._rows = put_back(self._known, part, numbers)
            left = [row[width:] for row in left]

    def _take(self, more: NDArray[np.int32]) -> tuple[NDArray[np.int32], Rows]:
        """Numbers and a part of the rows to which `more` [B] tokens come, with slots for them."""
        lengths = np.where(more > 0, self.lengths + more, 0)
        slots = max(self._fewest_slots, _rounded_up(lengths.max()))
        if slots > self._known.cache.slots:
            self._rows = widened(self._known, slots)
        numbers = padded_numbers(more > 0)
        return numbers, taken(self._known, numbers, slots)

    def keep(self, lengths: Sequence[int]) -> None:
        """Forget what each row holds after its first `lengths` tokens; those that do read at least one more."""
        self._rows = kept(self._known, np.array(lengths, np.int32))

    def repeat(self, times: int) -> None:
        """Each row `times` times over, one beside the other."""
        self._rows = repeated(self._known, times)

    def extend(
        self,
        configs: Sequence[GenerationConfig],
        *,
        uniforms: NDArray[np.float32],  # [B, up to STEPS]
        stop_ids: Sequence[int],
        is_active: Sequence[bool],
        num_logprobs: int | None = None,
    ) -> Extension:
        """New ids of the rows that are active: one for each column of `uniforms`, or up to the first stop id.

        A stop id is the last of its row's ids, and is not read: the row does not hold it. With `num_logprobs` each new
        id comes with its log-probability, and with those of that many likeliest ids.
        """
        steps = uniforms.shape[1]
        padded = np.zeros((len(configs) + 1, STEPS), np.float32)  # the last stands in for rows that are none
        padded[:-1, :steps] = uniforms
        active, settings = np.array([*is_active, False]), [*configs, configs[0]]
        numbers, part = self._take(np.where(active[:-1], steps, 0))
        part, new, passes = _extend(
            self._graph,
            self._lora,
            self._parameters,
            self._adapters,
            part,
            sampling_of([settings[number] for number in numbers], dtype=part.scores.dtype),
            padded[numbers],
            np.array(stop_ids, np.int32),
            active[numbers],
            np.int32(steps),
            max(config.guesses for config in configs),
            num_logprobs is not None,
        )
        self._rows = put_back(self._known, part, numbers)
        self.passes += int(passes)
        return _extension(jax.tree.map(np.asarray, new), numbers, rows=len(configs), num_logprobs=num_logprobs)


def _rounded_up(slots: int) -> int:
    size = SLOT_MULTIPLE
    while size < slots:
        size *= 2
    return size


def _extension(new: Any, numbers: NDArray[np.int32], *, rows: int, num_logprobs: int | None) -> Extension:
    """What was added to rows of these numbers, from a `_New` in NumPy."""
    ids: list[list[int]] = [[] for _ in range(rows)]
    logprobs: list[list[TokenLogprob]] = [[] for _ in range(rows)]
    for place, number in enumerate(numbers):
        is_own = new.ids[place] >= 0
        if is_own.any():
            ids[number] = new.ids[place][is_own].tolist()
            if num_logprobs is not None:
                own = (leaf[place][is_own] for leaf in new.logprobs)
                logprobs[number] = token_logprobs(ids[number], *own, number=num_logprobs)
    return Extension(ids, logprobs)


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
