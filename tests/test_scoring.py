"""Rows that are scored: how documents are cut into them, how they are batched, and what JAX says of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from known_scorers import PrefixScorer, TableScorer

from minigpt_bridge.logits import jax_logits
from minigpt_jax.config import ModelConfig
from minigpt_jax.errors import UserError
from minigpt_jax.evaluate import JaxScorer, token_scores
from minigpt_jax.initialization import initial_parameters
from minigpt_jax.scoring import Row, continuation_row, score_rows, windows

SMALL = ModelConfig(
    vocab_size=97, hidden_size=32, num_layers=1, num_heads=4, num_kv_heads=2, intermediate_size=48,
    max_position_embeddings=256,
)  # fmt: skip


def random_rows(count, *, longest=90, seed=0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, longest, count)
    return [Row(rng.integers(0, 97, size, np.int32), rng.random(size) < 0.7) for size in lengths]


# --- Windows ---


@given(st.integers(2, 60), st.integers(1, 20), st.integers(0, 2**32))
def test_windows_predict_each_token_that_counts_exactly_once_in_order(length, max_seq_len, bits):
    ids = np.arange(length)
    counts = np.array([bits >> number % 33 & 1 for number in range(length)], bool)
    rows = windows(ids, counts, max_seq_len=max_seq_len)
    asked = [id for row in rows for id in row.ids[1:][row.counts[1:]]]
    assert asked == [id for id in ids[1:] if counts[id]]
    assert all(1 <= row.predictions <= max_seq_len for row in rows)


def test_a_window_begins_with_the_last_token_of_the_one_before():
    rows = windows(np.arange(10), np.ones(10, bool), max_seq_len=4)
    assert [row.ids.tolist() for row in rows] == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [8, 9]]


def test_a_continuation_counts_from_its_first_token_on():
    row = continuation_row([5, 6, 7], [8, 9])
    assert row.ids.tolist() == [5, 6, 7, 8, 9]
    assert row.counts.tolist() == [False, False, False, True, True]


# --- Batches ---


@pytest.mark.parametrize("batch_size", [1, 3, 7, 100])
def test_neither_batch_size_nor_order_decides_what_a_row_is_given(batch_size):
    rows = random_rows(20)
    alone = [score_rows(PrefixScorer(), [row], batch_size=1, max_seq_len=128)[0] for row in rows]
    order = np.random.default_rng(1).permutation(len(rows))
    shuffled = score_rows(PrefixScorer(), [rows[number] for number in order], batch_size=batch_size, max_seq_len=128)
    for number, found in zip(order, shuffled, strict=True):
        assert found.log_probabilities.tolist() == alone[number].log_probabilities.tolist()
        assert found.is_likeliest.tolist() == alone[number].is_likeliest.tolist()


def test_only_tokens_that_count_are_given():
    row = Row(np.array([3, 4, 5, 6], np.int32), np.array([True, False, True, True]))
    (found,) = score_rows(TableScorer(float, likeliest=[6]), [row], batch_size=2, max_seq_len=64)
    assert found.log_probabilities.tolist() == [-5.0, -6.0]
    assert found.is_likeliest.tolist() == [False, True]


def test_batches_have_few_shapes_and_none_is_wider_than_allowed():
    scorer = TableScorer(lambda _: 1.0)
    rows = [continuation_row([1], [2] * size) for size in (*range(1, 200), 300)]
    score_rows(scorer, rows, batch_size=8, max_seq_len=300)
    assert set(scorer.shapes) == {(8, 65), (8, 129), (8, 257), (8, 301)}
    assert len(scorer.shapes) == 25


def test_progress_counts_rows():
    done = []
    score_rows(PrefixScorer(), random_rows(5), batch_size=2, max_seq_len=128, on_progress=done.append)
    assert done == [2, 4, 5]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_likelihood_that_is_no_number_is_refused(bad):
    scorer = TableScorer(lambda id: bad if id == 9 else 1.0)
    with pytest.raises(UserError, match="likelihood that is no number"):
        score_rows(scorer, [continuation_row([1, 9], [2]), continuation_row([1], [9])], batch_size=2, max_seq_len=64)


# --- JAX ---


@pytest.mark.usefixtures("float64")
def test_scores_are_the_log_softmax_of_the_logits():
    start = initial_parameters(SMALL, initializer="scaled_normal", seed=0, dtype="float64")
    parameters = jax.tree.map(jnp.asarray, start)
    scorer = JaxScorer(SMALL, parameters, dtype=jnp.dtype("float64"))
    rows = random_rows(5)
    tokens = np.stack([np.pad(row.ids[:-1], (0, 90 - row.predictions)) for row in rows])
    every = jax_logits(SMALL, parameters, tokens, dtype="float64")
    scores = score_rows(scorer, rows, batch_size=5, max_seq_len=128)
    for row, found, logits in zip(rows, scores, every, strict=True):
        logits = logits[: row.predictions]
        log_probabilities = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        targets, asked = row.ids[1:], row.counts[1:]
        expected = log_probabilities[np.arange(len(targets)), targets]
        np.testing.assert_allclose(found.log_probabilities, expected[asked], rtol=0, atol=1e-12)
        assert (found.is_likeliest == (logits.argmax(axis=-1) == targets)[asked]).all()


def test_the_likeliest_token_is_told_in_every_chunk():
    rng = np.random.default_rng(0)
    hidden, head = rng.standard_normal((600, 8), np.float32), rng.standard_normal((50, 8), np.float32)
    best, counts = (hidden @ head.T).argmax(axis=-1), rng.random(600) < 0.9
    scores = jax.jit(token_scores)
    assert (scores(hidden, head, best, counts)[1] == counts).all()
    assert not scores(hidden, head, (best + 1) % 50, counts)[1].any()


def test_of_equally_likely_tokens_the_first_is_the_likeliest():
    hidden, head = np.zeros((2, 4), np.float32), np.ones((7, 4), np.float32)
    scores = jax.jit(token_scores)(hidden, head, np.array([0, 3]), np.ones(2, bool))
    assert scores[1].tolist() == [True, False]
