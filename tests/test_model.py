"""The model against a second one in NumPy, and what packing, dropout and bfloat16 do to it.

B batch  T time  S = B*T positions  V vocabulary
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy_transformer
import pytest
from flax import nnx

from minigpt_jax import model as model_room
from minigpt_jax.config import ModelConfig
from minigpt_jax.initialization import initial_parameters
from minigpt_jax.model import RMSNorm, dropout, model_graph

SHAPE = {
    "vocab_size": 19,
    "hidden_size": 12,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 6,  # not hidden_size / num_heads
    "intermediate_size": 10,
    "rope_theta": 50.0,
}
CONFIG = ModelConfig(**SHAPE)
ONE_LAYER = replace(CONFIG, num_layers=1)


def random_parameters(config, *, dtype="float64", seed=0):
    """Parameters of which none has a special value: norm weights are not 1, the embedding is not small."""
    rng = np.random.default_rng(seed)
    drawn = initial_parameters(config, initializer="scaled_normal", seed=seed, dtype=dtype)
    return jax.tree.map(lambda leaf: (leaf + rng.standard_normal(leaf.shape) * 0.3).astype(dtype), drawn)


def batch_of(batch, time, *, vocab=19, seed=1):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab, (batch, time)).astype(np.int32)
    return tokens, np.zeros_like(tokens), np.tile(np.arange(time, dtype=np.int32), (batch, 1))


def run(config, parameters, tokens, segment_ids, positions, *, dtype=jnp.float64, kernel="blocked", **options):
    """Logits [B, T, V]."""
    graph = model_graph(config, dtype=dtype, kernel=kernel)

    @jax.jit
    def forward(parameters):
        model = nnx.merge(graph, parameters)
        return model.logits(model(tokens, segment_ids=segment_ids, positions=positions, **options))

    return forward(parameters).reshape(*tokens.shape, -1)


# --- The function ---


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("qk_norm", "weight_before_cast", "kernel"),
    [(False, False, "blocked"), (True, True, "blocked"), (True, False, "reference"), (False, True, "reference")],
)
def test_the_model_is_its_formula_in_numpy(tied, qk_norm, weight_before_cast, kernel, float64):
    config = ModelConfig(**SHAPE, qk_norm=qk_norm, norm_weight_before_cast=weight_before_cast, tie_word_embeddings=tied)
    parameters = random_parameters(config)
    tokens, _, _ = batch_of(2, 9)
    segment_ids = np.array([[3, 3, 3, 3, 1, 1, 1, 0, 0], [5] * 9], np.int32)
    positions = np.array([[0, 1, 2, 3, 0, 1, 2, 0, 1], [0, 1, 4, 9, 10, 40, 41, 300, 7]], np.int32)
    ours = run(config, parameters, tokens, segment_ids, positions, kernel=kernel)
    np.testing.assert_allclose(
        ours, numpy_transformer.logits(parameters, config, tokens, segment_ids, positions), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("weight_before_cast", [False, True])
def test_the_norm_weight_is_applied_on_its_side_of_the_cast(weight_before_cast):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((50, 32)).astype(ml_dtypes.bfloat16)
    weight = rng.uniform(0.5, 1.5, 32).astype(np.float32)
    high = x.astype(np.float32)
    high = high / np.sqrt((high**2).mean(-1, keepdims=True) + np.float32(1e-5))
    after = weight.astype(ml_dtypes.bfloat16) * high.astype(ml_dtypes.bfloat16)
    before = (weight * high).astype(ml_dtypes.bfloat16)
    assert (before != after).any()
    norm = RMSNorm(32, eps=1e-5, weight_before_cast=weight_before_cast)
    norm.weight.set_value(jnp.asarray(weight))
    np.testing.assert_array_equal(np.asarray(norm(jnp.asarray(x))), before if weight_before_cast else after)


def test_a_shift_of_all_positions_changes_nothing(float64):
    parameters = random_parameters(ONE_LAYER)
    tokens, segment_ids, positions = batch_of(1, 8)
    near, far = (run(ONE_LAYER, parameters, tokens, segment_ids, positions + shift) for shift in (0, 1000))
    np.testing.assert_allclose(near, far, rtol=0, atol=1e-11)


# --- Packing ---


def test_each_token_of_a_packed_row_has_the_loss_it_has_alone(float64):
    parameters = random_parameters(ONE_LAYER)
    lengths = [4, 1, 66]
    tokens, _, _ = batch_of(1, sum(lengths))
    targets, _, _ = batch_of(1, sum(lengths), seed=2)
    segment_ids = np.repeat([[1, 2, 3]], lengths, axis=1).astype(np.int32)
    positions = np.concatenate([np.arange(length) for length in lengths], dtype=np.int32)[None]

    def losses(part):
        log_probabilities = jax.nn.log_softmax(
            run(ONE_LAYER, parameters, tokens[:, part], segment_ids[:, part], positions[:, part])[0]
        )
        return -np.take_along_axis(np.asarray(log_probabilities), targets[0, part, None], axis=1)

    ends = np.cumsum(lengths)
    alone = [losses(slice(end - length, end)) for end, length in zip(ends, lengths, strict=True)]
    np.testing.assert_allclose(losses(slice(None)), np.concatenate(alone), rtol=0, atol=1e-12)


# --- Dropout ---


def test_dropout_keeps_the_expected_value():
    dropped = dropout(jnp.ones((1000, 100)), rate=0.25, key=jax.random.key(0))
    assert float(dropped.mean()) == pytest.approx(1, abs=5 * np.sqrt(0.25 / 0.75 / 100_000))


def test_what_dropout_keeps_is_scaled_and_the_rest_is_zero():
    dropped = dropout(jnp.ones((10, 100)), rate=0.25, key=jax.random.key(0))
    assert set(np.unique(dropped)) == {np.float32(0), np.float32(1 / 0.75)}


def test_dropout_keeps_the_precision_of_its_input():
    assert dropout(jnp.ones(8, jnp.bfloat16), rate=0.5, key=jax.random.key(0)).dtype == jnp.bfloat16


def test_without_a_key_a_dropout_rate_has_no_effect():
    parameters = random_parameters(ONE_LAYER, dtype="float32")
    plain = run(ONE_LAYER, parameters, *batch_of(1, 6), dtype=jnp.float32)
    np.testing.assert_array_equal(
        plain, run(ONE_LAYER, parameters, *batch_of(1, 6), dtype=jnp.float32, dropout_rate=0.9)
    )


def test_the_same_dropout_key_drops_the_same_and_another_does_not():
    parameters = random_parameters(ONE_LAYER, dtype="float32")
    forward = jax.jit(
        lambda key: run(ONE_LAYER, parameters, *batch_of(1, 6), dtype=jnp.float32, dropout_rate=0.5, dropout_key=key)
    )
    first, again, other = (np.asarray(forward(jax.random.key(seed))).tobytes() for seed in (0, 0, 1))
    assert first == again != other


def test_the_embedding_and_both_branches_of_each_block_are_dropped_with_keys_of_their_own(monkeypatch):
    calls = []

    def recorded(x, *, rate, key):
        calls.append((x.shape, rate, key))
        return x

    monkeypatch.setattr(model_room, "dropout", recorded)
    parameters = random_parameters(CONFIG, dtype="float32")
    options = {"dropout_rate": 0.1, "dropout_key": jax.random.key(4)}
    jax.eval_shape(lambda: run(CONFIG, parameters, *batch_of(2, 3), dtype=jnp.float32, **options))
    assert [(shape, rate) for shape, rate, _ in calls] == [((6, 12), 0.1)] * 5
    assert len({id(key) for _, _, key in calls}) == 5


# --- Precision ---


def test_bfloat16_compute_gives_bfloat16_hidden_states_and_float32_logits():
    parameters = random_parameters(ONE_LAYER, dtype="float32")
    tokens, segment_ids, positions = batch_of(1, 6)
    model = nnx.merge(model_graph(ONE_LAYER, dtype=jnp.bfloat16, kernel="blocked"), parameters)
    hidden = jax.eval_shape(lambda: model(tokens, segment_ids=segment_ids, positions=positions))
    logits = jax.eval_shape(lambda: model.logits(jnp.zeros(hidden.shape, hidden.dtype)))
    assert (hidden.dtype, logits.dtype) == (jnp.bfloat16, jnp.float32)


def test_bfloat16_compute_gives_float32_gradients_of_float32_parameters():
    parameters = random_parameters(ONE_LAYER, dtype="float32")
    gradients = jax.eval_shape(
        jax.grad(lambda tree: run(ONE_LAYER, tree, *batch_of(1, 6), dtype=jnp.bfloat16).sum()), parameters
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}


def test_bfloat16_logits_are_near_those_of_float32():
    parameters = random_parameters(ONE_LAYER, dtype="float32")
    low, high = (run(ONE_LAYER, parameters, *batch_of(2, 9), dtype=dtype) for dtype in (jnp.bfloat16, jnp.float32))
    assert 0 < np.abs(low - high).max() / np.abs(high).max() < 0.05
