"""Held-out loss of a model: in all, by file and by language. Framework-free; the model is a Scorer.

A text is scored as it is trained on: every token after the mark that opens it, the mark at its end included. Of a
conversation the tokens count that are learned, by the mask `assistant` of minigpt_jax/data/chat.py. A document of more
than `max_seq_len` predictions is cut into windows (minigpt_jax/scoring.py), as training cuts it; each token counts
once. Nothing is left out, neither duplicates nor what lies behind the first window. Bits per byte divide by the bytes
of the tokens that count, marks standing for none, as the validation loss of training does.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from minigpt_jax.data.cache import OnProgress
from minigpt_jax.data.documents import ChatEncoding, TextEncoding
from minigpt_jax.data.record_forms import BadLineError, any_form
from minigpt_jax.data.records import ReadReport, read_validated, texts_of
from minigpt_jax.errors import UserError
from minigpt_jax.languages import language_of
from minigpt_jax.progress import LARGEST_EXPONENT
from minigpt_jax.scoring import Row, Scorer, score_rows, windows
from minigpt_jax.tokenizer import Tokenizer

BLOCK = 2048
"""Rows that are sorted by length together; memory does not grow with the data beyond them."""


@dataclass
class TokenSums:
    """Sums over tokens that were scored, at least one."""

    nats: float = 0.0
    tokens: int = 0
    text_bytes: int = 0

    @property
    def loss(self) -> float:
        """Mean negative log-likelihood of a token, in nats."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(min(self.loss, LARGEST_EXPONENT))

    @property
    def bits_per_byte(self) -> float | None:
        """Bits that a byte of the text costs; None where the tokens are marks alone."""
        return self.nats / math.log(2) / self.text_bytes if self.text_bytes else None

    def add(self, nats: float, tokens: int, text_bytes: int) -> None:
        """Count more tokens in."""
        self.nats += nats
        self.tokens += tokens
        self.text_bytes += text_bytes

    def to_json(self) -> dict[str, Any]:
        """The figures by their names in JSON."""
        names = ("loss", "perplexity", "bits_per_byte", "tokens", "text_bytes")
        return {name: getattr(self, name) for name in names}


@dataclass
class LossReport:
    """Held-out loss, in all and by what the documents are."""

    total: TokenSums = field(default_factory=TokenSums)
    by_source: dict[str, TokenSums] = field(default_factory=dict)
    """By file."""
    by_language: dict[str, TokenSums] = field(default_factory=dict)
    """By minigpt_jax/languages.py: zh, en, other."""

    def add(self, source: str, language: str, nats: float, tokens: int, text_bytes: int) -> None:
        """Count some tokens of a document in."""
        groups = self.by_source.setdefault(source, TokenSums()), self.by_language.setdefault(language, TokenSums())
        for sums in (self.total, *groups):
            sums.add(nats, tokens, text_bytes)


def evaluate_loss(
    paths: Sequence[Path],
    *,
    scorer: Scorer,
    tokenizer: Tokenizer,
    max_seq_len: int,
    batch_size: int,
    on_progress: OnProgress | None = None,
) -> LossReport:
    """The loss of a model on texts and conversations.

    Args:
        paths: JSONL files, as `expand_paths` gives them, of either form.
        scorer: of the model.
        tokenizer: the model's.
        max_seq_len: the most predictions of a window.
        batch_size: windows that are read at once.
        on_progress: told how many bytes of the files are done, and how many there are.

    Raises:
        UserError: a bad line, an unreadable file, nothing to predict, or a likelihood that is not finite.
    """
    report, read = LossReport(), ReadReport()
    total_bytes = sum(path.stat().st_size for path in paths)
    remaining = _rows(paths, tokenizer, max_seq_len=max_seq_len, report=read)
    done_bytes = 0
    while block := list(islice(remaining, BLOCK)):
        rows = [row for *_, row in block]
        show = _as_bytes(on_progress, done_bytes, read.source_bytes, rows=len(rows), total=total_bytes)
        scores = score_rows(scorer, rows, batch_size=batch_size, max_seq_len=max_seq_len, on_progress=show)
        for (source, language, row), found in zip(block, scores, strict=True):
            targets = row.ids[1:][row.counts[1:]]
            nats = -float(found.log_probabilities.sum(dtype=np.float64))
            report.add(source, language, nats, len(targets), int(tokenizer.text_bytes[targets].sum()))
        done_bytes = read.source_bytes
    if report.total.tokens == 0:
        raise UserError(f"{', '.join(map(str, paths))}: the chat template marks no token as the assistant's")
    return report


def _as_bytes(
    on_progress: OnProgress | None, begin: int, end: int, *, rows: int, total: int
) -> Callable[[int], None] | None:  # fmt: skip
    """Told the rows of a block that are done; tells the bytes of the files, of which the block takes begin to end."""
    if on_progress is None:
        return None
    return lambda done: on_progress(begin + (end - begin) * done // rows, total)


def _rows(
    paths: Sequence[Path], tokenizer: Tokenizer, *, max_seq_len: int, report: ReadReport
) -> Iterator[tuple[str, str, Row]]:
    """(file, language, window) of every document."""
    of_text, of_chat = TextEncoding(tokenizer), ChatEncoding(tokenizer)
    for record in read_validated(paths, _text_or_conversation, report=report):
        encoding = of_chat if "conversations" in record.value else of_text
        language = language_of("\n".join(texts_of(record)))
        for document in encoding.encode([record])[0]:
            for row in windows(document.ids, document.supervised, max_seq_len=max_seq_len):
                yield str(record.path), language, row


def _text_or_conversation(value: dict[str, Any]) -> dict[str, Any]:
    value = any_form(value)
    if "chosen" in value:
        raise BadLineError("a pair of answers", "the loss is that of a text or of conversations; give such a file")
    return value
