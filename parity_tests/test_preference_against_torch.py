"""The preference loss in both frameworks, and both against TRL's formula written out.

S = rows * T positions  D hidden  V vocabulary  P pairs
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.nn.functional import logsigmoid  # noqa: E402
from twins import to_numpy  # noqa: E402

from minigpt_jax import preference as ours  # noqa: E402
from minigpt_torch import preference as theirs  # noqa: E402

ROWS, TIME, HIDDEN, VOCAB = 6, 29, 16, 97
REFERENCE = -np.random.default_rng(7).uniform(20, 60, (2, ROWS // 2))
"""Log-probabilities under the reference: of the chosen answers, then of the rejected ones."""


def inputs(dtype, *, supervised=True):
    """Hidden states, head, targets and weights; the last row has nothing to learn."""
    rng = np.random.default_rng(3)
    weights = rng.integers(0, 2, (ROWS, TIME))
    weights[-1] = 0
    return (
        rng.standard_normal((ROWS * TIME, HIDDEN)).astype(dtype),
        rng.standard_normal((VOCAB, HIDDEN)).astype(dtype),
        rng.integers(0, VOCAB, ROWS * TIME).astype(np.int32),
        (supervised * weights).reshape(-1).astype(dtype),
    )


def result_of(room, arrays, reference, **options):
    """Log-probabilities [rows] and the result of the pairs: the first half of the rows is chosen over the second."""
    log_probabilities = room.answer_log_probabilities(*arrays, rows=ROWS)
    chosen, rejected = log_probabilities.reshape(2, -1)
    return log_probabilities, room.preference_loss(chosen, rejected, *reference, **options)


def jax_results(arrays, **options):
    """Log-probabilities, losses, both rewards, margins, accuracies; then the summed loss's two gradients."""

    def loss(*arrays):
        log_probabilities, result = result_of(ours, arrays, REFERENCE.astype(arrays[0].dtype), **options)
        return jnp.sum(result.loss), (log_probabilities, *result, result.margins, result.accuracies)

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    by_array, values = gradient(*arrays)
    return [*values, *by_array]


def torch_results(arrays, **options):
    """The same of the twin."""
    hidden, head, targets, weights = map(torch.tensor, arrays)
    hidden.requires_grad_(), head.requires_grad_()
    reference = torch.tensor(REFERENCE, dtype=hidden.dtype)
    log_probabilities, result = result_of(theirs, (hidden, head, targets.long(), weights), reference, **options)
    by_array = torch.autograd.grad(result.loss.sum(), (hidden, head))
    return [log_probabilities, *result, result.margins, result.accuracies, *by_array]


@pytest.mark.parametrize("options", [{"beta": 0.1}, {"beta": 0.5, "label_smoothing": 0.2}], ids=["dpo", "conservative"])
def test_values_and_gradients_are_the_same_in_float64(options, float64, bound, relative_error):
    arrays = inputs("float64")
    for a, b in zip(jax_results(arrays, **options), torch_results(arrays, **options), strict=True):
        assert relative_error(a, to_numpy(b)) <= bound.gradient


def test_values_and_gradients_are_the_same_in_float32(bound_float32, relative_error):
    arrays = inputs("float32")
    for a, b in zip(jax_results(arrays, beta=0.1), torch_results(arrays, beta=0.1), strict=True):
        assert np.asarray(a).dtype == to_numpy(b).dtype == np.float32
        assert relative_error(a, to_numpy(b)) <= bound_float32.gradient


def test_without_a_supervised_position_both_are_0_with_gradients_of_0(float64):
    arrays = inputs("float64", supervised=False)
    for results in (jax_results(arrays, beta=0.1), torch_results(arrays, beta=0.1)):
        log_probabilities, *_, by_hidden, by_head = map(to_numpy, results)
        assert [np.abs(array).max() for array in (log_probabilities, by_hidden, by_head)] == [0, 0, 0]


@pytest.fixture
def log_probabilities():
    return -np.random.default_rng(11).uniform(1, 80, (4, 9))


def both_losses(arrays, **options):
    """(losses, chosen rewards, rejected rewards, gradients by all four arrays) of each framework."""
    jax_arrays, torch_arrays = (
        list(map(jnp.asarray, arrays)),
        [torch.tensor(array, requires_grad=True) for array in arrays],
    )
    result = ours.preference_loss(*jax_arrays, **options)
    gradients = jax.grad(lambda *arrays: jnp.sum(ours.preference_loss(*arrays, **options).loss), argnums=(0, 1, 2, 3))
    twin = theirs.preference_loss(*torch_arrays, **options)
    twin_gradients = torch.autograd.grad(twin.loss.sum(), torch_arrays, allow_unused=True, materialize_grads=True)
    return [*result, *gradients(*jax_arrays)], [*map(to_numpy, twin), *map(to_numpy, twin_gradients)]


@pytest.mark.parametrize("label_smoothing", [0.0, 0.15])
def test_both_are_the_sigmoid_loss_of_trl(label_smoothing, log_probabilities, float64, bound, relative_error):
    beta = 0.3
    policy_chosen, policy_rejected, reference_chosen, reference_rejected = map(torch.tensor, log_probabilities)
    delta = (policy_chosen - policy_rejected) - (reference_chosen - reference_rejected)
    losses = -logsigmoid(beta * delta) * (1 - label_smoothing) - logsigmoid(-beta * delta) * label_smoothing
    rewards = beta * (policy_chosen - reference_chosen), beta * (policy_rejected - reference_rejected)
    for values in both_losses(log_probabilities, beta=beta, label_smoothing=label_smoothing):
        for value, expected in zip(values[:3], (losses, *rewards), strict=True):
            assert relative_error(value, expected) <= bound.gradient


def test_the_first_loss_is_ln_2_in_both(log_probabilities, float64):
    same = np.concatenate([log_probabilities[:2]] * 2)
    for loss, chosen_rewards, rejected_rewards, *_ in both_losses(same, beta=0.1):
        np.testing.assert_array_equal(loss, np.full(9, math.log(2)))
        assert not np.any(chosen_rewards)
        assert not np.any(rejected_rewards)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.15])
def test_extreme_gaps_are_finite_and_the_same(label_smoothing, dtype, float64, bound, relative_error):
    gaps = np.asarray([-1e4, -90.0, 0.0, 90.0, 1e4], dtype)
    values, twin_values = both_losses([gaps, *np.zeros((3, 5), dtype)], beta=1.0, label_smoothing=label_smoothing)
    for value, twin_value in zip(values, twin_values, strict=True):
        assert np.all(np.isfinite(twin_value))
        assert relative_error(value, twin_value) <= bound.gradient


def test_neither_reference_is_differentiated(log_probabilities, float64):
    for values in both_losses(log_probabilities, beta=0.1):
        by_policy, by_reference = values[3:5], values[5:]
        assert all(np.all(np.abs(gradient) > 0) for gradient in by_policy)
        assert not any(np.any(gradient) for gradient in by_reference)
