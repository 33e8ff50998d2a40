"""The chunked loss against the plain one.

S positions  D hidden  V vocabulary
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minigpt_jax import loss as loss_room
from minigpt_jax.loss import next_token_loss


def inputs(positions, *, hidden_size=5, vocab=11, seed=0):
    rng = np.random.default_rng(seed)
    hidden, head = rng.standard_normal((positions, hidden_size)), rng.standard_normal((vocab, hidden_size))
    weights = rng.integers(0, 2, positions) * rng.choice([1.0, 0.25], positions)
    return hidden, head, rng.integers(0, vocab, positions).astype(np.int32), weights


def plain_loss(hidden, head, targets, loss_weights):
    losses = optax.softmax_cross_entropy_with_integer_labels(hidden @ head.T, targets)
    return jnp.sum(losses * loss_weights)


def value_and_gradients(loss):
    # A new function each time: the compiled one remembers the chunk it was traced with.
    return jax.jit(lambda *arrays: jax.value_and_grad(loss, argnums=(0, 1))(*arrays))


# --- The function ---


@pytest.mark.parametrize("positions", [1, 6, 7, 8, 21, 25])
def test_the_chunked_loss_and_its_gradients_are_the_plain_ones(positions, monkeypatch, float64):
    monkeypatch.setattr(loss_room, "CHUNK", 7)
    arrays = inputs(positions)
    chunked, plain = value_and_gradients(next_token_loss)(*arrays), value_and_gradients(plain_loss)(*arrays)
    jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12), chunked, plain)


def test_the_loss_alone_is_the_loss_beside_its_gradients(monkeypatch, float64):
    monkeypatch.setattr(loss_room, "CHUNK", 7)
    arrays = inputs(25)
    assert next_token_loss(*arrays) == value_and_gradients(next_token_loss)(*arrays)[0]


def test_a_factor_on_the_loss_is_a_factor_on_its_gradients(float64):
    *arrays, weights = inputs(9)
    tripled = jax.grad(lambda *varied: 3 * next_token_loss(*varied, weights), argnums=(0, 1))(*arrays)
    single = jax.grad(lambda *varied: next_token_loss(*varied, weights), argnums=(0, 1))(*arrays)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, 3 * b, rtol=1e-15), tripled, single)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(weights=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=25, max_size=25))
def test_the_order_of_positions_does_not_matter(weights, chunk_of_7, float64):
    hidden, head, targets, _ = inputs(25)
    weights = np.array(weights)
    forward = chunk_of_7(hidden, head, targets, weights)
    backward = chunk_of_7(hidden[::-1], head, targets[::-1], weights[::-1])
    np.testing.assert_allclose(forward, backward, rtol=1e-14, atol=1e-14)


@pytest.fixture
def chunk_of_7(monkeypatch):
    monkeypatch.setattr(loss_room, "CHUNK", 7)
    return jax.jit(lambda *arrays: next_token_loss(*arrays))


# --- Weights and labels ---


def test_without_a_supervised_position_loss_and_gradients_are_zero():
    hidden, head, targets, weights = inputs(9)
    results = value_and_gradients(next_token_loss)(hidden * 1e4, head, targets, 0 * weights)
    assert [np.abs(leaf).max() for leaf in jax.tree.leaves(results)] == [0, 0, 0]


def test_an_unsupervised_position_has_no_gradient(float64):
    hidden, head, targets, weights = inputs(25)
    gradient = jax.grad(next_token_loss)(hidden, head, targets, weights)
    np.testing.assert_array_equal(np.abs(gradient).max(axis=1) > 0, weights > 0)


def test_token_0_keeps_its_label(float64):
    hidden, head, _, _ = inputs(4)
    loss = next_token_loss(hidden, head, np.zeros(4, np.int32), np.ones(4))
    np.testing.assert_allclose(loss, -jax.nn.log_softmax(hidden @ head.T)[:, 0].sum(), rtol=1e-14)


# --- Precision and memory ---


def test_the_loss_of_bfloat16_hidden_states_is_that_of_float32_logits():
    hidden, head, targets, weights = inputs(200, hidden_size=16)
    hidden, head = jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(head, jnp.bfloat16)
    loss = next_token_loss(hidden, head.astype(jnp.float32), targets, weights)
    expected = plain_loss(hidden.astype(jnp.float32), head.astype(jnp.float32), targets, weights)
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, expected, rtol=1e-6)


def test_gradients_have_the_precision_of_what_they_belong_to():
    hidden, head, targets, weights = inputs(9)
    gradients = jax.grad(next_token_loss, argnums=(0, 1))(
        jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(head, jnp.float32), targets, weights
    )
    assert [leaf.dtype for leaf in gradients] == [jnp.bfloat16, jnp.float32]


def test_the_compiled_loss_never_holds_all_logits():
    positions, hidden_size, vocab = 16 * loss_room.CHUNK, 8, 512
    shapes = [
        jax.ShapeDtypeStruct((positions, hidden_size), jnp.float32),
        jax.ShapeDtypeStruct((vocab, hidden_size), jnp.float32),
        jax.ShapeDtypeStruct((positions,), jnp.int32),
        jax.ShapeDtypeStruct((positions,), jnp.float32),
    ]
    chunked, plain = (
        value_and_gradients(loss).lower(*shapes).compile().memory_analysis().temp_size_in_bytes
        for loss in (next_token_loss, plain_loss)
    )
    all_logits = 4 * positions * vocab
    assert chunked < all_logits / 3 < all_logits <= plain
