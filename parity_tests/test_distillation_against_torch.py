"""The distillation loss in both frameworks, and both against torch's own kl_div.

S positions  D hidden  V vocabulary
"""

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional as F  # noqa: E402
from twins import to_numpy  # noqa: E402

from minigpt_jax.distillation import distillation_loss as jax_loss  # noqa: E402
from minigpt_torch.distillation import distillation_loss as torch_loss  # noqa: E402

POSITIONS, VOCAB = 150, 97


def inputs(dtype, *, supervised=True):
    """Student of width 16, teacher of width 24, targets and weights."""
    rng = np.random.default_rng(5)
    shapes = (POSITIONS, 16), (VOCAB, 16), (POSITIONS, 24), (VOCAB, 24)
    matrices = [(0.5 * rng.standard_normal(shape)).astype(dtype) for shape in shapes]
    weights = (supervised * rng.integers(0, 2, POSITIONS)).astype(dtype)
    return *matrices, rng.integers(0, VOCAB, POSITIONS).astype(np.int32), weights


def jax_results(arrays, **mixture):
    """Loss, cross entropy, divergence; then the loss's gradients by hidden and head, by the teacher's too."""

    def loss(*arrays):
        result = jax_loss(*arrays, **mixture)
        return result.loss, result

    gradients, result = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(*arrays)
    return [*result, *gradients]


def torch_results(arrays, **mixture):
    """The same of the twin."""
    matrices = [torch.tensor(array, requires_grad=True) for array in arrays[:4]]
    result = torch_loss(*matrices, torch.tensor(arrays[4]).long(), torch.tensor(arrays[5]), **mixture)
    gradients = torch.autograd.grad(result.loss, matrices, allow_unused=True, materialize_grads=True)
    return [*map(to_numpy, result), *map(to_numpy, gradients)]


@pytest.mark.parametrize(("alpha", "temperature"), [(0.0, 1.0), (0.3, 2.0), (1.0, 1.0)])
def test_sums_and_gradients_are_the_same_in_float64(alpha, temperature, float64, bound, relative_error):
    arrays, mixture = inputs("float64"), {"alpha": alpha, "temperature": temperature}
    for a, b in zip(jax_results(arrays, **mixture), torch_results(arrays, **mixture), strict=True):
        assert relative_error(a, b) <= bound.gradient


def test_sums_and_gradients_are_the_same_in_float32(bound_float32, relative_error):
    arrays, mixture = inputs("float32"), {"alpha": 0.3, "temperature": 2.0}
    for a, b in zip(jax_results(arrays, **mixture), torch_results(arrays, **mixture), strict=True):
        assert np.asarray(a).dtype == b.dtype == np.float32
        assert relative_error(a, b) <= bound_float32.gradient


def test_both_are_what_torch_has_as_cross_entropy_and_kl_div(float64, bound, relative_error):
    arrays, alpha, temperature = inputs("float64"), 0.3, 2.0
    hidden, head, teacher_hidden, teacher_head, targets, weights = map(torch.tensor, arrays)
    logits, teacher_logits = hidden @ head.T, teacher_hidden @ teacher_head.T
    cross_entropy = weights @ F.cross_entropy(logits, targets.long(), reduction="none")
    student, teacher = (F.log_softmax(each / temperature, dim=-1) for each in (logits, teacher_logits))
    divergence = weights @ F.kl_div(student, teacher, log_target=True, reduction="none").sum(dim=-1)
    expected = alpha * cross_entropy + (1 - alpha) * temperature**2 * divergence, cross_entropy, divergence
    for results in (jax_results, torch_results):
        sums = results(arrays, alpha=alpha, temperature=temperature)[:3]
        assert max(map(relative_error, sums, expected)) <= bound.gradient


def test_the_twin_is_the_same_in_any_chunks(monkeypatch, float64, bound, relative_error):
    arrays, mixture = inputs("float64"), {"alpha": 0.3, "temperature": 2.0}
    whole = torch_results(arrays, **mixture)
    monkeypatch.setattr("minigpt_torch.distillation.CHUNK", 7)
    assert max(map(relative_error, torch_results(arrays, **mixture), whole)) <= bound.gradient


def test_neither_differentiates_the_teacher(float64):
    arrays = inputs("float64")
    for results in (jax_results, torch_results):
        *_, by_teacher_hidden, by_teacher_head = results(arrays, alpha=0.3, temperature=2.0)
        assert not np.any(by_teacher_hidden)
        assert not np.any(by_teacher_head)


def test_without_a_supervised_position_both_are_0_with_gradients_of_0(float64):
    arrays = inputs("float64", supervised=False)
    for results in (jax_results, torch_results):
        assert not any(np.any(value) for value in results(arrays, alpha=0.3, temperature=2.0))


def test_the_twin_refuses_vocabularies_of_different_sizes_as_well():
    hidden, head, teacher_hidden, teacher_head, *rest = map(torch.tensor, inputs("float32"))
    with pytest.raises(ValueError, match="student 97, teacher 96"):
        torch_loss(hidden, head, teacher_hidden, teacher_head[:96], *rest, alpha=0.3, temperature=2.0)
