"""8-bit weights: the integers and scales themselves, and the model that computes with them."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from minigpt_jax.config import ModelConfig
from minigpt_jax.formats.names import flatten
from minigpt_jax.initialization import initial_parameters
from minigpt_jax.int8 import BLOCK, FEW_ROWS, Int8Linear, int8_graph
from minigpt_jax.model import model_graph
from minigpt_jax.quantization import int8_kernel, int8_parameters

CONFIG = ModelConfig(
    vocab_size=97, hidden_size=160, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=40, intermediate_size=136
)  # widths that no block divides
UNTIED = replace(CONFIG, tie_word_embeddings=False)


@given(arrays(np.float32, st.tuples(st.integers(1, 9), st.integers(1, 5)), elements=st.floats(-100, 100, width=32)))
def test_a_weight_is_off_by_half_a_scale_at_most(kernel: np.ndarray):
    integers, scale = int8_kernel(kernel)
    error = np.abs(integers * scale.astype(np.float64) - kernel)
    assert integers.dtype == np.int8
    assert (error <= scale * (0.5 + 1e-5)).all()


def test_each_output_has_a_scale_of_its_own():
    kernel = np.array([[1.0, 100.0], [-0.5, 3.0]], np.float32)
    integers, scale = int8_kernel(kernel)
    np.testing.assert_allclose(scale, [1 / 127, 100 / 127], rtol=1e-6)
    assert integers.tolist() == [[127, 127], [-64, 4]]


def test_an_output_without_weights_stays_without():
    integers, scale = int8_kernel(np.zeros((3, 1), np.float32))
    assert not integers.any()
    assert np.isfinite(scale).all()


def test_norms_and_embedding_keep_their_numbers_and_a_tied_head_becomes_a_layer():
    parameters = initial_parameters(CONFIG, initializer="scaled_normal", seed=0)
    quantized = int8_parameters(parameters)
    assert "lm_head" not in parameters
    head = quantized["lm_head"]["kernel"] * quantized["lm_head"]["scale"]
    np.testing.assert_allclose(head.T, parameters["embed_tokens"]["embedding"], atol=1e-3)
    kinds = {path.rsplit(".", 1)[1]: leaf.dtype for path, leaf in flatten(quantized).items()}
    assert kinds == {"embedding": np.float32, "weight": np.float32, "kernel": np.int8, "scale": np.float32}
    assert quantized["embed_tokens"] == parameters["embed_tokens"]


def test_a_head_of_its_own_is_not_replaced_by_the_table():
    parameters = initial_parameters(UNTIED, initializer="scaled_normal", seed=0)
    quantized = int8_parameters(parameters)["lm_head"]
    np.testing.assert_allclose(quantized["kernel"] * quantized["scale"], parameters["lm_head"]["kernel"], atol=1e-2)


@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.parametrize("inputs", [BLOCK - 1, BLOCK, 2 * BLOCK + 3])
def test_a_product_is_that_of_integers_and_scale(rows: int, inputs: int):
    rng = np.random.default_rng(0)
    layer = Int8Linear(nnx.Linear(inputs, 7, rngs=nnx.Rngs(0)))
    layer.kernel[...] = jnp.asarray(rng.integers(-127, 128, (inputs, 7)), jnp.int8)
    layer.scale[...] = jnp.asarray(rng.uniform(0.5, 2, 7), jnp.float32)
    x = rng.standard_normal((rows, inputs)).astype(np.float32)
    expected = x.astype(np.float64) @ (np.asarray(layer.kernel[...]) * np.asarray(layer.scale[...], np.float64))
    np.testing.assert_allclose(layer(jnp.asarray(x)), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("config", [CONFIG, UNTIED], ids=["tied", "untied"])
def test_the_model_is_the_one_with_rounded_weights(config: ModelConfig):
    tree = int8_parameters(initial_parameters(config, initializer="scaled_normal", seed=0))
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 24))
    graphs = int8_graph(config, dtype=jnp.float32, kernel="reference"), model_graph(
        UNTIED, dtype=jnp.float32, kernel="reference"
    )  # fmt: skip
    ours, rounded = (
        _logits(graph, leaves, tokens) for graph, leaves in zip(graphs, (tree, _as_floats(tree)), strict=True)
    )
    np.testing.assert_allclose(ours, rounded, atol=1e-4)


def test_the_head_as_a_table_is_what_the_logits_are_made_of():
    model = nnx.merge(
        int8_graph(CONFIG, dtype=jnp.float32, kernel="reference"),
        int8_parameters(initial_parameters(CONFIG, initializer="scaled_normal", seed=0)),
    )
    hidden = np.random.default_rng(0).standard_normal((3, CONFIG.hidden_size)).astype(np.float32)
    np.testing.assert_allclose(model.logits(hidden), hidden @ model.head.T, rtol=1e-4, atol=1e-4)


def test_it_lowers_for_cuda():
    graph = int8_graph(CONFIG, dtype=jnp.bfloat16, kernel="reference")
    tree = int8_parameters(initial_parameters(CONFIG, initializer="scaled_normal", seed=0))
    traced = jax.jit(lambda leaves, tokens: _scores(graph, leaves, tokens)).trace(tree, np.zeros((1, 4), np.int32))
    assert "i8" in traced.lower(lowering_platforms=("cuda",)).as_text()


def _scores(graph: Any, tree: Any, tokens: Any) -> jax.Array:
    model = nnx.merge(graph, tree)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return model.logits(model(tokens, segment_ids=jnp.ones_like(tokens), positions=positions))


def _logits(graph: Any, tree: Any, tokens: np.ndarray) -> np.ndarray:
    return np.asarray(_scores(graph, tree, jnp.asarray(tokens, jnp.int32)))


def _as_floats(branch: dict[Any, Any]) -> dict[Any, Any]:
    if "scale" in branch:
        return {"kernel": branch["kernel"] * branch["scale"]}
    return {name: _as_floats(below) if isinstance(below, dict) else below for name, below in branch.items()}
