"""One model in both frameworks from the same NumPy weights, and batches that both can read.

B batch  T time  V vocabulary
"""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from minigpt_bridge import levels
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
    """Five [B, T] arrays, as the levels of the proof draw them."""
    return levels.random_batch(config, seed=seed, rows=rows, time=time)


def jax_batch(arrays):
    return jax_step.BatchArrays(*map(jnp.asarray, arrays))


torch_batch = torch_step.batch_tensors


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
