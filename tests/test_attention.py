"""The attention kernels agree with each other, and none sees what it should not.

B batch  T time  N query heads  K kv heads  H head size
"""

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minigpt_jax.attention import BLOCK, attention, default_kernel
from minigpt_jax.config import ModelConfig, TrainConfig
from minigpt_jax.initialization import initial_parameters
from minigpt_jax.model import model_graph
from minigpt_jax.objective import BatchArrays
from minigpt_jax.train_step import init_state, make_train_step

LENGTHS = [1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 2]


def inputs(time, *, num_heads=4, num_kv_heads=2, head_dim=6, batch=2):
    """Random query, key, value, and segment ids of rows that hold several documents."""
    rng = np.random.default_rng(time)
    query = rng.standard_normal((batch, time, num_heads, head_dim))
    key, value = rng.standard_normal((2, batch, time, num_kv_heads, head_dim))
    segment_ids = np.sort(rng.integers(0, 4, (batch, time)), axis=1).astype(np.int32)
    return query, key, value, segment_ids


def output_and_gradients(kernel, query, key, value, segment_ids):
    """The output [B, T, N, H] and the gradients of query, key and value for a fixed cotangent."""

    @jax.jit
    def run(query, key, value):
        output, pull_back = jax.vjp(partial(attention, segment_ids=segment_ids, kernel=kernel), query, key, value)
        cotangent = jnp.cos(jnp.arange(output.size, dtype=output.dtype)).reshape(output.shape)
        return output, *pull_back(cotangent)

    return run(query, key, value)


# --- The kernels agree ---


@pytest.mark.parametrize("time", LENGTHS)
def test_blocked_is_reference_in_output_and_every_gradient(time, float64):
    arrays = inputs(time)
    for blocked, reference in zip(
        output_and_gradients("blocked", *arrays), output_and_gradients("reference", *arrays), strict=True
    ):
        np.testing.assert_allclose(blocked, reference, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (3, 3), (4, 1)])
def test_blocked_is_reference_for_every_grouping_of_heads(num_heads, num_kv_heads, float64):
    arrays = inputs(BLOCK + 3, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=2)
    for blocked, reference in zip(
        output_and_gradients("blocked", *arrays), output_and_gradients("reference", *arrays), strict=True
    ):
        np.testing.assert_allclose(blocked, reference, rtol=0, atol=1e-12)


@pytest.mark.parametrize("time", [5, BLOCK + 1])
def test_the_cudnn_call_means_what_reference_means(time, float64, monkeypatch):
    # cuDNN runs on a GPU only; the same call with the same mask runs anywhere as plain XLA, its softmax in float32.
    monkeypatch.setattr(jax.nn, "dot_product_attention", as_xla(jax.nn.dot_product_attention))
    arrays = inputs(time)
    for cudnn, reference in zip(
        output_and_gradients("cudnn", *arrays), output_and_gradients("reference", *arrays), strict=True
    ):
        np.testing.assert_allclose(cudnn, reference, rtol=0, atol=2e-6)


def as_xla(dot_product_attention):
    def call(*arrays, implementation, **options):
        assert implementation == "cudnn"
        return dot_product_attention(*arrays, implementation="xla", **options)

    return call


# --- What a position sees ---


@pytest.mark.parametrize("kernel", ["reference", "blocked"])
@pytest.mark.parametrize("argument", [1, 2])
def test_a_gradient_reaches_exactly_the_earlier_positions_of_the_own_segment(kernel, argument, float64):
    time = BLOCK + 6
    *arrays, segment_ids = inputs(time, batch=1)

    def position_sums(changed):  # [1, T, K, H] -> [T]
        parts = [*arrays[:argument], changed, *arrays[argument + 1 :]]
        return attention(*parts, segment_ids=segment_ids, kernel=kernel).sum((0, 2, 3))

    jacobian = jax.jit(jax.jacrev(position_sums))(arrays[argument])  # [T, 1, T, K, H]
    reached = np.abs(jacobian).sum((1, 3, 4)) > 0
    visible = np.tril(segment_ids == segment_ids.T)
    if argument == 1:  # A key that is seen alone has weight 1 whatever it is.
        visible &= visible.sum(1, keepdims=True) > 1
    np.testing.assert_array_equal(reached, visible)


@pytest.mark.parametrize("kernel", ["reference", "blocked"])
def test_a_packed_document_attends_as_if_it_were_alone(kernel, float64):
    borders = [0, 3, BLOCK - 4, BLOCK + 9]
    query, key, value, _ = inputs(borders[-1], batch=1)
    segment_ids = np.repeat([[7, 0, 2]], np.diff(borders), axis=1).astype(np.int32)
    attend = jax.jit(partial(attention, kernel=kernel))
    packed = attend(query, key, value, segment_ids=segment_ids)
    alone = [
        attend(
            *(array[:, start:end] for array in (query, key, value)),
            segment_ids=np.zeros((1, end - start), np.int32),
        )
        for start, end in pairwise(borders)
    ]
    np.testing.assert_allclose(packed, np.concatenate(alone, axis=1), rtol=0, atol=1e-12)


# --- Precision ---


@pytest.mark.parametrize("kernel", ["reference", "blocked"])
def test_bfloat16_scores_are_added_up_in_float32(kernel):
    # Scores of 257 and 256 before the softmax, made of products that sum to 4112 and 4096: one number in bfloat16.
    query, key, value = np.full((1, 2, 1, 256), 16.0), np.ones((1, 2, 1, 256)), np.zeros((1, 2, 1, 256))
    key[0, 0, 0, 0], value[0, 0] = 2, 1
    output = attention(
        *(jnp.asarray(array, jnp.bfloat16) for array in (query, key, value)),
        segment_ids=np.zeros((1, 2), np.int32),
        kernel=kernel,
    )
    assert float(output[0, 1, 0, 0]) == pytest.approx(1 / (1 + np.exp(-1)), abs=2**-8)


@pytest.mark.parametrize("kernel", ["reference", "blocked"])
def test_bfloat16_gives_bfloat16_back(kernel):
    *arrays, segment_ids = inputs(5)
    low = [jax.ShapeDtypeStruct(array.shape, jnp.bfloat16) for array in arrays]
    assert jax.eval_shape(partial(attention, segment_ids=segment_ids, kernel=kernel), *low).dtype == jnp.bfloat16


# --- Platforms ---


@pytest.mark.parametrize(
    ("platform", "dtype", "kernel"),
    [
        ("cpu", jnp.float32, "blocked"),
        ("cpu", jnp.bfloat16, "blocked"),
        ("gpu", jnp.bfloat16, "cudnn"),
        ("cuda", jnp.bfloat16, "cudnn"),
        ("gpu", jnp.float16, "cudnn"),
        ("gpu", jnp.float32, "blocked"),
        ("gpu", jnp.float64, "blocked"),
        ("tpu", jnp.bfloat16, "blocked"),
    ],
)
def test_the_kernel_is_chosen_by_platform_and_precision(platform, dtype, kernel):
    assert default_kernel(platform, jnp.dtype(dtype)) == kernel


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_train_step_lowers_for_an_nvidia_gpu(dtype):
    model = ModelConfig(vocab_size=32, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=8)
    train = TrainConfig(learning_rate=1e-3, warmup_steps=1, accumulation_steps=2, dropout=0.1)
    step = make_train_step(model_graph(model, dtype=dtype, kernel="blocked"), train, total_updates=3)
    state = init_state(
        jax.tree.map(jnp.asarray, initial_parameters(model, initializer="xavier", seed=0)), train, total_updates=3
    )
    integers, weights = jnp.zeros((2, 70), jnp.int32), jnp.ones((2, 70))
    batch = BatchArrays(integers, integers, weights, integers, integers)
    lowered = step.trace(state, batch, jax.random.key(0)).lower(lowering_platforms=("cuda",))
    assert "stablehlo.dot_general" in lowered.as_text()


def test_the_call_behind_cudnn_lowers_for_an_nvidia_gpu(monkeypatch):
    monkeypatch.setattr(jax.nn, "dot_product_attention", as_xla(jax.nn.dot_product_attention))
    query, key, value, segment_ids = inputs(8)
    call = jax.jit(partial(attention, segment_ids=segment_ids, kernel="cudnn"))
    lowered = call.trace(*(jnp.asarray(array, jnp.bfloat16) for array in (query, key, value)))
    assert lowered.lower(lowering_platforms=("cuda",)).out_info.dtype == jnp.bfloat16
