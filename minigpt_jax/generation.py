"""What a person asks of generation, and the one loop that gives it, whichever framework computes.

Framework-free: a Decoder holds rows of tokens and adds to them; minigpt_jax/generate.py and minigpt_torch/generate.py
have one each. The random numbers come from here, so that the same seed draws the same tokens in both.

B rows  N tokens of one decoding call
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from minigpt_jax.errors import UserError
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


class Decoder(Protocol):
    """Rows of tokens that a model reads and continues."""

    passes: int
    """Passes through the model that decoding has taken, reading not counted."""

    @property
    def lengths(self) -> list[int]:
        """Tokens that each row holds."""
        ...

    def start(self, *, rows: int, slots: int) -> None:
        """Empty rows, with room for at least `slots` tokens each."""
        ...

    def read(self, tokens: Sequence[Sequence[int]]) -> None:
        """Append tokens to each row; rows may get unlike numbers of them, also none."""
        ...

    def keep(self, lengths: Sequence[int]) -> None:
        """Forget what each row holds after its first `lengths` tokens; at least one more is read before decoding."""
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
    ) -> list[list[int]]:
        """New ids of the rows that are active: one for each column of `uniforms` [B, N], or up to the first stop id.

        A stop id is the last of its row's ids, and is not read: the row does not hold it.
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
    continuation = Continuation(
        decoder, config, context=context, stop_ids=(tokenizer.eos_id, tokenizer.pad_id)
    )  # fmt: skip
    texts = [_RowText(tokenizer, config.stop) for _ in continuation.rows]
    while continuation.is_going:
        new = continuation.step(STEPS if on_text is None else STREAMED_STEPS)
        for number, (row, text, ids) in enumerate(zip(continuation.rows, texts, new, strict=True)):
            taken = text.push(ids)
            if text.has_stopped:
                row.ids = row.ids[: len(row.ids) - len(ids) + taken]
                row.finish_reason = "stop"
            if row.finish_reason is not None:
                text.finish()
            piece = text.fresh(is_last=row.finish_reason is not None)
            if on_text is not None and piece:
                on_text(number, piece)
    return [
        Completion(row.ids, text.text, row.finish_reason or "length")
        for row, text in zip(continuation.rows, texts, strict=True)
    ]


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


@dataclass
class RowIds:
    """The new ids of one row."""

    ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    """None while it goes on."""


class Continuation:
    """New ids of a decoder's rows, some at a time.

    Args:
        decoder: holds the rows, each with a token at least.
        config: of every row.
        context: the most tokens of a row, new ones included.
        stop_ids: ids that end a row.
    """

    def __init__(self, decoder: Decoder, config: GenerationConfig, *, context: int, stop_ids: Sequence[int]):
        self._decoder, self._config, self._stop_ids = decoder, config, stop_ids
        lengths = decoder.lengths
        self.rows = [RowIds() for _ in lengths]
        self._room = [min(config.max_new_tokens, context - length) for length in lengths]
        self._uniforms = np.stack(
            [uniform_numbers(config.seed, row=row, count=config.max_new_tokens) for row in range(len(lengths))]
        )

    @property
    def is_going(self) -> bool:
        """Whether a row goes on."""
        return any(row.finish_reason is None for row in self.rows)

    def step(self, most: int) -> list[list[int]]:
        """Up to `most` new ids of each row, also none; they are in `rows` as well."""
        is_active = [row.finish_reason is None for row in self.rows]
        room = [left - len(row.ids) for left, row in zip(self._room, self.rows, strict=True)]
        steps = min(most, min(left for left, active in zip(room, is_active, strict=True) if active))
        new = self._decoder.extend(
            [self._config] * len(self.rows),
            uniforms=self._numbers(steps),
            stop_ids=self._stop_ids,
            is_active=is_active,
        )
        for number, (row, ids) in enumerate(zip(self.rows, new, strict=True)):
            if ids and ids[-1] in self._stop_ids:
                row.finish_reason = "stop"
                del ids[-1]
            row.ids += ids
            if row.finish_reason is None and len(row.ids) == self._room[number]:
                row.finish_reason = "length"
        return new

    def _numbers(self, steps: int) -> NDArray[np.float32]:
        """[B, steps] numbers of each row from its own place on."""
        numbers = np.zeros((len(self.rows), steps), np.float32)
        for row, own, into in zip(self.rows, self._uniforms, numbers, strict=True):
            part = own[len(row.ids) : len(row.ids) + steps]
            into[: len(part)] = part
        return numbers


def uniform_numbers(seed: int, *, row: int, count: int) -> NDArray[np.float32]:
    """[count] numbers in [0, 1) for the draws of a row; a longer count begins with a shorter one's.

    Raw generator output, whose stream numpy promises never to change, in the 24 bits that a float32 holds.
    """
    bits = np.random.Philox(key=np.array([seed, row], np.uint64)).random_raw(count) >> np.uint64(40)
    return (bits * 2.0**-24).astype(np.float32)


# --- Text ---


class _RowText:
    """The text of one row: whole characters, up to the first stop string."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]):
        self._characters = tokenizer.stream_decoder(skip_special_tokens=True)
        self._stop = stop
        self._given = 0
        self.text = ""
        self.has_stopped = False

    def push(self, ids: Sequence[int]) -> int:
        """Take ids; returns how many of them the text needs."""
        for number, id in enumerate(ids):
            self.text += self._characters.push(id)
            if self._cut():
                return number + 1
        return len(ids)

    def finish(self) -> None:
        """No more ids will come."""
        if not self.has_stopped:
            self.text += self._characters.finish()

    def fresh(self, *, is_last: bool) -> str:
        """What has not been given out; the end is held back as long as it may be the beginning of a stop string."""
        end = len(self.text)
        if not is_last:
            end -= max((self._overlap(stop) for stop in self._stop), default=0)
        piece = self.text[self._given : end]
        self._given = max(self._given, end)
        return piece

    def _cut(self) -> bool:
        places = [place for stop in self._stop if (place := self.text.find(stop)) >= 0]
        if places:
            self.text, self.has_stopped = self.text[: min(places)], True
        return self.has_stopped

    def _overlap(self, stop: str) -> int:
        """Length of the longest beginning of `stop` that the text ends with."""
        longest = min(len(stop) - 1, len(self.text))
        return next((size for size in range(longest, 0, -1) if self.text.endswith(stop[:size])), 0)


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)
