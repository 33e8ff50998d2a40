"""The first weights: names, spread, streams."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from minigpt_jax.config import ModelConfig
from minigpt_jax.initialization import EMBEDDING_SCALE, RESIDUAL_SCALE, initial_parameters
from minigpt_jax.model import Transformer

CONFIG = ModelConfig(vocab_size=400, hidden_size=96, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=160)


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_the_drawn_tree_is_the_tree_of_the_model(qk_norm, tied):
    config = ModelConfig(hidden_size=16, num_layers=2, num_heads=2, qk_norm=qk_norm, tie_word_embeddings=tied)
    model = nnx.eval_shape(lambda: Transformer(config, dtype=jnp.float32, kernel="reference", rngs=nnx.Rngs(0)))
    wanted = nnx.to_pure_dict(nnx.state(model))
    drawn = initial_parameters(config, initializer="scaled_normal", seed=0)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), drawn) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), wanted
    )


@pytest.mark.parametrize(
    ("matrix", "std"),
    [
        (("self_attn", "q_proj"), 96**-0.5),
        (("mlp", "up_proj"), 96**-0.5),
        (("self_attn", "o_proj"), 96**-0.5 * RESIDUAL_SCALE / 2),
        (("mlp", "down_proj"), 160**-0.5 * RESIDUAL_SCALE / 2),
    ],
)
def test_scaled_normal_divides_the_matrices_that_write_to_the_residual_stream(matrix, std):
    drawn = initial_parameters(CONFIG, initializer="scaled_normal", seed=0)
    kernel = drawn["layers"][1][matrix[0]][matrix[1]]["kernel"]
    assert abs(kernel.std() / std - 1) < 5 / np.sqrt(2 * kernel.size)


def test_xavier_is_uniform_up_to_its_limit():
    kernel = initial_parameters(CONFIG, initializer="xavier", seed=0)["layers"][0]["mlp"]["down_proj"]["kernel"]
    limit = np.sqrt(6 / (160 + 96))
    assert 0.999 * limit < np.abs(kernel).max() <= limit


@pytest.mark.parametrize("initializer", ["scaled_normal", "xavier"])
def test_the_embedding_has_the_same_spread_under_both_rules(initializer):
    table = initial_parameters(CONFIG, initializer=initializer, seed=0)["embed_tokens"]["embedding"]
    assert abs(table.std() / (EMBEDDING_SCALE / table.shape[1]) - 1) < 5 / np.sqrt(2 * table.size)


def test_a_tensor_is_drawn_alike_whatever_else_the_model_holds():
    shallow = initial_parameters(ModelConfig(hidden_size=16, num_layers=1), initializer="xavier", seed=3)
    deep = initial_parameters(ModelConfig(hidden_size=16, num_layers=2), initializer="xavier", seed=3)
    np.testing.assert_equal(shallow["layers"][0], deep["layers"][0])


def test_float32_is_the_float64_draw_rounded_once():
    draws = [initial_parameters(CONFIG, initializer="xavier", seed=1, dtype=name) for name in ("float32", "float64")]
    np.testing.assert_equal(draws[0], jax.tree.map(lambda leaf: leaf.astype(np.float32), draws[1]))


@pytest.mark.parametrize("hidden_size", [128, 512])
def test_a_fresh_model_knows_nothing_at_every_width(hidden_size):
    import jax.numpy as jnp
    from flax import nnx

    from minigpt_jax.loss import next_token_loss
    from minigpt_jax.model import model_graph

    config = ModelConfig(hidden_size=hidden_size, num_layers=2)
    drawn = initial_parameters(config, initializer="scaled_normal", seed=0)
    model = nnx.merge(model_graph(config, dtype=jnp.dtype("float32"), kernel="reference"), drawn)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 32)).astype(np.int32)
    positions = np.broadcast_to(np.arange(31, dtype=np.int32), (2, 31))
    hidden = model(tokens[:, :-1], segment_ids=np.ones((2, 31), np.int32), positions=positions)
    loss = next_token_loss(hidden, model.head, tokens[:, 1:].reshape(-1), np.ones(62, np.float32)) / 62
    assert abs(float(loss) - np.log(config.vocab_size)) < 0.4
