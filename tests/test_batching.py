"""Batches: every prediction once an epoch, no label across a border, the same batch for the same number, for ever."""

from collections import Counter
from dataclasses import dataclass, field, fields
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minigpt_jax.data.batching import BatchSource, evaluation_batches, load_batches
from minigpt_jax.data.cache import build_token_cache
from minigpt_jax.data.packing import best_fit_decreasing, count_pieces, cut_documents, real_fraction
from minigpt_jax.errors import UserError

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
BATCHINGS = ("packed", "bucketed", "padded")


@dataclass
class CountingCache:
    """Stands in for a token cache: every token of the corpus is its own number, so a label betrays where it is from."""

    lengths: np.ndarray
    directory: Path = Path("corpus")
    vocab_size: int = 1 << 16
    released: int = 0
    tokens: np.ndarray = field(init=False)
    starts: np.ndarray = field(init=False)
    is_text: np.ndarray = field(init=False)
    supervised: None = None

    def __post_init__(self):
        self.lengths = np.asarray(self.lengths, np.int32)
        self.tokens = np.arange(self.lengths.sum(), dtype=np.uint16)
        self.starts = np.cumsum(self.lengths, dtype=np.int64) - self.lengths
        self.is_text = np.ones(len(self.lengths), bool)

    def release(self):
        self.released += 1

    def record_id(self, document):
        return f"corpus:{document + 1}"

    def predictions_of(self, documents) -> Counter:
        """Each target token of `documents`, once."""
        return Counter(
            token
            for document in documents
            for token in range(self.starts[document] + 1, self.starts[document] + self.lengths[document])
        )


def source_of(lengths, **changes) -> BatchSource:
    cache = CountingCache(lengths)
    options = {"batching": "packed", "batch_size": 4, "max_seq_len": 16, "seed": 7, "num_epochs": 1, **changes}
    return BatchSource(cache, np.arange(len(lengths)), **options)


def same(one, other) -> bool:
    return all(np.array_equal(getattr(one, each.name), getattr(other, each.name)) for each in fields(one))


LENGTHS = st.lists(st.integers(0, 60), min_size=1, max_size=40).filter(lambda lengths: max(lengths) >= 2)
SHAPES = {"max_seq_len": st.integers(2, 40), "batch_size": st.integers(1, 5), "batching": st.sampled_from(BATCHINGS)}


# --- Every prediction, once, in its own document ---


@given(lengths=LENGTHS, seed=st.integers(0, 5), **SHAPES)
def test_every_prediction_is_made_exactly_once_an_epoch(lengths, seed, max_seq_len, batch_size, batching):
    source = source_of(
        lengths, batching=batching, max_seq_len=max_seq_len, batch_size=batch_size, seed=seed, num_epochs=2
    )
    expected = CountingCache(lengths).predictions_of(range(len(lengths)))
    for epoch in range(2):
        seen = Counter()
        for number in range(source.batches_per_epoch):
            batch = source[epoch * source.batches_per_epoch + number]
            assert batch.epoch == epoch
            seen.update(batch.targets[batch.loss_weights > 0].tolist())
        assert seen == expected
    assert source.predictions_per_epoch == sum(expected.values())


@given(lengths=LENGTHS, **SHAPES)
def test_every_row_is_whole_pieces_one_after_another(lengths, max_seq_len, batch_size, batching):
    cache = CountingCache(lengths)
    document_of_token = np.repeat(np.arange(len(lengths)), lengths)
    for batch in source_of(lengths, batching=batching, max_seq_len=max_seq_len, batch_size=batch_size):
        documents = set()
        for row in range(len(batch.tokens)):
            segments = batch.segment_ids[row]
            real = np.count_nonzero(segments)
            assert not segments[real:].any(), "padding is at the end of the row"
            for segment in range(1, segments.max() + 1):
                (place,) = np.nonzero(segments == segment)
                tokens, targets = batch.tokens[row, place], batch.targets[row, place]
                assert np.array_equal(batch.positions[row, place], np.arange(len(place)))
                assert np.array_equal(tokens, tokens[0] + np.arange(len(place)))
                assert np.array_equal(targets, tokens + 1)
                document = document_of_token[tokens[0]]
                assert document == document_of_token[targets[-1]], "no label crosses into another document"
                cut_at = tokens[0] - cache.starts[document]
                ends = targets[-1] + 1 == cache.starts[document] + lengths[document]
                assert cut_at % max_seq_len == 0
                assert ends or len(place) == max_seq_len
                documents.add(int(document))
        assert set(batch.documents) == documents


@given(lengths=LENGTHS, **SHAPES)
def test_padding_is_zero_everywhere_and_weights_are_exactly_the_real_positions(
    lengths, max_seq_len, batch_size, batching
):
    for batch in source_of(lengths, batching=batching, max_seq_len=max_seq_len, batch_size=batch_size):
        real = batch.segment_ids > 0
        assert np.array_equal(batch.loss_weights, real.astype(np.float32))
        for values in (batch.tokens, batch.targets, batch.positions):
            assert not values[~real].any()
        assert batch.num_real == batch.num_supervised == real.sum() > 0


@given(lengths=LENGTHS, **SHAPES)
def test_shapes_are_at_most_five_and_never_larger_than_a_full_batch(lengths, max_seq_len, batch_size, batching):
    source = source_of(lengths, batching=batching, max_seq_len=max_seq_len, batch_size=batch_size)
    batches = list(source)
    shapes = {batch.tokens.shape for batch in batches}
    assert len(shapes) <= (5 if batching == "bucketed" else 1)
    assert all(rows * width <= batch_size * max_seq_len for rows, width in shapes)
    if batching != "bucketed":
        assert shapes == {(batch_size, max_seq_len)}
    positions = sum(batch.tokens.size for batch in batches)
    assert source.real_fraction == sum(batch.num_real for batch in batches) / positions
    for batch in batches:
        kinds = (batch.tokens, batch.targets, batch.loss_weights, batch.segment_ids, batch.positions)
        assert [values.dtype for values in kinds] == ["int32", "int32", "float32", "int32", "int32"]
        assert {values.shape for values in kinds} == {batch.tokens.shape}


def test_a_long_document_continues_in_other_rows_and_only_its_last_piece_has_the_end():
    pieces = cut_documents(np.array([1 + 16 + 16 + 5, 1, 0, 17]), 16)
    assert pieces.document.tolist() == [0, 0, 0, 3]
    assert pieces.start.tolist() == [0, 16, 32, 0]
    assert pieces.length.tolist() == [16, 16, 5, 16]


@given(lengths=LENGTHS, max_seq_len=st.integers(2, 40), batching=st.sampled_from(BATCHINGS))
def test_the_real_fraction_can_be_told_from_counts_of_lengths_alone(lengths, max_seq_len, batching):
    cut = cut_documents(np.array(lengths), max_seq_len)
    counts = count_pieces(np.array(lengths), max_seq_len)
    assert counts.tolist() == np.bincount(cut.length, minlength=max_seq_len + 1).tolist()
    one_row_batches = source_of(lengths, batching=batching, max_seq_len=max_seq_len, batch_size=1)
    if batching != "bucketed":
        assert real_fraction(counts, batching) == one_row_batches.real_fraction
    else:
        # A narrow batch may have rows left empty; that is all that the counts do not tell.
        assert real_fraction(counts, batching) >= one_row_batches.real_fraction


@pytest.mark.parametrize("batching", BATCHINGS)
def test_no_document_is_left_out_of_every_epoch(batching):
    lengths = [3] * 82 + [17] * 3
    source = source_of(lengths, batching=batching, drop_last=True, num_epochs=20)
    assert {document for batch in source for document in batch.documents} == set(range(len(lengths)))
    one_pass = source_of(lengths, batching=batching, drop_last=True)
    rows = sum(len(np.unique(np.nonzero(batch.loss_weights)[0])) for batch in one_pass)
    every = sum(len(np.unique(np.nonzero(batch.loss_weights)[0])) for batch in source_of(lengths, batching=batching))
    assert one_pass.rows_left_out == every - rows > 0


def test_only_the_named_documents_are_used():
    cache = CountingCache([10] * 20)
    chosen = np.array([3, 4, 11])
    source = BatchSource(cache, chosen, batching="packed", batch_size=2, max_seq_len=16, seed=0, num_epochs=1)
    seen = Counter(target for batch in source for target in batch.targets[batch.loss_weights > 0].tolist())
    assert seen == cache.predictions_of(chosen)
    assert {document for batch in source for document in batch.documents} == set(chosen.tolist())
    assert source.record_ids(source[0]) == [f"corpus:{document + 1}" for document in source[0].documents]


def test_a_token_outside_the_vocabulary_never_reaches_a_batch():
    source = source_of([10] * 4)
    source._cache.vocab_size = 39  # the last label of the last document is 39
    with pytest.raises(UserError, match="corpus is damaged: it has token 39, and its vocabulary ends at 38"):
        list(source)


# --- Packing ---


def plain_best_fit_decreasing(lengths: list[int], capacity: int) -> Counter:
    """The textbook algorithm, one piece at a time."""
    rows: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row in rows if sum(row) + length <= capacity]
        if fitting:
            max(fitting, key=sum).append(length)
        else:
            rows.append([length])
    return Counter(sum(row) for row in rows)


@given(st.integers(1, 30).flatmap(lambda t: st.tuples(st.just(t), st.lists(st.integers(1, t), max_size=80))))
def test_packing_by_counts_fills_rows_as_best_fit_decreasing_does(case):
    capacity, lengths = case
    patterns = best_fit_decreasing(np.bincount(lengths, minlength=capacity + 1).tolist())
    fills, placed = Counter(), Counter()
    for rows, pattern in patterns:
        fills[sum(length * count for length, count in pattern)] += rows
        for length, count in pattern:
            placed[length] += rows * count
    assert placed == Counter(lengths)
    assert max(fills, default=0) <= capacity
    assert fills == plain_best_fit_decreasing(lengths, capacity)


def real_fractions(paths, tmp_path) -> dict[str, float]:
    tokenizer = pytest.importorskip("minigpt_jax.tokenizer").load_tokenizer()
    cache = build_token_cache(paths, tokenizer, cache_root=tmp_path)
    return {
        batching: BatchSource(
            cache,
            np.arange(cache.num_documents),
            batching=batching,
            batch_size=8,
            max_seq_len=512,
            seed=0,
            num_epochs=1,
        ).real_fraction
        for batching in BATCHINGS
    }


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"{SHARED} is not there")
def test_packed_rows_of_real_text_are_full(tmp_path):
    part = tmp_path / "part.jsonl"
    with open(SHARED / "pretrain_zh_en_00.jsonl", "rb") as whole:
        part.write_bytes(b"".join(islice(whole, 3000)))
    fractions = real_fractions([part], tmp_path)
    assert fractions["packed"] > 0.98
    assert fractions["packed"] > fractions["bucketed"] > fractions["padded"]


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason=f"{SHARED} is not there")
def test_packed_rows_of_all_the_real_text_are_full(tmp_path):
    assert real_fractions(sorted(SHARED.glob("pretrain_zh_en_0*.jsonl")), tmp_path)["packed"] > 0.98


def test_packed_rows_of_short_documents_are_full():
    lengths = np.random.default_rng(0).integers(5, 60, size=5000)
    assert source_of(lengths, max_seq_len=512, batch_size=1).real_fraction > 0.99


# --- Order ---


@pytest.mark.parametrize("batching", BATCHINGS)
def test_the_seed_and_the_number_alone_decide_a_batch(batching):
    lengths = np.random.default_rng(1).integers(2, 40, size=60)
    one = source_of(lengths, batching=batching, num_epochs=3)
    forward = list(one)
    other = source_of(lengths, batching=batching, num_epochs=3)
    backward = [other[number] for number in reversed(range(len(other)))][::-1]
    assert all(map(same, forward, backward))
    assert [batch.index for batch in forward] == list(range(len(one)))


@pytest.mark.parametrize("batching", BATCHINGS)
def test_epochs_and_seeds_differ_in_order(batching):
    lengths = np.random.default_rng(1).integers(2, 40, size=60)
    source = source_of(lengths, batching=batching, num_epochs=2)
    other_seed = source_of(lengths, batching=batching, num_epochs=2, seed=8)
    count = source.batches_per_epoch
    epochs = [[source[number].documents for number in range(epoch * count, (epoch + 1) * count)] for epoch in (0, 1)]
    assert epochs[0] != epochs[1]
    assert epochs[0] != [other_seed[number].documents for number in range(count)]


def test_neighbours_in_a_row_differ_from_epoch_to_epoch():
    source = source_of([9] * 40, max_seq_len=16, batch_size=1, num_epochs=2)
    pairs = [{frozenset(source[epoch * 20 + number].documents) for number in range(20)} for epoch in (0, 1)]
    assert len(pairs[0] & pairs[1]) < 5


def test_the_order_is_the_same_for_ever():
    # A change of this list breaks the resuming of runs that were started before it.
    source = source_of(range(4, 16), batch_size=1, seed=42)
    assert [batch.documents for batch in source] == [(7, 3), (10, 0), (11,), (6, 4), (5,), (8, 2), (9, 1)]


# --- Length of the run ---


@pytest.mark.parametrize(("epochs", "batches"), [(1, 10), (2.0, 20), (0.5, 5), (0.01, 1), (1.01, 11)])
def test_a_run_by_epochs_is_rounded_up_to_whole_batches(epochs, batches):
    assert len(source_of([17] * 40, num_epochs=epochs)) == batches


def test_a_run_by_batches_repeats_the_data():
    source = source_of([17] * 40, num_epochs=None, num_batches=25)
    assert len(source) == 25
    assert source[24].epoch == 2
    assert source.epoch_of(25) == 2.5
    with pytest.raises(IndexError):
        source[25]


@pytest.mark.parametrize("batching", BATCHINGS)
@pytest.mark.parametrize("lengths", [[], [1, 0, 1]])
def test_data_without_a_prediction_is_refused_before_the_first_batch(batching, lengths):
    with pytest.raises(UserError, match="corpus"):
        source_of(lengths, batching=batching)


# --- Loader ---


def test_the_loader_yields_the_sources_batches_in_order_and_ends():
    source = source_of(np.arange(2, 40), num_epochs=2)
    loader = load_batches(source)
    assert all(map(same, loader, source))
    assert loader.position == len(source)
    assert next(loader, None) is None
    loader.close()


@settings(deadline=None, max_examples=20)
@given(stop=st.integers(0, 60), prefetch=st.integers(0, 9), batching=st.sampled_from(BATCHINGS))
def test_a_run_resumed_at_the_loaders_position_is_the_tail_of_the_uninterrupted_run(stop, prefetch, batching):
    source = source_of([5, 9, 14, 33, 60] * 6, batching=batching, num_epochs=None, num_batches=60)
    first = load_batches(source, prefetch=prefetch)
    head = list(islice(first, stop))
    position = first.position
    first.close()
    assert position == stop
    again = source_of([5, 9, 14, 33, 60] * 6, batching=batching, num_epochs=None, num_batches=60)
    second = load_batches(again, start=position, prefetch=prefetch)
    tail = list(second)
    second.close()
    assert [batch.index for batch in head + tail] == list(range(60))
    assert all(map(same, head + tail, source))


def test_grains_own_checkpoint_check_passes():
    from grain import MapDataset, ReadOptions
    from grain.experimental import assert_equal_output_after_checkpoint

    source = source_of([5, 9, 14, 33, 60], num_epochs=2)
    dataset = MapDataset.source(source).map(lambda batch: batch.tokens)
    assert_equal_output_after_checkpoint(dataset.to_iter_dataset(ReadOptions(num_threads=1, prefetch_buffer_size=4)))


def test_batches_are_made_ahead_off_the_calling_thread():
    import threading

    makers = []

    class Watched(BatchSource):
        def __getitem__(self, index):
            makers.append(threading.current_thread())
            return super().__getitem__(index)

    source = Watched(
        CountingCache([10] * 99),
        np.arange(99),
        batching="padded",
        batch_size=1,
        max_seq_len=16,
        seed=0,
        num_epochs=1,
    )
    loader = load_batches(source, prefetch=5)
    next(loader)
    next(loader)
    loader.close()
    assert loader.position == 2
    assert len(makers) > 2
    assert threading.main_thread() not in makers


def test_an_error_in_the_loaders_thread_reaches_the_consumer():
    source = source_of([10] * 40)
    source._cache.tokens = source._cache.tokens[:-1]  # the last label of the last document is gone
    loader = load_batches(source)
    with pytest.raises(IndexError):
        list(loader)
    loader.close()


# --- Evaluation ---


def test_an_evaluation_reads_every_prediction_once_in_a_fixed_order():
    cache = CountingCache([5, 9, 14, 33, 60] * 6)
    documents = np.arange(3, 30, 2)
    batches = evaluation_batches(cache, documents, batch_size=3, max_seq_len=16)
    seen = Counter(target for batch in batches for target in batch.targets[batch.loss_weights > 0].tolist())
    assert seen == cache.predictions_of(documents)
    # The first token of a document is predicted by none.
    assert batches.text_bytes(np.full(cache.vocab_size, 3)) == 3 * sum(cache.lengths[documents] - 1)
    assert all(map(same, batches, evaluation_batches(cache, documents, batch_size=3, max_seq_len=16)))


def test_an_evaluation_does_not_shuffle():
    batches = evaluation_batches(CountingCache([17] * 9), np.arange(9), batch_size=2, max_seq_len=16)
    assert [batch.documents for batch in batches] == [(0, 1), (2, 3), (4, 5), (6, 7), (8,)]


def test_mapped_pages_are_released_while_a_run_goes_on():
    source = source_of([17] * 40, num_epochs=None, num_batches=100)
    list(source)
    assert source._cache.released > 0
