"""What training sees of a data file: the tokens of a record, row by row, and the weight of predicting each.

Framework-free. Ids and masks come from the stage's encoding (documents.py), or from the cache that it was used to
make; the cutting into rows is that of BatchSource. Nothing here decides what is learned.

L tokens of a row
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.text import Text

from minigpt_jax.config import TrainConfig
from minigpt_jax.data.cache_format import TokenCache, is_token_cache, open_token_cache
from minigpt_jax.data.documents import Document, encoding_of
from minigpt_jax.data.packing import cut_documents
from minigpt_jax.data.records import expand_paths, read_records
from minigpt_jax.errors import UserError
from minigpt_jax.tokenizer import Tokenizer

FIRST_RECORDS = 3
"""Records that are shown when none is named."""

Value = TypeVar("Value")


@dataclass(frozen=True)
class InspectedRow:
    """What one row of a batch has of one document."""

    record: str
    """Where the record was read, as FILE:LINE."""
    part: str
    """Which part of the record it is, where there are several: a side of a pair, a piece of a long text."""
    note: str
    """What of the document training does not see; empty when it sees all."""
    ids: list[int]  # [L]
    loss_weights: list[float]  # [L]
    """Weight of predicting each token from those before it: 0 for the first, which nothing in the row predicts."""
    tokens: list[str]  # [L]
    """Each token as `visible_tokens` shows it."""

    @property
    def num_learned(self) -> int:
        """Tokens whose prediction is learned."""
        return int(np.count_nonzero(self.loss_weights))

    def to_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)


def inspect_data(path: Path, tokenizer: Tokenizer, config: TrainConfig, *, index: int | None) -> list[InspectedRow]:
    """The rows that training makes of a few records, were each alone in its rows.

    Args:
        path: as one of the paths of `TrainConfig.data`.
        tokenizer: for text that is not tokenized yet; a prepared cache must have been made with it.
        config: stage, mask, row length and what to do with bad lines.
        index: the record, from 0; the first few when None.

    Raises:
        UserError: there is no such record, or bad input (see `read_records`).
    """
    encoding = encoding_of(config.record_form, tokenizer, chat_mask=config.chat_mask)
    records: list[tuple[str, tuple[Document, ...]]]
    if is_token_cache(path):
        cache = open_token_cache(path)
        cache.require_tokenizer(tokenizer)
        cache.require_encoding(encoding.options)
        records = _select(_records_of_cache(cache), index, where=path)
    else:
        source = read_records(expand_paths([path]), stage=encoding.stage, skip_bad_lines=config.skip_bad_lines)
        chosen = _select(source, index, where=path)
        names = [f"{record.path}:{record.line}" for record in chosen]
        records = list(zip(names, encoding.encode(chosen), strict=True))
    rows: list[InspectedRow] = []
    for name, documents in records:
        sides = ("",) if len(documents) == 1 else ("chosen", "rejected")
        of_record = [
            row
            for side, document in zip(sides, documents, strict=True)
            for row in _rows(name, side, document, tokenizer, config)
        ]
        rows += of_record if len(documents) == 1 else _as_a_pair(of_record)
    return rows


def _as_a_pair(sides: list[InspectedRow]) -> list[InspectedRow]:
    """The two sides as training sees them together (`usable_pairs`)."""
    chosen, rejected = sides
    if chosen.ids == rejected.ids:
        reason = "both sides are equal, so training leaves the pair out"
    elif not (chosen.num_learned and rejected.num_learned):
        reason = "a side has nothing to learn, so training leaves the pair out"
    else:
        return sides
    return [replace(side, note=reason, loss_weights=[0.0] * len(side.ids)) for side in sides]


def _select(records: Iterable[Value], index: int | None, *, where: Path) -> list[Value]:
    if index is None:
        return list(itertools.islice(records, FIRST_RECORDS))
    count = 0
    for record in records:
        if count == index:
            return [record]
        count += 1
    raise UserError(f"--index {index}: {where} has records 0 to {count - 1}")


def _records_of_cache(cache: TokenCache) -> Iterator[tuple[str, tuple[Document, ...]]]:
    sides = 2 if cache.holds_pairs else 1
    for first in range(0, cache.num_documents, sides):
        yield cache.record_id(first), tuple(_cached_document(cache, first + side) for side in range(sides))


def _cached_document(cache: TokenCache, number: int) -> Document:
    start, length = int(cache.starts[number]), int(cache.lengths[number])
    place = slice(start, start + length)
    supervised = np.ones(length, bool) if cache.supervised is None else cache.supervised[place] == 1
    return Document(cache.tokens[place].astype(np.int64), supervised, int(cache.text_bytes[number]))


def _rows(
    record: str, side: str, document: Document, tokenizer: Tokenizer, config: TrainConfig
) -> Iterator[InspectedRow]:
    length, longest = len(document.ids), config.max_seq_len
    # As in BatchSource: a text goes on in the next row, of a conversation there is only the beginning.
    used = length if config.stage == "pretrain" else min(length, longest + 1)
    pieces = cut_documents(np.array([used]), longest)
    tokens = visible_tokens(document.ids.tolist(), tokenizer)
    for number, (start, predictions) in enumerate(zip(pieces.start.tolist(), pieces.length.tolist(), strict=True)):
        place = slice(start, start + predictions + 1)
        weights = document.supervised[place].astype(float)
        weights[0] = 0
        notes = [f"cut: {length - used} more tokens do not fit in a row"] if used < length else []
        if not weights.any():
            notes.append("nothing in it is learned, so training leaves it out")
        yield InspectedRow(
            record=record,
            part=side if len(pieces) == 1 else f"row {number + 1} of {len(pieces)}",
            note="; ".join(notes),
            ids=document.ids[place].tolist(),
            loss_weights=weights.tolist(),
            tokens=tokens[place],
        )


# --- For people ---


def visible_tokens(ids: list[int], tokenizer: Tokenizer) -> list[str]:
    r"""Each token so that everything in it can be seen.

    A space is a middle dot and a line break an arrow; what else does not print is escaped. Of a character that is
    split over tokens each has its bytes, as \xe4\xbd, and the one with the last byte the character, as \xa0=你.
    """
    characters, shown = tokenizer.stream_decoder(), []
    for id in ids:
        piece, complete = tokenizer.token_bytes(id), characters.push(id)
        text = _visible(piece.decode("utf-8", errors="backslashreplace"))
        is_continuation = 0x80 <= piece[0] < 0xC0
        shown.append(f"{text}={_visible(complete[0])}" if is_continuation and complete else text)
    return shown


_SIGNS = {" ": "\u00b7", "\n": "\u21b5"}


def _visible(text: str) -> str:
    return "".join(
        _SIGNS.get(sign) or (sign if sign.isprintable() else sign.encode("unicode_escape").decode()) for sign in text
    )


def render_row(row: InspectedRow, tokenizer: Tokenizer, *, coloured: bool) -> Text:
    """The tokens of a row, one blank between two: learned ones green, or in brackets, and special ones bold."""
    special, text = set(tokenizer.added_tokens.values()), Text()
    for id, weight, token in zip(row.ids, row.loss_weights, row.tokens, strict=True):
        style = ("green" if weight else "dim") + (" bold" if id in special else "")
        if coloured:
            text.append(token, style)
        else:
            text.append(f"[{token}]" if weight else token)
        text.append("\n" if token.endswith(_SIGNS["\n"]) else " ")
    text.rstrip()
    return text


def describe_row(row: InspectedRow) -> str:
    """Where a row comes from, and its counts."""
    name = f"{row.record} {row.part}".strip()
    counts = f"{len(row.ids)} tokens, {row.num_learned} of them learned"
    return f"{name}: {counts}" + (f" ({row.note})" if row.note else "")
