"""Which piece of which document goes to which row of which batch: the plan of an epoch, in pure functions.

A document of L tokens asks for L-1 predictions. It is cut into pieces of at most T predictions: a piece with `start`
and `length` reads tokens[start : start+length] and predicts tokens[start+1 : start+length+1]. So every prediction
lies in exactly one piece, and only the last piece predicts the end of the document.

Rows are packed here rather than by `grain.experimental.BestFitPackIterDataset` because a plan gives what a stream
cannot: the number of batches is known before the first one (the learning-rate schedule takes its length from it), and
any batch is made from its number alone (a resumed run needs one integer and no replay). Only the lengths decide how
many rows there are and which lengths share one, so that part, the layout, is made once; an epoch deals the pieces
anew onto the slots of their own length and shuffles the rows. Packing by counts of lengths is exact best-fit
decreasing over the whole corpus, in time that depends on T and hardly on the number of documents.

T longest row  B rows of a full-width batch  n pieces  R rows  N batches  G widths
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from minigpt_jax.config import Batching

IntArray = NDArray[np.int64]

BUCKET_FRACTIONS = (1.0, 0.75, 0.5, 0.25, 0.125)
"""Widths of bucketed rows, as parts of T: at most five shapes, so at most five compilations."""

MOST_ROWS = 32
"""Rows of a bucketed batch, unless a full-width batch has more."""


# --- Pieces ---


@dataclass(frozen=True)
class Pieces:
    """Equal-length int32 arrays, one entry a piece, in the order of the documents."""

    document: NDArray[np.int32]
    """Index into the lengths that were cut."""
    start: NDArray[np.int32]
    """First input token, counted from the document's first token."""
    length: NDArray[np.int32]
    """Number of predictions, 1 to T."""

    def __len__(self) -> int:
        return len(self.length)


def cut_documents(num_tokens: NDArray[np.integer], max_seq_len: int) -> Pieces:
    """The pieces of documents of `num_tokens` tokens each; a document of one token or none has no piece."""
    predictions = np.maximum(num_tokens.astype(np.int32) - 1, 0)
    pieces_per_document = -(-predictions // max_seq_len)
    document = np.repeat(np.arange(len(num_tokens), dtype=np.int32), pieces_per_document)
    first_piece = (np.cumsum(pieces_per_document) - pieces_per_document).astype(np.int32)
    start = np.arange(len(document), dtype=np.int32)
    start -= first_piece[document]
    start *= np.int32(max_seq_len)
    length = predictions[document] - start
    np.minimum(length, max_seq_len, out=length)
    return Pieces(document, start, length)


def count_pieces(num_tokens: NDArray[np.integer], max_seq_len: int) -> IntArray:
    """[T+1] how many pieces of each length `cut_documents` makes, in memory that does not grow with the documents."""
    counts = np.zeros(max_seq_len + 1, np.int64)
    for begin in range(0, len(num_tokens), 1 << 16):
        predictions = np.maximum(num_tokens[begin : begin + (1 << 16)].astype(np.int64) - 1, 0)
        counts += np.bincount(predictions % max_seq_len, minlength=max_seq_len + 1)
        counts[max_seq_len] += (predictions // max_seq_len).sum()
    counts[0] = 0
    return counts


def real_fraction(counts: IntArray, batching: Batching) -> float:
    """Part of the positions that is not padding when pieces are laid out in batches of one full-width row each.

    Args:
        counts: as `count_pieces` gives them.
        batching: how the pieces would be laid out.
    """
    lengths = np.arange(len(counts))
    if batching == "packed":
        positions = lengths[-1] * sum(rows for rows, _ in best_fit_decreasing(counts.tolist()))
    elif batching == "padded":
        positions = lengths[-1] * counts.sum()
    else:
        widths = bucket_widths(len(counts) - 1)
        positions = (counts * widths[np.searchsorted(widths, lengths)]).sum()
    return float((counts * lengths).sum() / positions)


# --- Layout: what does not change from epoch to epoch ---


@dataclass(frozen=True)
class Layout:
    """Rows made of slots. A piece may lie in any slot of its own key.

    Rows of one width are neighbours, and so are the slots of one row.
    """

    piece_keys: NDArray[np.integer]  # [n]
    slot_keys: NDArray[np.integer]  # [n]
    row_sizes: IntArray  # [R] slots of each row
    widths: tuple[int, ...]  # [G]
    rows_per_batch: tuple[int, ...]  # [G]
    rows_of_width: tuple[int, ...]  # [G] sums to R
    drop_last: bool = False
    """Leave out the last batch of each width when it is not full; other rows are left out in each epoch. Of several
    widths one that fills no batch keeps its only one: else its rows would be left out in every epoch."""

    @property
    def batches_of_width(self) -> tuple[int, ...]:
        """[G] batches of one epoch; the last of each width may have empty rows."""
        shapes = list(zip(self.rows_of_width, self.rows_per_batch, strict=True))
        if not self.drop_last:
            return tuple(-(-rows // height) for rows, height in shapes)
        least = 0 if len(shapes) == 1 else 1
        return tuple(max(least, rows // height) for rows, height in shapes)

    @property
    def rows_left_out(self) -> int:
        """Rows of one epoch that are in no batch."""
        shapes = zip(self.rows_of_width, self.rows_per_batch, self.batches_of_width, strict=True)
        return sum(max(0, rows - height * batches) for rows, height, batches in shapes)

    @property
    def num_batches(self) -> int:
        """Batches of one epoch."""
        return sum(self.batches_of_width)

    @property
    def num_positions(self) -> int:
        """Positions of all rows in batches, padding included; before `drop_last` leaves any out."""
        shapes = zip(self.widths, self.rows_per_batch, self.rows_of_width, strict=True)
        return sum(-(-rows // height) * height * width for width, height, rows in shapes)


def packed_layout(lengths: NDArray[np.int32], *, max_seq_len: int, batch_size: int) -> Layout:
    """Pieces share rows of T positions by best-fit decreasing."""
    patterns = best_fit_decreasing(np.bincount(lengths, minlength=max_seq_len + 1).tolist())
    slot_keys, row_sizes = [], []
    for rows, pattern in patterns:
        slots = np.repeat(*np.array(pattern, dtype=np.int64).T)
        slot_keys.append(np.tile(slots, rows))
        row_sizes.append(np.full(rows, len(slots)))
    sizes = np.concatenate(row_sizes)
    key = _key_type(max_seq_len)
    keys = np.concatenate(slot_keys).astype(key)
    return Layout(lengths.astype(key), keys, sizes, (max_seq_len,), (batch_size,), (len(sizes),))


def bucketed_layout(lengths: NDArray[np.int32], *, max_seq_len: int, batch_size: int) -> Layout:
    """One piece a row, in the narrowest width that holds it; narrower batches have more rows.

    A batch has B*T positions and MOST_ROWS rows at most. Rows are sorted by width over the whole pass, not within a
    window of it: with five widths that pads no more, and every batch but the last of its width is full.
    """
    widths = bucket_widths(max_seq_len)
    bucket = np.searchsorted(widths, lengths)
    counts = np.bincount(bucket, minlength=len(widths))
    used = [(int(width), int(count)) for width, count in zip(widths, counts, strict=True) if count]
    heights = tuple(min(max(batch_size, MOST_ROWS), batch_size * max_seq_len // width) for width, _ in used)
    keys = bucket.astype(np.uint8)
    used_widths, used_counts = zip(*used, strict=True)
    return Layout(keys, np.sort(keys), np.ones(len(lengths), np.int64), used_widths, heights, used_counts)


def bucket_widths(max_seq_len: int) -> IntArray:
    """The widths of bucketed rows, narrowest first."""
    return np.unique([min(max_seq_len, 8 * -int(-max_seq_len * part // 8)) for part in BUCKET_FRACTIONS])


def padded_layout(lengths: NDArray[np.int32], *, max_seq_len: int, batch_size: int) -> Layout:
    """One piece a row of T positions."""
    keys = np.zeros(len(lengths), np.uint8)
    return Layout(keys, keys, np.ones(len(lengths), np.int64), (max_seq_len,), (batch_size,), (len(lengths),))


def best_fit_decreasing(counts: Sequence[int]) -> list[tuple[int, list[tuple[int, int]]]]:
    """Pack `counts[length]` pieces of each length into rows of T = len(counts) - 1.

    Longest first, each into the fullest row that still holds it. Rows that look alike are kept as one group, and
    equal pieces are placed in a group at once: a row takes as many as fit, for after the first it is the fullest.

    Returns:
        (number of rows, [(length, pieces of that length in each of the rows), ...]) for each group.
    """
    capacity = len(counts) - 1
    groups: list[list[tuple[int, list[tuple[int, int]]]]] = [[] for _ in counts]  # by free space
    open_spaces = 0  # bit s is set when groups[s] is not empty

    def put(space: int, rows: int, pattern: list[tuple[int, int]]) -> None:
        nonlocal open_spaces
        if rows:
            groups[space].append((rows, pattern))
            open_spaces |= 1 << space

    for length in range(capacity, 0, -1):
        left = counts[length]
        while left:
            fitting = open_spaces >> length
            if fitting:
                space = length + (fitting & -fitting).bit_length() - 1
                rows, pattern = groups[space].pop()
                if not groups[space]:
                    open_spaces ^= 1 << space
            else:
                space, pattern = capacity, []
                rows = -(-left // (capacity // length))
            each = space // length
            full_rows = min(left // each, rows)
            rest = min(left - full_rows * each, each - 1) if full_rows < rows else 0
            put(space - each * length, full_rows, [*pattern, (length, each)])
            put(space - rest * length, 1 if rest else 0, [*pattern, (length, rest)])
            put(space, rows - full_rows - (1 if rest else 0), pattern)
            left -= full_rows * each + rest
    return [group for same_space in groups for group in same_space]


# --- Epoch ---


@dataclass(frozen=True)
class EpochPlan:
    """Batch i holds the rows batch_rows[i, 0] : batch_rows[i, 1] in a shape of width number batch_width[i]."""

    pieces: NDArray[np.int32]  # [n] piece numbers, row after row
    row_starts: IntArray  # [R+1] where each row begins in `pieces`
    batch_rows: IntArray  # [N, 2]
    batch_width: IntArray  # [N]


def plan_epoch(layout: Layout, *, seed: int | None, epoch: int) -> EpochPlan:
    """Deal the pieces onto the layout's slots, in an order that (seed, epoch) alone decide; seed None shuffles nothing.

    Sorting raw generator output, whose stream numpy promises never to change, keeps the order across versions.
    """
    generator = None if seed is None else np.random.PCG64([seed, int.from_bytes(b"batches", "big"), epoch])

    def order(size: int) -> NDArray[np.int32]:
        if generator is None:
            return np.arange(size, dtype=np.int32)
        return np.argsort(generator.random_raw(size), kind="stable").astype(np.int32)

    shuffled = order(len(layout.piece_keys))
    slots = np.empty(len(shuffled), np.int32)
    by_key = shuffled[np.argsort(layout.piece_keys[shuffled], kind="stable")]
    slots[np.argsort(layout.slot_keys, kind="stable")] = by_key

    first_row = np.cumsum([0, *layout.rows_of_width])
    rows = np.concatenate([begin + order(count) for begin, count in zip(first_row, layout.rows_of_width, strict=False)])
    old_starts = np.cumsum(layout.row_sizes) - layout.row_sizes
    sizes = layout.row_sizes[rows]
    row_starts = np.concatenate([[0], np.cumsum(sizes)])
    pieces = slots[np.repeat(old_starts[rows] - row_starts[:-1], sizes) + np.arange(len(slots))]

    batch_rows, batch_width = [], []
    for width, (begin, count, height, batches) in enumerate(
        zip(first_row, layout.rows_of_width, layout.rows_per_batch, layout.batches_of_width, strict=False)
    ):
        starts = np.arange(batches) * height
        batch_rows.append(begin + np.stack([starts, np.minimum(starts + height, count)], axis=1))
        batch_width.append(np.full(len(starts), width))
    # With a single width the short batch stays the last.
    shuffle = order(layout.num_batches) if len(layout.widths) > 1 else np.arange(layout.num_batches)
    return EpochPlan(pieces, row_starts, np.concatenate(batch_rows)[shuffle], np.concatenate(batch_width)[shuffle])


def _key_type(max_seq_len: int) -> type[np.unsignedinteger]:
    return np.uint16 if max_seq_len < 1 << 16 else np.uint32  # numpy sorts 16 bits in linear time
