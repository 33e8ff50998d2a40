"""The whole function: logits, loss and every gradient of the JAX model and of its PyTorch twin.

B batch  T time
"""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from flax import nnx  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from twins import (  # noqa: E402
    SMALL,
    SMALL_3,
    jax_batch,
    random_batch,
    random_parameters,
    to_numpy,
    torch_batch,
    torch_model,
)  # fmt: skip

from minigpt_bridge.levels import compare  # noqa: E402
from minigpt_jax.config import ModelConfig  # noqa: E402
from minigpt_jax.formats.names import flatten  # noqa: E402
from minigpt_jax.model import model_graph  # noqa: E402
from minigpt_jax.objective import summed_loss as jax_loss  # noqa: E402
from minigpt_torch.objective import summed_loss as torch_loss  # noqa: E402
from minigpt_torch.weights import as_tree  # noqa: E402

CONFIGS = [SMALL, SMALL_3]
NAMES = ["2-series", "3-series"]


@cache
def compiled_logits(config, dtype, kernel):
    graph = model_graph(config, dtype=jnp.dtype(dtype), kernel=kernel)

    def logits(parameters, batch):
        model = nnx.merge(graph, parameters)
        return model.logits(model(batch.tokens, segment_ids=batch.segment_ids, positions=batch.positions))

    return jax.jit(logits)


@cache
def compiled_gradients(config, dtype):
    graph = model_graph(config, dtype=jnp.dtype(dtype), kernel="reference")
    return jax.jit(jax.value_and_grad(lambda parameters, batch: jax_loss(graph, parameters, batch)))


def both_logits(config, parameters, batch, *, dtype, kernels=("blocked", "reference")):
    first = compiled_logits(config, dtype, kernels[0])(jax.tree.map(jnp.asarray, parameters), jax_batch(batch))
    theirs = torch_batch(batch)
    twin = torch_model(config, parameters, dtype=dtype, kernel=kernels[1])
    second = twin.logits(twin(theirs.tokens, segment_ids=theirs.segment_ids, positions=theirs.positions))
    return np.asarray(first), to_numpy(second)


def both_gradients(config, parameters, batch, *, dtype):
    """(loss, gradients by path) of each side."""
    loss, gradients = compiled_gradients(config, dtype)(jax.tree.map(jnp.asarray, parameters), jax_batch(batch))
    twin = torch_model(config, parameters, dtype=dtype)
    named = dict(twin.named_parameters())
    their_loss = torch_loss(twin, torch_batch(batch))
    theirs = dict(zip(named, torch.autograd.grad(their_loss, list(named.values())), strict=True))
    return (float(loss), flatten(gradients)), (their_loss.item(), flatten(as_tree(theirs, config)))


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
def test_logits_are_the_same_in_float64(config, float64, bound, relative_error):
    ours, theirs = both_logits(config, random_parameters(config), random_batch(config), dtype="float64")
    assert relative_error(ours, theirs) <= bound.sub_module


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
def test_logits_are_the_same_in_float32(config, bound_float32, relative_error):
    parameters = random_parameters(config, dtype="float32")
    ours, theirs = both_logits(config, parameters, random_batch(config), dtype="float32")
    assert relative_error(ours, theirs) <= bound_float32.sub_module


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
def test_the_fused_kernel_of_the_twin_gives_the_same_logits(config, float64, bound, relative_error):
    kernels = ("reference", "fused")
    ours, theirs = both_logits(
        config, random_parameters(config), random_batch(config), dtype="float64", kernels=kernels
    )  # fmt: skip
    assert relative_error(ours, theirs) <= bound.sub_module


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
def test_loss_with_ragged_weights_and_every_gradient_are_the_same_in_float64(config, float64, bound, relative_error):
    (loss, ours), (their_loss, theirs) = both_gradients(
        config, random_parameters(config), random_batch(config), dtype="float64"
    )
    assert relative_error(loss, their_loss) <= bound.gradient
    assert ours.keys() == theirs.keys()
    assert max(relative_error(ours[path], theirs[path]) for path in ours) <= bound.gradient


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
def test_loss_and_every_gradient_are_the_same_in_float32(config, bound_float32, relative_error):
    parameters = random_parameters(config, dtype="float32")
    (loss, ours), (their_loss, theirs) = both_gradients(config, parameters, random_batch(config), dtype="float32")
    assert abs(loss - their_loss) / their_loss <= bound_float32.gradient
    assert max(relative_error(ours[path], theirs[path]) for path in ours) <= bound_float32.gradient


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
def test_bfloat16_is_as_near_to_the_truth_as_torch_is(config):
    rows = compare(config, random_parameters(config), precision="bfloat16", rows=3, time=37)
    assert {row.level for row in rows} == {"batch", "sub-module", "stream", "logits", "loss", "gradient"}
    # What is in bfloat16 at all is not exact.
    assert all(row.torch_error > 0 for row in rows if row.level not in ("batch", "loss"))
    assert [(row.name, row.ratio) for row in rows if not row.ok] == []


@st.composite
def shapes(draw):
    """Any small shape that a config can have."""
    kv_heads, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return ModelConfig(
        vocab_size=draw(st.integers(2, 50)),
        hidden_size=draw(st.integers(1, 40)),
        num_layers=draw(st.integers(1, 3)),
        num_heads=kv_heads * groups,
        num_kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 9)),
        intermediate_size=draw(st.integers(1, 50)),
        rms_norm_eps=draw(st.sampled_from([1e-6, 1e-5, 1e-2])),
        rope_theta=draw(st.sampled_from([10.0, 1e4, 1e6])),
        qk_norm=draw(st.booleans()),
        norm_weight_before_cast=draw(st.booleans()),
        tie_word_embeddings=draw(st.booleans()),
    )


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(config=shapes(), rows=st.integers(1, 3), time=st.integers(1, 67), seed=st.integers(0, 99))
def test_any_shape_is_the_same_function_with_the_same_gradients(
    config, rows, time, seed, float64, bound, relative_error
):
    parameters, batch = random_parameters(config, seed=seed), random_batch(config, seed=seed, rows=rows, time=time)
    ours, theirs = both_logits(config, parameters, batch, dtype="float64", kernels=("reference", "reference"))
    assert relative_error(ours, theirs) <= bound.sub_module
    (_, gradients), (_, their_gradients) = both_gradients(config, parameters, batch, dtype="float64")
    assert max(relative_error(gradients[path], their_gradients[path]) for path in gradients) <= bound.gradient


def test_a_config_that_says_otherwise_is_seen(float64, bound, relative_error):
    other = dataclasses.replace(SMALL, rms_norm_eps=1e-6)
    parameters, batch = random_parameters(SMALL), random_batch(SMALL)
    ours, _ = both_logits(SMALL, parameters, batch, dtype="float64")
    _, theirs = both_logits(other, parameters, batch, dtype="float64")
    assert relative_error(ours, theirs) > 1e6 * bound.sub_module
