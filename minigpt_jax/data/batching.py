"""Batches by number: any batch of a run is made from its number alone, and `load_batches` makes them ahead of time.

Choices: padding is known by position (segment 0), never by a token's id; documents that share a row have their own
segment and positions that restart at 0; a batch that is not full has empty rows, so there are at most as many shapes
as widths; every batch has at least one supervised token. `packing` decides what goes where.

B rows  T positions of a row  S real positions of a batch
"""

import dataclasses
import math
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minigpt_jax.config import Batching
from minigpt_jax.data.cache import TokenCache
from minigpt_jax.data.packing import (
    EpochPlan,
    IntArray,
    Pieces,
    bucketed_layout,
    cut_documents,
    packed_layout,
    padded_layout,
    plan_epoch,
)
from minigpt_jax.errors import UserError

_LAYOUTS = {"packed": packed_layout, "bucketed": bucketed_layout, "padded": padded_layout}
_BATCHES_BETWEEN_RELEASES = 8


@dataclass(frozen=True)
class Batch:
    """One micro-batch; every array is [B, T]."""

    tokens: NDArray[np.int32]
    """Inputs; 0 at padding."""
    targets: NDArray[np.int32]
    """The token after each input; 0 at padding."""
    loss_weights: NDArray[np.float32]
    """1 where a prediction is learned; 0 at padding and where somebody else than the assistant speaks."""
    segment_ids: NDArray[np.int32]
    """Number of the piece in its row, from 1; 0 at padding."""
    positions: NDArray[np.int32]
    """Position in the piece, from 0; 0 at padding."""
    documents: tuple[int, ...]
    """Numbers of the documents in it, for `TokenCache.record_id`."""
    index: int
    """Number of this micro-batch in the run."""
    epoch: int
    """Number of the pass over the data, from 0."""
    reference: NDArray[np.float64] | None = None
    """[B] log-probability of each row's answer under the reference model, in preference pairs where it is known."""

    @property
    def num_real(self) -> int:
        """Positions that are not padding."""
        return int(np.count_nonzero(self.segment_ids))

    @property
    def num_supervised(self) -> int:
        """Positions whose prediction is learned."""
        return int(np.count_nonzero(self.loss_weights))


class BatchSource:
    """The micro-batches of a whole run as a sequence with random access.

    Args:
        cache: where the tokens lie.
        documents: numbers of the documents to use.
        batching: packed, bucketed or padded.
        batch_size: B, rows of a full-width batch.
        max_seq_len: T, positions of a full-width row.
        seed: decides the order, with the epoch; None keeps the layout's own order.
        num_epochs: passes over the documents, rounded up to whole batches. Excludes num_batches.
        num_batches: length of the run; the documents are repeated as often as it takes. Excludes num_epochs.
        drop_last: leave out a pass's last batch of each width when it is not full (see `Layout`).

    A text longer than a row goes on in another row. Of a longer conversation a row has the beginning: what follows
    would be an answer to something unseen.

    Raises:
        UserError: there is no document, none has a token to predict, or `drop_last` leaves no batch.
    """

    def __init__(
        self,
        cache: TokenCache,
        documents: NDArray[np.integer],
        *,
        batching: Batching,
        batch_size: int,
        max_seq_len: int,
        seed: int | None,
        num_epochs: float | None = None,
        num_batches: int | None = None,
        drop_last: bool = False,
    ):
        if len(documents) == 0:
            raise UserError(f"no document of {cache.directory} is left to use; give more data")
        self._cache = cache
        self._documents = np.asarray(documents, dtype=np.int64)
        self._batch_size, self._max_seq_len = batch_size, max_seq_len
        self._pieces: Pieces = cut_documents(self._used_lengths(), max_seq_len)
        if len(self._pieces) == 0:
            raise UserError(f"the documents of {cache.directory} have no token to predict; give other data")
        layout = _LAYOUTS[batching](self._pieces.length, max_seq_len=max_seq_len, batch_size=batch_size)
        self._layout = dataclasses.replace(layout, drop_last=drop_last)
        if self.batches_per_epoch == 0:
            raise UserError("--drop-last leaves no batch: there are fewer rows than one batch has; leave it out")
        self._seed = seed
        self._plans: OrderedDict[int, EpochPlan] = OrderedDict()
        self._lock = threading.Lock()
        self._served = 0
        if num_batches is None:
            assert num_epochs is not None, "give num_epochs or num_batches"
            num_batches = math.ceil(num_epochs * self.batches_per_epoch)
        self._length = num_batches

    def _used_lengths(self) -> IntArray:
        """Tokens of each document that rows are made of."""
        lengths = self._cache.lengths[self._documents].astype(np.int64)
        beginnings = np.minimum(lengths, self._max_seq_len + 1)
        return np.where(self._cache.is_text[self._documents], lengths, beginnings)

    def __len__(self) -> int:
        return self._length

    @property
    def batches_per_epoch(self) -> int:
        """Micro-batches of one pass; the same in every epoch, whatever the order."""
        return self._layout.num_batches

    @property
    def predictions_per_epoch(self) -> int:
        """Positions of one pass that are not padding, before `drop_last` leaves any out."""
        return int(self._pieces.length.sum(dtype=np.int64))

    @property
    def supervised_per_epoch(self) -> int:
        """Tokens of one pass that are learned, before `drop_last` leaves any out."""
        return int(self._supervised_counts().sum())

    def text_bytes(self, bytes_of_token: NDArray[np.integer]) -> int:
        """UTF-8 bytes of the text that is learned in one pass, the denominator of bits per byte.

        Args:
            bytes_of_token: of each vocabulary entry; 0 for marks.
        """
        cache, total = self._cache, 0
        for document, start, length in zip(
            self._documents[self._pieces.document], self._pieces.start, self._pieces.length, strict=True
        ):
            first = cache.starts[document] + start + 1
            learned = cache.tokens[first : first + length]
            if cache.supervised is not None:
                learned = learned[cache.supervised[first : first + length] == 1]
            self._require_known(learned)
            total += int(bytes_of_token[learned].sum(dtype=np.int64))
        return total

    def _supervised_counts(self) -> IntArray:
        whole = self._cache.supervised_counts(np.iinfo(np.int32).max)
        beginnings = self._cache.supervised_counts(self._max_seq_len + 1)
        return np.where(self._cache.is_text, whole, beginnings)[self._documents]

    @property
    def real_fraction(self) -> float:
        """Part of one pass's positions that is not padding, before `drop_last` leaves any out."""
        return self.predictions_per_epoch / self._layout.num_positions

    @property
    def rows_left_out(self) -> int:
        """Rows of one pass that `drop_last` leaves out, other ones in each; in `PairSource` pairs."""
        return self._layout.rows_left_out

    def epoch_of(self, index: int) -> float:
        """Passes over the data completed when micro-batches 0 to index - 1 are done."""
        return index / self.batches_per_epoch

    def record_ids(self, batch: Batch) -> list[str]:
        """Where the documents of a batch were read, as FILE:LINE."""
        return [self._cache.record_id(document) for document in batch.documents]

    def __iter__(self) -> Iterator[Batch]:
        return (self[index] for index in range(self._length))

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < self._length:
            raise IndexError(f"micro-batch {index} of {self._length}")
        epoch, number = divmod(index, self.batches_per_epoch)
        plan = self._plan(epoch)
        first_row, end_row = plan.batch_rows[number]
        width_number = plan.batch_width[number]
        shape = (self._layout.rows_per_batch[width_number], self._layout.widths[width_number])
        row_starts = plan.row_starts[first_row : end_row + 1]
        pieces = plan.pieces[row_starts[0] : row_starts[-1]]
        return self._make_batch(pieces, np.diff(row_starts), shape, index=index, epoch=epoch)

    def _make_batch(
        self, pieces: NDArray[np.int32], row_sizes: IntArray, shape: tuple[int, int], *, index: int, epoch: int
    ) -> Batch:
        document = self._documents[self._pieces.document[pieces]]
        first_token = self._cache.starts[document] + self._pieces.start[pieces]
        row = np.repeat(np.arange(len(row_sizes)), row_sizes)
        length = self._pieces.length[pieces].astype(np.int64)
        return self._assemble(document, first_token, length, row, shape, index=index, epoch=epoch)

    def _assemble(
        self,
        document: IntArray,
        first_token: IntArray,
        length: IntArray,
        row: IntArray,
        shape: tuple[int, int],
        *,
        index: int,
        epoch: int,
    ) -> Batch:
        """The batch of these pieces, which are given row by row."""
        # Each piece begins where the ones before it in its row end.
        end = np.cumsum(length)
        is_first = np.append(True, row[1:] != row[:-1])
        first_of_row = np.flatnonzero(is_first)[np.cumsum(is_first) - 1]
        first_position = row * shape[1] + (end - length) - (end - length)[first_of_row]

        within = np.arange(end[-1]) - np.repeat(end - length, length)  # [S]
        source = np.repeat(first_token, length) + within
        place = np.repeat(first_position, length) + within
        segment = np.arange(len(length)) - first_of_row + 1

        ids = self._cache.tokens[np.concatenate([source, source + 1])]
        self._require_known(ids)
        inputs, targets = np.split(ids, 2)
        learned = 1 if self._cache.supervised is None else self._cache.supervised[source + 1]

        def spread(values: Any, dtype: type[np.number[Any]]) -> NDArray[Any]:
            flat = np.zeros(shape[0] * shape[1], dtype)
            flat[place] = values
            return flat.reshape(shape)

        return Batch(
            tokens=spread(inputs, np.int32),
            targets=spread(targets, np.int32),
            loss_weights=spread(learned, np.float32),
            segment_ids=spread(np.repeat(segment, length), np.int32),
            positions=spread(within, np.int32),
            documents=tuple(dict.fromkeys(document.tolist())),
            index=index,
            epoch=epoch,
        )

    def _require_known(self, ids: NDArray[np.unsignedinteger]) -> None:
        if ids.size and ids.max() >= self._cache.vocab_size:
            raise UserError(
                f"{self._cache.directory} is damaged: it has token {ids.max()}, and its vocabulary ends at "
                f"{self._cache.vocab_size - 1}; delete it and prepare the data again"
            )

    def _plan(self, epoch: int) -> EpochPlan:
        """The epoch's plan; the last two are kept, since prefetching crosses from one to the next."""
        with self._lock:
            if epoch not in self._plans:
                self._plans[epoch] = plan_epoch(self._layout, seed=self._seed, epoch=epoch)
                if len(self._plans) > 2:
                    self._plans.popitem(last=False)
            self._served += 1
            if self._served % _BATCHES_BETWEEN_RELEASES == 0:
                self._cache.release()
            return self._plans[epoch]


def evaluation_batches(
    cache: TokenCache, documents: NDArray[np.integer], *, batch_size: int, max_seq_len: int
) -> BatchSource:
    """Every prediction of `documents` exactly once, packed, always in the same order."""
    return BatchSource(
        cache, documents, batching="packed", batch_size=batch_size, max_seq_len=max_seq_len, seed=None, num_epochs=1
    )


class BatchLoader(Iterator[Batch]):
    """Iterates over a source from `start`, making batches in a thread of grain's, up to `prefetch` ahead.

    An error raised while a batch is made is raised by the `next` that asks for it.
    """

    def __init__(self, source: BatchSource, *, start: int = 0, prefetch: int = 8):
        import grain  # imports jax, which nothing else in this room needs

        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=prefetch)
        self._iterator: Any = iter(grain.MapDataset.source(source).to_iter_dataset(options))
        self._iterator.set_state({"next_index": start})

    def __next__(self) -> Batch:
        batch: Batch = next(self._iterator)
        return batch

    @property
    def position(self) -> int:
        """Number of the micro-batch that comes next, however many are made ahead."""
        return int(self._iterator.get_state()["next_index"])

    def close(self) -> None:
        """Stop making batches ahead."""
        self._iterator.close()


def load_batches(source: BatchSource, *, start: int = 0, prefetch: int = 8) -> BatchLoader:
    """The micro-batches of `source` from number `start` on, made off the calling thread."""
    return BatchLoader(source, start=start, prefetch=prefetch)
