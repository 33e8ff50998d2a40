"""Distillation in chunks against formulas that hold all logits of student and teacher.

S positions  D hidden  V vocabulary
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minigpt_jax import distillation as distillation_room
from minigpt_jax.distillation import distillation_loss
from minigpt_jax.loss import SPARSE_CHUNK, next_token_loss

MIXTURE = {"alpha": 0.3, "temperature": 2.0}


def inputs(positions=25, *, hidden_size=5, teacher_size=8, vocab=13, seed=0):
    rng = np.random.default_rng(seed)
    hidden, head = rng.standard_normal((positions, hidden_size)), rng.standard_normal((vocab, hidden_size))
    teacher = rng.standard_normal((positions, teacher_size)), rng.standard_normal((vocab, teacher_size))
    weights = rng.integers(0, 2, positions) * rng.choice([1.0, 0.25], positions)
    return hidden, head, *teacher, rng.integers(0, vocab, positions).astype(np.int32), weights


def plain_loss(hidden, head, teacher_hidden, teacher_head, targets, loss_weights, *, alpha, temperature):
    """(loss, cross entropy, divergence), each summed."""
    logits, teacher_logits = hidden @ head.T, teacher_hidden @ teacher_head.T
    losses = -jax.nn.log_softmax(logits)[jnp.arange(len(targets)), targets]
    teacher = jax.nn.softmax(teacher_logits / temperature)
    divergences = jnp.sum(teacher * jnp.log(teacher / jax.nn.softmax(logits / temperature)), axis=-1)
    cross_entropy, divergence = loss_weights @ losses, loss_weights @ divergences
    return alpha * cross_entropy + (1 - alpha) * temperature**2 * divergence, cross_entropy, divergence


def with_gradients(loss, **mixture):
    """(loss, what else it says), gradients of hidden and head."""

    def first_and_rest(*arrays):
        first, *rest = loss(*arrays, **mixture)
        return first, tuple(rest)

    return jax.jit(lambda *arrays: jax.value_and_grad(first_and_rest, argnums=(0, 1), has_aux=True)(*arrays))


@cache
def compiled():
    """`with_gradients` of MIXTURE; it remembers the chunk it was traced with."""
    return with_gradients(distillation_loss, **MIXTURE)


@pytest.fixture
def in_chunks_of_7(monkeypatch):
    monkeypatch.setattr(distillation_room, "SPARSE_CHUNK", 7)
    return compiled()


def assert_near(ours, theirs):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-12), ours, theirs)


# --- The function ---


@pytest.mark.parametrize(("alpha", "temperature"), [(0.0, 3.0), (0.3, 0.5)])
def test_sums_and_gradients_are_those_of_the_plain_formula(alpha, temperature, monkeypatch, float64):
    monkeypatch.setattr(distillation_room, "SPARSE_CHUNK", 7)
    arrays, mixture = inputs(), {"alpha": alpha, "temperature": temperature}
    ours = with_gradients(distillation_loss, **mixture)(*arrays)
    assert_near(ours, with_gradients(plain_loss, **mixture)(*arrays))


def test_the_sums_alone_are_those_beside_the_gradients(in_chunks_of_7, float64):
    (loss, measures), _ = in_chunks_of_7(*inputs())
    alone = jax.jit(lambda *arrays: distillation_loss(*arrays, **MIXTURE))(*inputs())
    np.testing.assert_array_equal((loss, *measures), tuple(alone))


def test_with_alpha_1_it_is_the_next_token_loss(float64):
    hidden, head, *teacher, targets, weights = map(jnp.asarray, inputs())

    def loss(hidden, head):
        return distillation_loss(hidden, head, *teacher, targets, weights, alpha=1.0, temperature=2.0).loss

    def expected(hidden, head):
        return next_token_loss(hidden, head, targets, weights)

    both = (jax.jit(jax.value_and_grad(function, argnums=(0, 1)))(hidden, head) for function in (loss, expected))
    assert_near(*both)


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_a_student_that_is_its_teacher_has_nothing_to_learn_from_it(temperature, float64):
    hidden, head, _, _, targets, weights = inputs()
    (loss, (cross_entropy, divergence)), gradients = with_gradients(
        distillation_loss, alpha=0.0, temperature=temperature
    )(hidden, head, hidden, head, targets, weights)
    assert_near((loss, divergence, gradients), (0.0, 0.0, (0 * hidden, 0 * head)))
    assert cross_entropy > 1


def test_a_token_that_the_student_rules_out_costs_what_the_teacher_gives_it(float64):
    # One position, two tokens: logits are the head's rows. The teacher is undecided; the student is sure of token 0.
    one, student, teacher = np.ones((1, 1)), np.asarray([[20.0], [-20.0]]), np.zeros((2, 1))
    both = np.zeros(1, np.int32), np.ones(1)
    towards = distillation_loss(one, student, one, teacher, *both, alpha=0.0, temperature=1.0).divergence
    np.testing.assert_allclose(towards, 20 - np.log(2), rtol=1e-12)


def test_a_factor_on_the_loss_is_a_factor_on_its_gradients(in_chunks_of_7, float64):
    arrays = inputs()
    tripled = with_gradients(lambda *arrays: [3 * part for part in distillation_loss(*arrays, **MIXTURE)])(*arrays)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, 3 * b, rtol=1e-14), tripled, in_chunks_of_7(*arrays))


# --- What is left out ---


def test_neither_the_teacher_nor_a_measure_has_a_gradient(float64):
    hidden, head, *teacher, targets, weights = map(jnp.asarray, inputs())

    def sums(hidden, head, *teacher):
        return jnp.stack(distillation_loss(hidden, head, *teacher, targets, weights, **MIXTURE))

    by_hidden, by_head, *by_teacher = jax.jit(jax.jacrev(sums, argnums=(0, 1, 2, 3)))(hidden, head, *teacher)
    assert not any(np.any(by_array[1:]) for by_array in (by_hidden, by_head))
    assert not any(np.any(by_array) for by_array in by_teacher)
    assert np.any(by_hidden[0])


def test_without_a_supervised_position_sums_and_gradients_are_zero(in_chunks_of_7, float64):
    *arrays, weights = inputs()
    assert [np.abs(leaf).max() for leaf in jax.tree.leaves(in_chunks_of_7(*arrays, 0 * weights))] == [0, 0, 0, 0, 0]


def test_an_unsupervised_position_has_no_gradient(in_chunks_of_7, float64):
    *arrays, weights = inputs()
    _, (gradient, _) = in_chunks_of_7(*arrays, weights)
    np.testing.assert_array_equal(np.abs(gradient).max(axis=1) > 0, weights > 0)


def test_vocabularies_of_different_sizes_are_refused():
    hidden, head, teacher_hidden, teacher_head, *rest = inputs()
    with pytest.raises(ValueError, match="student 13, teacher 12"):
        distillation_loss(hidden, head, teacher_hidden, teacher_head[:12], *rest, alpha=0.5, temperature=1.0)


# --- Precision and memory ---


def test_the_sums_of_bfloat16_hidden_states_are_those_of_float32_logits(in_chunks_of_7):
    *matrices, targets, weights = inputs(200, hidden_size=16)
    low = [jnp.asarray(matrix, jnp.bfloat16) for matrix in matrices]
    (loss, measures), gradients = in_chunks_of_7(*low, targets, weights)
    expected = jax.jit(lambda *arrays: plain_loss(*arrays, **MIXTURE))(
        *(matrix.astype(jnp.float32) for matrix in low), targets, weights
    )
    assert (loss.dtype, *(leaf.dtype for leaf in gradients)) == (jnp.float32, jnp.bfloat16, jnp.bfloat16)
    np.testing.assert_allclose((loss, *measures), expected, rtol=2e-6)


def test_the_compiled_loss_never_holds_all_logits():
    positions, vocab = 64 * SPARSE_CHUNK, 512
    shapes = [
        jax.ShapeDtypeStruct((positions, 8), jnp.float32),
        jax.ShapeDtypeStruct((vocab, 8), jnp.float32),
        jax.ShapeDtypeStruct((positions, 8), jnp.float32),
        jax.ShapeDtypeStruct((vocab, 8), jnp.float32),
        jax.ShapeDtypeStruct((positions,), jnp.int32),
        jax.ShapeDtypeStruct((positions,), jnp.float32),
    ]
    chunked, plain = (
        with_gradients(loss, **MIXTURE).lower(*shapes).compile().memory_analysis().temp_size_in_bytes
        for loss in (distillation_loss, plain_loss)
    )
    all_logits = 4 * positions * vocab
    assert chunked < all_logits / 3 < all_logits <= plain
