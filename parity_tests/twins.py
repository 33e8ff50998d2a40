"""One model in both frameworks from the same NumPy weights, batches that both can read, and one training run on both.

B batch  T time  S = B*T positions  V vocabulary
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from minigpt_bridge import levels
from minigpt_jax import objective as jax_objective
from minigpt_jax import train_step as jax_step
from minigpt_jax.config import ModelConfig, TrainConfig
from minigpt_jax.dropout import keep_mask
from minigpt_jax.engine import trees_of as jax_trees
from minigpt_jax.formats.names import flatten
from minigpt_jax.initialization import initial_adapters, initial_parameters
from minigpt_jax.lora import adapter_masks
from minigpt_jax.model import model_graph
from minigpt_torch import objective as torch_objective
from minigpt_torch import train_step as torch_step
from minigpt_torch.engine import trees_of as torch_trees
from minigpt_torch.lora import adapter_tensors
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


TOTAL = 210
"""Updates of every schedule."""


def random_parameters(config, *, seed=0, dtype="float64"):
    """Initial parameters moved by noise, so that no norm weight is 1 and no two tensors are alike."""
    start = initial_parameters(config, initializer="scaled_normal", seed=seed, dtype="float64")
    return moved(start, seed=seed, dtype=dtype)


def random_adapters(config, lora, *, seed=0, dtype="float64"):
    """Initial adapters moved by noise, so that no B is 0."""
    return moved(initial_adapters(config, lora, seed=seed, dtype="float64"), seed=seed, dtype=dtype)


def moved(tree, *, seed, dtype):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: (leaf + 0.1 * rng.standard_normal(leaf.shape)).astype(dtype), tree)


def random_batch(config, *, seed=0, rows=3, time=37):
    """Five [B, T] arrays, as the levels of the proof draw them."""
    return levels.random_batch(config, seed=seed, rows=rows, time=time)


def jax_batch(arrays):
    return jax_objective.BatchArrays(*map(jnp.asarray, arrays))


torch_batch = torch_objective.batch_tensors


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


def shared_masks(model, config, *, key, num_positions):
    """What JAX keeps under a step's dropout key, for PyTorch."""
    of_model, of_adapters = None, None
    if config.stage == "lora":
        key, own_key = jax.random.split(key)
        of_adapters = adapter_masks(model, config.lora, num_positions=num_positions, dropout_key=own_key)
    if config.dropout > 0:
        keys = jax.random.split(key, 2 * model.num_layers + 1)
        shape = (num_positions, model.hidden_size)
        of_model = [keep_mask(each, rate=config.dropout, shape=shape) for each in keys]
    return jax.tree.map(
        lambda mask: torch.from_numpy(np.array(mask)), torch_objective.DropoutMasks(of_model, of_adapters)
    )


@cache
def compiled_step(model, config, frozen=None):
    graphs = [
        None if shape is None else model_graph(shape, dtype=jnp.dtype(config.dtype), kernel="reference")
        for shape in (model, frozen)
    ]
    return jax_step.make_train_step(graphs[0], config, total_updates=TOTAL, teacher=graphs[1])


@cache
def compiled_init(config):
    return jax.jit(partial(jax_step.init_state, config=config, total_updates=TOTAL))


class Pair:
    """One training run on both sides; `frozen` is the shape of what is not trained: base, teacher or reference."""

    def __init__(self, model, config, *, frozen=None):
        self.config = config
        self.step = compiled_step(model, config, frozen)
        is_lora = config.stage == "lora"
        if is_lora:
            start = random_adapters(model, config.lora, dtype=config.dtype)
        else:
            start = random_parameters(model, dtype=config.dtype)
        self.ours = compiled_init(config)(jax.tree.map(jnp.asarray, start))
        self.ours_frozen = self.theirs_frozen = None
        if frozen is not None:
            kept = random_parameters(frozen, seed=1, dtype=config.dtype)
            self.ours_frozen = jax.tree.map(jnp.asarray, kept)
            self.theirs_frozen = torch_model(frozen, kept, dtype=config.dtype)
        if is_lora:
            self.theirs = torch_step.init_state(self.theirs_frozen, config, adapters=adapter_tensors(start))
        else:
            own = torch_model(model, start, dtype=config.dtype)
            self.theirs = torch_step.init_state(own, config, frozen=self.theirs_frozen)

    def train(self, arrays, *, key=None, masks=torch_objective.NO_MASKS):
        """One micro-batch; the reports of both sides. `masks` are those of `key`, where something is dropped."""
        key = jax.random.key(0) if key is None else key
        self.ours, ours = self.step(self.ours, jax_batch(arrays), key, self.ours_frozen)
        theirs = torch_step.train_step(
            self.theirs, torch_batch(arrays), self.config, total_updates=TOTAL, dropout_masks=masks
        )
        return ours, theirs

    def flush(self):
        ours, _ = jax_step.make_flush_step(self.config, total_updates=TOTAL)(self.ours)
        self.ours = ours
        return torch_step.flush(self.theirs, self.config, total_updates=TOTAL)

    def trees(self):
        return flatten(jax.device_get(jax_trees(self.ours))), flatten(torch_trees(self.theirs))

    def errors(self, relative_error):
        """The difference of every parameter and slot."""
        ours, theirs = self.trees()
        assert ours.keys() == theirs.keys()
        return {path: relative_error(ours[path], theirs[path]) for path in ours}


def to_numpy(value):
    return value.detach().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
