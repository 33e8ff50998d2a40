"""Each part of the model, alone: the same input through the JAX module and through its PyTorch twin."""

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from flax import nnx  # noqa: E402
from twins import SMALL, SMALL_3, jax_model, random_batch, random_parameters, to_numpy, torch_model  # noqa: E402

from minigpt_jax import attention as jax_attention  # noqa: E402
from minigpt_jax import model as jax_rooms  # noqa: E402
from minigpt_torch import attention as torch_attention  # noqa: E402
from minigpt_torch import model as torch_rooms  # noqa: E402

PRECISIONS = ["float64", "float32"]


@pytest.fixture(params=PRECISIONS)
def precision(request, float64):
    """The dtype of one comparison; JAX has 64 bits either way, so a float32 is one only where it is asked for."""
    return request.param


@pytest.fixture
def limit(precision, bound, bound_float32):
    return bound if precision == "float64" else bound_float32


def normal(*shape, dtype, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("weight_before_cast", [False, True])
def test_rms_norm_is_the_same_function(weight_before_cast, precision, limit, relative_error):
    x, weight = normal(10, 48, dtype=precision), normal(48, dtype=precision, seed=1)
    ours = jax_rooms.RMSNorm(48, eps=1e-5, weight_before_cast=weight_before_cast)
    theirs = torch_rooms.RMSNorm(48, eps=1e-5, weight_before_cast=weight_before_cast)
    ours.weight = nnx.Param(jnp.asarray(weight))
    theirs.weight = torch.nn.Parameter(torch.from_numpy(weight))
    result = ours(jnp.asarray(x))
    assert result.dtype == precision
    assert relative_error(result, to_numpy(theirs(torch.from_numpy(x)))) <= limit.sub_module


@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_rotation_at_positions_far_from_0_is_the_same_function(theta, precision, limit, relative_error):
    positions = np.stack([np.arange(9), np.arange(1000, 1009)]).astype(np.int32)
    x = normal(2, 9, 3, 16, dtype=precision)
    settings = {"head_dim": 16, "theta": theta}
    ours = jax_rooms.rotary_angles(jnp.asarray(positions), dtype=jnp.dtype(precision), **settings)
    theirs = torch_rooms.rotary_angles(torch.from_numpy(positions), dtype=getattr(torch, precision), **settings)
    result = jax_rooms.rotate(jnp.asarray(x), *ours)
    assert relative_error(result, to_numpy(torch_rooms.rotate(torch.from_numpy(x), *theirs))) <= limit.sub_module


@pytest.mark.parametrize("kernels", [("reference", "reference"), ("blocked", "fused")])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (4, 1)])
def test_attention_is_the_same_function(heads, kv_heads, kernels, precision, limit, relative_error):
    query = normal(3, 70, heads, 10, dtype=precision)
    key, value = normal(2, 3, 70, kv_heads, 10, dtype=precision, seed=1)
    segments = random_batch(SMALL, time=70)[3]
    ours = jax_attention.attention(
        *map(jnp.asarray, (query, key, value)), segment_ids=jnp.asarray(segments), kernel=kernels[0]
    )
    theirs = torch_attention.attention(
        *map(torch.from_numpy, (query, key, value)), segment_ids=torch.from_numpy(segments), kernel=kernels[1]
    )
    assert relative_error(ours, to_numpy(theirs)) <= limit.sub_module


@pytest.mark.parametrize("config", [SMALL, SMALL_3], ids=["2-series", "3-series"])
@pytest.mark.parametrize("part", ["input_layernorm", "self_attn", "post_attention_layernorm", "mlp", "block"])
def test_the_parts_of_a_block_are_the_same_function(config, part, precision, limit, relative_error):
    parameters = random_parameters(config, dtype=precision)
    ours = jax_model(config, parameters, dtype=precision).layers[1]
    theirs = torch_model(config, parameters, dtype=precision).layers[1]
    segments, positions = random_batch(config)[3:]
    x = normal(segments.size, config.hidden_size, dtype=precision)
    angles = {"head_dim": config.head_dim, "theta": config.rope_theta}
    cos, sin = jax_rooms.rotary_angles(jnp.asarray(positions), dtype=jnp.dtype(precision), **angles)
    options = {"segment_ids": jnp.asarray(segments), "cos": cos, "sin": sin}
    cos, sin = torch_rooms.rotary_angles(torch.from_numpy(positions), dtype=getattr(torch, precision), **angles)
    their_options = {"segment_ids": torch.from_numpy(segments), "cos": cos, "sin": sin}
    if part not in ("self_attn", "block"):
        options = their_options = {}
    if part == "block":
        options |= {"dropout_rate": 0.0, "dropout_keys": (None, None)}
        their_options |= {"dropout_rate": 0.0, "dropout_masks": (None, None)}
    ours, theirs = (model if part == "block" else getattr(model, part) for model in (ours, theirs))
    error = relative_error(ours(jnp.asarray(x), **options), to_numpy(theirs(torch.from_numpy(x), **their_options)))
    assert error <= limit.sub_module
