"""How likely a model finds the tokens of a text, whichever framework computes.

Framework-free: a Scorer reads rows of one width; minigpt_jax/evaluate.py and minigpt_torch/evaluate.py have one each.
Here rows of unlike length are sorted, so that neighbours share a batch, and padded to one of few widths, so that few
are compiled. Neither the order of the rows nor the size of a batch decides what a row is given, beyond rounding.

B rows  L tokens of a row  T predictions of a batch's rows  C tokens of a row that count
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from minigpt_jax.errors import UserError

NARROWEST = 64
"""Predictions of the narrowest batch; the others are this times a power of two, up to the longest row allowed."""


class TokenScores(NamedTuple):
    """What a model says of tokens, each given those before it."""

    log_probabilities: NDArray[np.floating[Any]]
    """In nats; in at least float32."""
    is_likeliest: NDArray[np.bool_]
    """Whether no other token is likelier: whether greedy decoding would have written it."""


class Scorer(Protocol):
    """A model that says how likely it finds tokens."""

    def score(self, tokens: NDArray[np.int32], counts: NDArray[np.bool_]) -> TokenScores:
        """The scores [B, T] of the last T of T + 1 tokens.

        Args:
            tokens: [B, T+1], padded at the end.
            counts: [B, T] which of the last T are asked about; the rest is 0 and False.
        """
        ...


@dataclass(frozen=True)
class Row:
    """Tokens that are read together, and which of them are asked about."""

    ids: NDArray[np.int32]  # [L], at least 2
    counts: NDArray[np.bool_]  # [L]
    """The first is not asked about: nothing stands before it."""

    @property
    def predictions(self) -> int:
        """Tokens that have one before them."""
        return len(self.ids) - 1


def continuation_row(context: Sequence[int], continuation: Sequence[int]) -> Row:
    """A row of which the continuation is asked about; the context has a token at least."""
    ids = np.array([*context, *continuation], np.int32)
    return Row(ids, np.arange(len(ids)) >= len(context))


def windows(ids: NDArray[np.integer], counts: NDArray[np.bool_], *, max_seq_len: int) -> list[Row]:
    """A document as rows of at most `max_seq_len` predictions, each token predicted in exactly one.

    As in training: a row begins with the last token of the row before it, and sees nothing else of that row. Rows in
    which nothing counts are left out.

    Args:
        ids: [L] of the document.
        counts: [L] which of them are asked about; the first is not.
        max_seq_len: the most predictions of a row.
    """
    starts = range(0, len(ids) - 1, max_seq_len)
    rows = [
        Row(ids[start : start + max_seq_len + 1].astype(np.int32), counts[start : start + max_seq_len + 1])
        for start in starts
    ]
    return [row for row in rows if row.counts[1:].any()]


def score_rows(
    scorer: Scorer,
    rows: Sequence[Row],
    *,
    batch_size: int,
    max_seq_len: int,
    on_progress: Callable[[int], None] | None = None,
) -> list[TokenScores]:
    """The scores [C] of the tokens of each row that count, in their order.

    Args:
        scorer: of the model.
        rows: none has more than `max_seq_len` predictions.
        batch_size: rows that are read at once.
        max_seq_len: the width of the widest batch.
        on_progress: told how many rows are done.

    Raises:
        UserError: a log-probability is not finite.
    """
    # The longest come first: what does not fit into memory fails at once.
    order = sorted(range(len(rows)), key=lambda number: -rows[number].predictions)
    scores: dict[int, TokenScores] = {}
    size = max(1, min(batch_size, len(rows)))
    for first in range(0, len(rows), size):
        numbers = order[first : first + size]
        tokens, counts = _padded([rows[number] for number in numbers], size=size, max_seq_len=max_seq_len)
        batch = scorer.score(tokens, counts)
        if not np.isfinite(batch.log_probabilities).all():
            raise UserError("the model gives tokens a likelihood that is no number; its weights are damaged")
        for place, number in enumerate(numbers):
            scores[number] = TokenScores(*(each[place][counts[place]] for each in batch))
        if on_progress is not None:
            on_progress(len(scores))
    return [scores[number] for number in range(len(rows))]


def _padded(
    rows: Sequence[Row], *, size: int, max_seq_len: int
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:  # fmt: skip
    """Tokens [B, T+1] and counts [B, T] of `size` rows, empty ones at the end."""
    width, longest = NARROWEST, max(row.predictions for row in rows)
    while width < longest:
        width *= 2
    width = min(width, max_seq_len)
    tokens, counts = np.zeros((size, width + 1), np.int32), np.zeros((size, width), np.bool_)
    for number, row in enumerate(rows):
        tokens[number, : len(row.ids)] = row.ids
        counts[number, : row.predictions] = row.counts[1:]
    return tokens, counts
