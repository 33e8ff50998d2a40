"""Batches of preference pairs: the chosen answers in the first half of the rows, the rejected ones in the second.

A pair is known by the number of its chosen document; the rejected one is the next document of the cache. Both sides
stand in rows of one width, each in a row of its own, so row i and row P + i are a pair.

P pairs of a batch  B = 2 P rows  T positions of a row
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from minigpt_jax.data.batching import Batch, BatchSource
from minigpt_jax.data.cache_format import TokenCache, split_documents
from minigpt_jax.data.packing import IntArray

Numbers = NDArray[np.integer]


class PairSource(BatchSource):
    """The micro-batches of a run over preference pairs, with random access.

    Takes what `BatchSource` takes; `documents` are the chosen ones, `batch_size` counts pairs, and `batching` is
    bucketed or padded. A side longer than a row is cut to its beginning.
    """

    _reference: NDArray[np.float64] | None = None

    def each_once(self) -> "PairSource":
        """The same pairs, each exactly once and always in the same order."""
        return evaluation_pairs(
            self._cache, self._documents, batch_size=self._batch_size, max_seq_len=self._max_seq_len
        )

    def take_reference(self, log_probabilities: NDArray[np.float64]) -> None:
        """Put the reference's log-probabilities into every batch from now on.

        Args:
            log_probabilities: one for each document of the cache, as `reference_by_document` makes them.
        """
        self._reference = log_probabilities

    @property
    def key(self) -> str:
        """Hash of all documents and of how they were tokenized."""
        return self._cache.key

    @property
    def num_documents(self) -> int:
        """Documents of the cache, the length of `reference_by_document`."""
        return self._cache.num_documents

    @property
    def predictions_per_epoch(self) -> int:
        """Positions of one pass that are not padding, before `drop_last` leaves any out."""
        return int(sum((self._side_lengths(side) - 1).sum() for side in (0, 1)))

    @property
    def real_fraction(self) -> float:
        """Part of one pass's positions that is not padding, before `drop_last` leaves any out."""
        return self.predictions_per_epoch / (2 * self._layout.num_positions)

    def _side_lengths(self, side: int) -> IntArray:
        return np.minimum(self._cache.lengths[self._documents + side].astype(np.int64), self._max_seq_len + 1)

    def _used_lengths(self) -> IntArray:
        return np.maximum(self._side_lengths(0), self._side_lengths(1))

    def _supervised_counts(self) -> IntArray:
        counts = self._cache.supervised_counts(self._max_seq_len + 1)
        return counts[self._documents] + counts[self._documents + 1]

    def _make_batch(
        self, pieces: NDArray[np.int32], row_sizes: IntArray, shape: tuple[int, int], *, index: int, epoch: int
    ) -> Batch:
        num_pairs, width = shape
        pairs = self._pieces.document[pieces]
        chosen = self._documents[pairs]
        sides = np.concatenate([chosen, chosen + 1])
        row = np.concatenate([np.arange(len(pairs)), num_pairs + np.arange(len(pairs))])
        length = np.concatenate([self._side_lengths(0)[pairs], self._side_lengths(1)[pairs]]) - 1
        batch = self._assemble(
            sides, self._cache.starts[sides], length, row, (2 * num_pairs, width), index=index, epoch=epoch
        )
        reference = None
        if self._reference is not None:
            reference = np.zeros(2 * num_pairs)
            reference[row] = self._reference[sides]
        return dataclasses.replace(batch, documents=tuple(chosen.tolist()), reference=reference)


def evaluation_pairs(
    cache: TokenCache, chosen: NDArray[np.integer], *, batch_size: int, max_seq_len: int
) -> PairSource:
    """Each pair exactly once, bucketed, always in the same order."""
    return PairSource(
        cache, chosen, batching="bucketed", batch_size=batch_size, max_seq_len=max_seq_len, seed=None, num_epochs=1
    )


def reference_by_document(
    num_documents: int, documents: Sequence[tuple[int, ...]], row_values: Sequence[NDArray[np.floating]]
) -> NDArray[np.float64]:
    """One value for each document of a cache, from one value for each row of these batches; NaN where there is none.

    Args:
        num_documents: of the cache.
        documents: those of each batch of a `PairSource`.
        row_values: [B] of each batch.
    """
    values = np.full(num_documents, np.nan)
    for pairs, rows in zip(documents, row_values, strict=True):
        chosen, num_pairs = np.array(pairs), len(rows) // 2
        values[chosen], values[chosen + 1] = rows[: len(chosen)], rows[num_pairs : num_pairs + len(chosen)]
    return values


def split_pairs(cache: TokenCache) -> tuple[Numbers, Numbers]:
    """(training, validation) pairs, by the numbers of their chosen documents; a pair's content alone decides."""
    return split_documents(cache, np.arange(0, cache.num_documents, 2))


def usable_pairs(
    cache: TokenCache, chosen: Numbers, *, max_seq_len: int, drop_over_long: bool
) -> tuple[Numbers, list[str]]:
    """The pairs that teach something within a row, and in words how many were left out.

    Args:
        cache: of preference pairs.
        chosen: the pairs, by the numbers of their chosen documents.
        max_seq_len: T.
        drop_over_long: leave out a pair of which a side is longer than a row instead of cutting it.
    """
    left_out, most = [], max_seq_len + 1
    longer = np.maximum(cache.lengths[chosen], cache.lengths[chosen + 1]) > most
    if drop_over_long and longer.any():
        left_out.append(f"{np.count_nonzero(longer)} pairs with a side longer than {most} tokens")
        chosen = chosen[~longer]
    counts = cache.supervised_counts(most)
    silent = np.minimum(counts[chosen], counts[chosen + 1]) == 0
    if silent.any():
        left_out.append(f"{np.count_nonzero(silent)} pairs with a side whose first {most} tokens have no answer")
        chosen = chosen[~silent]
    equal = np.array([_are_equal(cache, number, most) for number in chosen.tolist()], bool)
    if equal.any():
        left_out.append(f"{np.count_nonzero(equal)} pairs whose sides are equal in their first {most} tokens")
        chosen = chosen[~equal]
    return chosen, left_out


def _are_equal(cache: TokenCache, chosen: int, most_tokens: int) -> bool:
    def side(number: int) -> NDArray[np.unsignedinteger]:
        start = cache.starts[number]
        return cache.tokens[start : start + min(int(cache.lengths[number]), most_tokens)]

    return np.array_equal(side(chosen), side(chosen + 1))
