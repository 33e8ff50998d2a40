"""Log-probabilities of answers and the loss of a pair against formulas that hold all logits.

S = rows * T positions  D hidden  V vocabulary  P pairs
"""

import math
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minigpt_jax import loss as loss_room
from minigpt_jax import preference as preference_room
from minigpt_jax.preference import answer_log_probabilities, preference_loss

ROWS, TIME = 4, 11


def inputs(*, rows=ROWS, time=TIME, hidden_size=5, vocab=13, seed=0):
    """Rows of which the last one has nothing to learn."""
    rng = np.random.default_rng(seed)
    hidden, head = rng.standard_normal((rows * time, hidden_size)), rng.standard_normal((vocab, hidden_size))
    weights = rng.integers(0, 2, (rows, time)).astype(float)
    weights[-1] = 0
    return hidden, head, rng.integers(0, vocab, rows * time).astype(np.int32), weights.reshape(-1)


def plain_log_probabilities(hidden, head, targets, loss_weights, *, rows):
    log_probabilities = jax.nn.log_softmax(hidden @ head.T)[jnp.arange(len(targets)), targets]
    return jnp.sum((loss_weights * log_probabilities).reshape(rows, -1), axis=1)


def mixed(log_probabilities, *, rows=ROWS):
    """A scalar to which each row contributes with a factor, and a sign, of its own."""
    factors = jnp.asarray([1.5, -0.5, 3.0, -2.0])[:rows]
    return lambda *arrays: jnp.sum(jnp.sin(log_probabilities(*arrays, rows=rows)) * factors)


def value_and_gradients(log_probabilities):
    return jax.jit(jax.value_and_grad(mixed(log_probabilities), argnums=(0, 1)))


def assert_near(ours, theirs):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-12), ours, theirs)


@cache
def compiled():
    """The log-probabilities, and a value with its gradients; they remember the chunk they were traced with."""
    return jax.jit(partial(answer_log_probabilities, rows=ROWS)), value_and_gradients(answer_log_probabilities)


@pytest.fixture
def in_chunks_of_7(monkeypatch):
    monkeypatch.setattr(loss_room, "SPARSE_CHUNK", 7)
    monkeypatch.setattr(preference_room, "SPARSE_CHUNK", 7)
    return compiled()


# --- Log-probabilities of answers ---


def test_each_row_has_the_sum_over_its_supervised_tokens(in_chunks_of_7, float64):
    log_probabilities, _ = in_chunks_of_7
    assert_near(log_probabilities(*inputs()), jax.jit(partial(plain_log_probabilities, rows=ROWS))(*inputs()))


def test_gradients_are_those_of_the_plain_formula_whatever_each_row_counts(in_chunks_of_7, float64):
    _, gradients = in_chunks_of_7
    assert_near(gradients(*inputs()), value_and_gradients(plain_log_probabilities)(*inputs()))


def test_a_row_without_a_supervised_token_is_0_and_has_no_gradient(in_chunks_of_7, float64):
    log_probabilities, gradients = in_chunks_of_7
    hidden, head, targets, weights = inputs()
    hidden[-TIME:] *= 1e4
    assert log_probabilities(hidden, head, targets, weights)[-1] == 0
    _, (gradient, _) = gradients(hidden, head, targets, weights)
    np.testing.assert_array_equal(np.abs(gradient).max(axis=1) > 0, weights > 0)


def test_without_any_supervised_token_values_and_gradients_are_0(in_chunks_of_7, float64):
    _, gradients = in_chunks_of_7
    hidden, head, targets, weights = inputs()
    results = gradients(hidden * 1e4, head, targets, 0 * weights)
    assert [np.abs(leaf).max() for leaf in jax.tree.leaves(results)] == [0, 0, 0]


@pytest.mark.parametrize(("before", "after"), [(0, 3), (4, 0)])
def test_padding_does_not_change_a_row(before, after, in_chunks_of_7, float64):
    log_probabilities, _ = in_chunks_of_7
    hidden, head, targets, weights = inputs()

    def padded(array):
        rows = array.reshape(ROWS, TIME, *array.shape[1:])
        rows = np.pad(rows, [(0, 0), (before, after), *[(0, 0)] * (array.ndim - 1)])
        return rows.reshape(-1, *array.shape[1:])

    longer = log_probabilities(padded(hidden), head, padded(targets), padded(weights))
    assert_near(longer, log_probabilities(hidden, head, targets, weights))


def test_values_and_gradients_of_bfloat16_hidden_states_are_as_precise_as_they_can_be(in_chunks_of_7):
    log_probabilities, gradients = in_chunks_of_7
    hidden, head, targets, weights = inputs(hidden_size=16)
    hidden, head = jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(head, jnp.bfloat16).astype(jnp.float32)
    ours = log_probabilities(hidden, head, targets, weights)
    assert ours.dtype == jnp.float32
    plain = jax.jit(partial(plain_log_probabilities, rows=ROWS))
    expected = plain(hidden.astype(jnp.float32), head, targets, weights)
    np.testing.assert_allclose(ours, expected, rtol=1e-6)
    value, by_array = gradients(hidden, head, targets, weights)
    assert [leaf.dtype for leaf in (value, *by_array)] == [jnp.float32, jnp.bfloat16, jnp.float32]


def test_the_compiled_gradient_never_holds_all_logits():
    positions, hidden_size, vocab = 64 * loss_room.SPARSE_CHUNK, 8, 512
    shapes = [
        jax.ShapeDtypeStruct((positions, hidden_size), jnp.float32),
        jax.ShapeDtypeStruct((vocab, hidden_size), jnp.float32),
        jax.ShapeDtypeStruct((positions,), jnp.int32),
        jax.ShapeDtypeStruct((positions,), jnp.float32),
    ]
    chunked, plain = (
        value_and_gradients(formula).lower(*shapes).compile().memory_analysis().temp_size_in_bytes
        for formula in (answer_log_probabilities, plain_log_probabilities)
    )
    all_logits = 4 * positions * vocab
    assert chunked < all_logits / 3 < all_logits <= plain


# --- The loss of a pair ---


def pairs(size=6, seed=1):
    """Log-probabilities of chosen and rejected answers, under the policy and under the reference."""
    return tuple(-np.random.default_rng(seed).uniform(1, 40, (4, size)))


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_the_first_loss_is_ln_2_and_no_answer_has_a_reward(label_smoothing, float64):
    chosen, rejected, _, _ = pairs()
    result = preference_loss(chosen, rejected, chosen, rejected, beta=0.1, label_smoothing=label_smoothing)
    np.testing.assert_allclose(result.loss, math.log(2), rtol=2e-16, atol=0)
    assert not np.any(result.margins)
    # A tie is not a success.
    assert not np.any(result.accuracies)


def test_loss_rewards_margin_and_accuracy_of_a_pair_by_hand(float64):
    # The chosen answer became 3 nats more likely, the rejected one 1 nat more likely.
    result = preference_loss(*(jnp.asarray([value]) for value in (-7.0, -4.0, -10.0, -5.0)), beta=0.5)
    np.testing.assert_allclose(result.loss, [-math.log(1 / (1 + math.exp(-0.5 * 2)))], rtol=1e-15)
    assert (result.chosen_rewards, result.rejected_rewards) == (1.5, 0.5)
    assert (result.margins, result.accuracies) == (1.0, 1.0)


def test_exchanging_the_two_answers_turns_the_pair_round(float64):
    chosen, rejected, reference_chosen, reference_rejected = pairs()
    result = preference_loss(chosen, rejected, reference_chosen, reference_rejected, beta=0.2)
    turned = preference_loss(rejected, chosen, reference_rejected, reference_chosen, beta=0.2)
    np.testing.assert_array_equal(turned.margins, -result.margins)
    np.testing.assert_array_equal(turned.accuracies, 1 - result.accuracies)
    np.testing.assert_allclose(turned.loss - result.loss, result.margins, rtol=1e-12)


def test_the_gradient_is_minus_beta_times_the_probability_of_the_wrong_order(float64):
    arrays = pairs()
    beta, smoothing = 0.1, 0.2
    margins = preference_loss(*arrays, beta=beta).margins

    def total(*arrays):
        return jnp.sum(preference_loss(*arrays, beta=beta, label_smoothing=smoothing).loss)

    gradients = jax.grad(total, argnums=(0, 1, 2, 3))(*arrays)
    expected = -beta * ((1 - smoothing) / (1 + np.exp(margins)) - smoothing / (1 + np.exp(-margins)))
    assert_near(gradients, (expected, -expected, 0 * expected, 0 * expected))


def test_rewards_have_no_gradient(float64):
    def rewards(*arrays):
        result = preference_loss(*arrays, beta=0.1)
        return jnp.sum(result.chosen_rewards) + 2 * jnp.sum(result.rejected_rewards)

    gradients = jax.grad(rewards, argnums=(0, 1, 2, 3))(*pairs())
    assert not np.any(gradients)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("gap", [-1e4, 1e4])
def test_extreme_gaps_stay_finite(gap, label_smoothing):
    def total(chosen):
        zero = jnp.zeros(1)
        return jnp.sum(preference_loss(chosen, zero, zero, zero, beta=1.0, label_smoothing=label_smoothing).loss)

    loss, gradient = jax.value_and_grad(total)(jnp.full(1, gap))
    wrong = 1 - label_smoothing if gap < 0 else label_smoothing
    np.testing.assert_allclose(loss, wrong * 1e4, rtol=1e-6)
    np.testing.assert_allclose(gradient, [math.copysign(wrong, gap)], rtol=1e-6)


def test_a_padding_pair_that_the_caller_weighs_0_adds_nothing(float64):
    hidden, head, targets, weights = inputs(rows=4)
    weights[2 * TIME :] = 0  # rows 2 and 3 are the second pair, which is padding
    targets, weights = jnp.asarray(targets), jnp.asarray(weights)

    @jax.jit
    @partial(jax.value_and_grad, argnums=(0, 1))
    def loss(hidden, head):
        chosen, rejected = answer_log_probabilities(hidden, head, targets, weights, rows=4).reshape(2, 2).T
        result = preference_loss(chosen, rejected, jnp.zeros(2), jnp.zeros(2), beta=0.1)
        return jnp.asarray([1.0, 0.0]) @ result.loss

    first = loss(hidden, head)
    hidden[2 * TIME :] = 1e4
    jax.tree.map(np.testing.assert_array_equal, first, loss(hidden, head))
    assert first[0] > 0
