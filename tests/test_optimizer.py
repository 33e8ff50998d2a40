"""Clipping, decay, Muon. That AdamW is torch's is in parity_tests/test_optimizer_against_torch.py."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minigpt_jax.config import ModelConfig, TrainConfig
from minigpt_jax.initialization import initial_parameters
from minigpt_jax.optimizer import augmented, clip_by_global_norm, decay_mask, make_optimizer

MODEL = ModelConfig(
    vocab_size=12, hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=16, qk_norm=True,
    tie_word_embeddings=False,
)  # fmt: skip


def drawn(dtype="float32"):
    return jax.tree.map(jnp.asarray, initial_parameters(MODEL, initializer="xavier", seed=0, dtype=dtype))


def names(tree):
    """{"layers/0/mlp/up_proj/kernel": leaf, ...}."""
    return {
        "/".join(str(key.key) for key in path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def first_update(config, parameters, gradients, tokens=1.0):
    """What one window adds to the parameters."""
    optimizer = make_optimizer(config, total_updates=10)
    tree = augmented(parameters)
    updates, _ = jax.jit(optimizer.update)(augmented(gradients, tokens), optimizer.init(tree), tree)
    return updates["parameters"]


# --- Clipping ---


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(scale=st.floats(1e-6, 1e6), max_norm=st.floats(0.01, 100))
def test_a_clipped_gradient_keeps_its_direction_and_is_never_longer_than_allowed(scale, max_norm, float64):
    gradient = {"a": jnp.array([3.0, 0.0]) * scale, "b": jnp.array([[4.0]]) * scale}
    rule = clip_by_global_norm(max_norm)
    clipped, state = rule.update(gradient, rule.init(gradient))
    factor = min(1, max_norm / (5 * scale + 1e-6))
    np.testing.assert_allclose(clipped["a"][0], 3 * scale * factor, rtol=1e-14)
    np.testing.assert_allclose(clipped["b"][0, 0], 4 * scale * factor, rtol=1e-14)
    np.testing.assert_allclose(state.grad_norm, 5 * scale, rtol=1e-14)


def test_a_largest_norm_of_0_switches_clipping_off():
    gradient = {"a": jnp.array([300.0, 400.0])}
    rule = clip_by_global_norm(0)
    clipped, state = rule.update(gradient, rule.init(gradient))
    np.testing.assert_array_equal(clipped["a"], gradient["a"])
    assert state.grad_norm == 500


def test_the_mean_over_tokens_is_taken_before_the_norm(float64):
    parameters, gradients = {"a": jnp.ones((1, 2))}, {"a": jnp.array([[30.0, 40.0]])}
    optimizer = make_optimizer(TrainConfig(learning_rate=1.0, warmup_steps=0), total_updates=10)
    _, state = optimizer.update(
        augmented(gradients, 100.0), optimizer.init(augmented(parameters)), augmented(parameters)
    )
    assert optax.tree.get(state, "grad_norm") == 0.5


# --- Decay ---


def test_matrices_decay_and_norm_weights_do_not():
    decays = names(decay_mask(drawn()))
    assert {name for name, decayed in decays.items() if not decayed} == {name for name in decays if "norm" in name}


def test_decay_is_the_rate_times_the_weight_whatever_the_gradient(float64):
    parameters = {"matrix": jnp.full((2, 2), 3.0), "norm": jnp.full(2, 3.0)}
    gradients = jax.tree.map(jnp.zeros_like, parameters)
    update = first_update(TrainConfig(learning_rate=0.5, warmup_steps=0, weight_decay=0.1), parameters, gradients)
    np.testing.assert_allclose(update["matrix"], -0.5 * 0.1 * 3.0, rtol=1e-15)
    np.testing.assert_array_equal(update["norm"], 0)


# --- Muon ---


@cache
def muon_and_adamw():
    config = {"learning_rate": 0.01, "warmup_steps": 0, "grad_clip": 0.0, "weight_decay": 0.1}
    rng = np.random.default_rng(0)
    parameters = drawn()
    gradients = jax.tree.map(lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape), jnp.float32), parameters)
    return tuple(
        names(first_update(TrainConfig(optimizer=optimizer, **config), parameters, gradients))
        for optimizer in ("muon", "adamw")
    )


def test_muon_moves_the_matrices_of_the_blocks_and_adamw_the_rest():
    muon, adamw = muon_and_adamw()
    differ = {name for name in muon if not np.array_equal(muon[name], adamw[name])}
    assert differ == {name for name in muon if name.startswith("layers") and name.endswith("kernel")}


def test_a_muon_update_moves_every_parameter():
    muon, _ = muon_and_adamw()
    assert all(np.abs(leaf).max() > 0 for leaf in muon.values())


def test_a_muon_update_is_about_as_large_as_one_of_adamw():
    muon, _ = muon_and_adamw()
    rms = np.sqrt(np.mean(np.square(muon["layers/0/mlp/up_proj/kernel"]))) / 0.01
    assert rms == pytest.approx(0.2, rel=0.5)
