"""One model in both frameworks from the same NumPy weights, and batches that both can read.

B batch  T time  V vocabulary
"""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from minigpt_jax import train_step as jax_step
from minigpt_jax.config import ModelConfig, TrainConfig
from minigpt_jax.initialization import initial_parameters
from minigpt_jax.model import model_graph
from minigpt_torch import train_step as torch_step
from minigpt_torch.weights import make_model

SMALL = ModelConfig(
    vocab_size=97,
    hidden_size=48,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=10,  # not hidden_size / num_heads
    intermediate_size=72,
    max_position_embeddings=256,
)
SMALL_3 = ModelConfig(
    vocab_size=97,
    hidden_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    intermediate_size=72,
    max_position_embeddings=256,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    qk_norm=True,
    norm_weight_before_cast=True,
    tie_word_embeddings=False,
)


def random_parameters(config, *, seed=0, dtype="float64"):
    """Initial parameters moved by noise, so that no norm weight is 1 and no two tensors are alike."""
    rng = np.random.default_rng(seed)
    start = initial_parameters(config, initializer="scaled_normal", seed=seed, dtype="float64")
    return jax.tree.map(lambda leaf: (leaf + 0.1 * rng.standard_normal(leaf.shape)).astype(dtype), start)


def random_batch(config, *, seed=0, rows=3, time=37):
    """Five [B, T] arrays: segments of unlike length, positions that restart, ragged weights."""
    rng = np.random.default_rng(seed)
    starts = rng.random((rows, time)) < 0.1
    segments = np.cumsum(starts, axis=1).astype(np.int32) + 1
    index = np.arange(time)
    began = np.maximum.accumulate(np.where(starts, index, 0), axis=1)
    tokens, targets = rng.integers(0, config.vocab_size, (2, rows, time), dtype=np.int32)
    weights = (rng.random((rows, time)) < rng.uniform(0.2, 1)).astype(np.float32)
    return tokens, targets, weights, segments, (index - began).astype(np.int32)


def jax_batch(arrays):
    return jax_step.BatchArrays(*map(jnp.asarray, arrays))


def torch_batch(arrays):
    return torch_step.BatchTensors(
        *(torch.from_numpy(a if a.dtype.kind == "f" else a.astype(np.int64)) for a in arrays)
    )  # fmt: skip


def jax_model(config, parameters, *, dtype="float64", kernel="blocked"):
    graph = model_graph(config, dtype=jnp.dtype(dtype), kernel=kernel)
    return nnx.merge(graph, jax.tree.map(jnp.asarray, parameters))


def torch_model(config, parameters, *, dtype="float64", kernel="reference"):
    return make_model(config, parameters, dtype=getattr(torch, dtype), kernel=kernel)


def training(**changes):
    """A training configuration with accumulation, warm-up, clipping and decay."""
    fields = {
        "learning_rate": 3e-3, "warmup_steps": 5, "accumulation_steps": 2, "grad_clip": 0.5, "weight_decay": 0.1,
        "dtype": "float64",
    }  # fmt: skip
    return TrainConfig(**(fields | changes))


def to_numpy(value):
    return value.detach().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
