"""What a person asks of generation, and the one loop that gives it, whichever framework computes.

Framework-free: a Decoder holds rows of tokens and adds to them; minigpt_jax/generate.py and minigpt_torch/generate.py
have one each. The random numbers come from here, so that the same seed draws the same tokens in both.

B rows  N tokens of one decoding call
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from minigpt_jax.errors import UserError
from minigpt_jax.logprobs import TokenLogprob
from minigpt_jax.row_text import RowText
from minigpt_jax.tokenizer import Tokenizer

STEPS = 32
"""The most tokens of one decoding call."""

STREAMED_STEPS = 4
"""Tokens of one call while somebody reads along."""

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class GenerationConfig:
    """How a row goes on. Validated when it is made.

    Raises:
        UserError: a value that cannot be.
    """

    max_new_tokens: int = 256
    """The most tokens that are added."""
    temperature: float = 0.85
    """Scores are divided by it before a token is drawn; 0 always takes the likeliest."""
    top_k: int = 0
    """Draw from the k likeliest tokens only; 0 for all."""
    top_p: float = 0.85
    """Draw from the likeliest tokens whose probabilities reach this together; 1 for all."""
    min_p: float = 0.0
    """Draw from tokens at least this part as likely as the likeliest; 0 for all."""
    repetition_penalty: float = 1.0
    """Above 1, tokens that the row holds already, prompt included, become less likely."""
    seed: int = 42
    """Decides every draw. Row and place are part of it: rows differ, and a row does not depend on the others."""
    stop: tuple[str, ...] = ()
    """Strings before which the text ends, besides the end mark."""
    guesses: int = 0
    """Tokens that are guessed ahead from what followed the same two tokens earlier, and checked in one pass. The text
    is the same; where it repeats itself it comes sooner."""

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 1), ("top_k", 0), ("seed", 0), ("guesses", 0)):
            value = getattr(self, name)
            _require(least <= value < 2**31, f"--{_dashed(name)} must be at least {least}, got {value}")
        _require(self.guesses < STEPS, f"--guesses must be below {STEPS}, got {self.guesses}")
        _require(0 <= self.temperature < math.inf, f"--temperature must be 0 or more, got {self.temperature}")
        _require(0 < self.top_p <= 1, f"--top-p must be above 0 and at most 1, got {self.top_p}")
        _require(0 <= self.min_p <= 1, f"--min-p must lie between 0 and 1, got {self.min_p}")
        penalty = self.repetition_penalty
        _require(0 < penalty < math.inf, f"--repetition-penalty must be positive and finite, got {penalty}")
        _require("" not in self.stop, "--stop is an empty string, which every text has")


@dataclass(frozen=True)
class Extension:
    """What one decoding call added."""

    ids: list[list[int]]
    """Of each row."""
    logprobs: list[list[TokenLogprob]]
    """Of each id where they were asked for, else of none."""


class Decoder(Protocol):
    """Rows of tokens that a model reads and continues."""

    passes: int
    """Passes through the model that decoding has taken, reading not counted."""

    @property
    def lengths(self) -> list[int]:
        """Tokens that each row holds."""
        ...

    def start(self, *, rows: int, slots: int) -> None:
        """Empty rows, which may come to hold `slots` tokens each."""
        ...

    def read(self, tokens: Sequence[Sequence[int]]) -> None:
        """Append tokens to each row; rows may get unlike numbers of them, also none."""
        ...

    def keep(self, lengths: Sequence[int]) -> None:
        """Forget what each row holds after its first `lengths` tokens.

        A row that forgets something reads at least one more before it is decoded; others go on as they are.
        """
        ...

    def repeat(self, times: int) -> None:
        """Each row `times` times over, one beside the other."""
        ...

    def extend(
        self,
        configs: Sequence[GenerationConfig],
        *,
        uniforms: NDArray[np.float32],
        stop_ids: Sequence[int],
        is_active: Sequence[bool],
        num_logprobs: int | None = None,
    ) -> Extension:
        """New ids of the rows that are active: one for each column of `uniforms` [B, N], or up to the first stop id.

        A stop id is the last of its row's ids, and is not read: the row does not hold it. With `num_logprobs` each new
        id comes with its log-probability, and with those of that many likeliest ids, up to MOST_LOGPROBS.
        """
        ...


@dataclass(frozen=True)
class Completion:
    """How one row went on."""

    ids: list[int]
    """The new tokens; without the end mark, and up to the one that completed a stop string."""
    text: str
    """Without special tokens, and up to a stop string."""
    finish_reason: FinishReason
    """stop: an end mark or a stop string came; length: there was no room for more, or no more was asked for."""


OnText = Callable[[int, str], None]
"""(row, piece of its text): the pieces of a row, joined, are its whole text."""


def generate(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    *,
    context: int,
    samples: int = 1,
    on_text: OnText | None = None,
) -> list[Completion]:
    """Continue each prompt.

    Args:
        decoder: its rows are replaced.
        tokenizer: of the prompts.
        prompts: each with a token at least.
        config: of every row.
        context: the most tokens of a row, new ones included.
        samples: continuations of each prompt, which stand one after the other.
        on_text: told what can be read so far.

    Raises:
        UserError: a prompt leaves no room for a new token.
    """
    longest = max(map(len, prompts))
    if longest >= context:
        raise UserError(f"a prompt has {longest} tokens, and there is room for {context - 1}; shorten it")
    decoder.start(rows=len(prompts), slots=min(context, longest + config.max_new_tokens))
    decoder.read(prompts)
    if samples > 1:
        decoder.repeat(samples)
    return complete(decoder, tokenizer, config, context=context, on_text=on_text)


def complete(
    decoder: Decoder,
    tokenizer: Tokenizer,
    config: GenerationConfig,
    *,
    context: int,
    on_text: OnText | None = None,
) -> list[Completion]:
    """Continue the rows that a decoder holds; arguments as for `generate`."""
    continuation = Continuation(decoder, config, context=context, stop_ids=stop_ids_of(tokenizer))
    texts = [RowText(tokenizer, config.stop) for _ in continuation.rows]
    while continuation.is_going:
        new = continuation.step(STEPS if on_text is None else STREAMED_STEPS)
        for number, (row, text, ids) in enumerate(zip(continuation.rows, texts, new, strict=True)):
            piece = take(row, text, ids)
            if on_text is not None and piece:
                on_text(number, piece)
    return [
        Completion(row.ids, text.text, row.finish_reason or "length")
        for row, text in zip(continuation.rows, texts, strict=True)
    ]


def stop_ids_of(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids that end a row."""
    return tokenizer.eos_id, tokenizer.pad_id


def greedy(
    decoder: Decoder, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, stop_id: int
) -> list[list[int]]:  # fmt: skip
    """The likeliest continuation of each prompt, up to and without `stop_id`."""
    context = max(map(len, prompts)) + max_new_tokens
    decoder.start(rows=len(prompts), slots=context)
    decoder.read(prompts)
    config = GenerationConfig(max_new_tokens=max_new_tokens, temperature=0.0)
    continuation = Continuation(decoder, config, context=context, stop_ids=(stop_id,))
    while continuation.is_going:
        continuation.step(STEPS)
    return [row.ids for row in continuation.rows]


# --- Ids ---


class RowIds:
    """The new ids of one row, and the numbers that draw them.

    Args:
        config: how the row goes on.
        length: the tokens that it holds already.
        context: the most that it may hold.
        row: which of the seed's streams of numbers it draws from.
        stop_ids: ids that end it.
    """

    def __init__(self, config: GenerationConfig, *, length: int, context: int, row: int, stop_ids: Sequence[int]):
        self.config = config
        self._room = min(config.max_new_tokens, context - length)
        self._uniforms = uniform_numbers(config.seed, row=row, count=self._room)
        self._stop_ids = stop_ids
        self.ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        """None while it goes on."""

    @property
    def room(self) -> int:
        """How many more ids there may be."""
        return self._room - len(self.ids)

    def numbers(self, steps: int) -> NDArray[np.float32]:
        """[steps] numbers from the row's own place on, which has room for them."""
        return self._uniforms[len(self.ids) : len(self.ids) + steps]

    def take(self, new: Sequence[int]) -> list[int]:
        """Add what a decoding call gave; returns it without the stop id."""
        has_stopped = bool(new) and new[-1] in self._stop_ids
        ids = list(new[:-1] if has_stopped else new)
        self.ids += ids
        if has_stopped:
            self.finish_reason = "stop"
        elif not self.room:
            self.finish_reason = "length"
        return ids


def take(row: RowIds, text: RowText, new: Sequence[int]) -> str:
    """What can be read after a row's newest ids; the row ends where a stop string does."""
    taken = text.push(new)
    if text.has_stopped:
        row.ids = row.ids[: len(row.ids) - len(new) + taken]
        row.finish_reason = "stop"
    if row.finish_reason is not None:
        text.finish()
    return text.fresh(is_last=row.finish_reason is not None)


class Continuation:
    """New ids of a decoder's rows, some at a time.

    Args:
        decoder: holds the rows, each with a token at least.
        config: of every row.
        context: the most tokens of a row, new ones included.
        stop_ids: ids that end a row.
    """

    def __init__(self, decoder: Decoder, config: GenerationConfig, *, context: int, stop_ids: Sequence[int]):
        self._decoder, self._stop_ids = decoder, stop_ids
        self.rows = [
            RowIds(config, length=length, context=context, row=row, stop_ids=stop_ids)
            for row, length in enumerate(decoder.lengths)
        ]

    @property
    def is_going(self) -> bool:
        """Whether a row goes on."""
        return any(row.finish_reason is None for row in self.rows)

    def step(self, most: int) -> list[list[int]]:
        """Up to `most` new ids of each row, also none; they are in `rows` as well."""
        going = [row if row.finish_reason is None else None for row in self.rows]
        new = extend_rows(self._decoder, going, most=most, stop_ids=self._stop_ids)
        return [row.take(ids) for row, ids in zip(self.rows, new.ids, strict=True)]


def extend_rows(
    decoder: Decoder,
    rows: Sequence[RowIds | None],
    *,
    most: int,
    stop_ids: Sequence[int],
    num_logprobs: int | None = None,
) -> Extension:
    """One decoding call: up to `most` new ids of each row, as many as all have room for. A row that is None rests."""
    steps = min(most, *(row.room for row in rows if row is not None))
    uniforms = np.zeros((len(rows), steps), np.float32)
    for into, row in zip(uniforms, rows, strict=True):
        if row is not None:
            into[:] = row.numbers(steps)
    return decoder.extend(
        [GenerationConfig() if row is None else row.config for row in rows],
        uniforms=uniforms,
        stop_ids=stop_ids,
        is_active=[row is not None for row in rows],
        num_logprobs=num_logprobs,
    )


def uniform_numbers(seed: int, *, row: int, count: int) -> NDArray[np.float32]:
    """[count] numbers in [0, 1) for the draws of a row; a longer count begins with a shorter one's.

    Raw generator output, whose stream numpy promises never to change, in the 24 bits that a float32 holds.
    """
    bits = np.random.Philox(key=np.array([seed, row], np.uint64)).random_raw(count) >> np.uint64(40)
    return (bits * 2.0**-24).astype(np.float32)


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)
