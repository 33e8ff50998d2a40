"""Find the first place where PyTorch computes something else than JAX, and say why.

Both sides train in lock-step in float64, JAX's as the truth. Each micro-batch goes through four passes: every operation
forward on JAX's own inputs; every operation backward from the same cotangent, the last layer first; the gradient of
the whole model; and the package's own training step from JAX's own state. The first result over its bound is the
divergence, and the one known mistake that reproduces it is its cause.

Dropout is off, as the two frameworks cannot draw the same masks. A mistake that a run does not show is not found: an
eps in the clipping, say, where nothing is clipped.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from minigpt_bridge.finder import recording
from minigpt_bridge.finder.divergence import Divergence
from minigpt_bridge.finder.lock_step import MicroBatch
from minigpt_bridge.finder.update_replay import compare_update, force_state
from minigpt_jax.config import ModelConfig, TrainConfig
from minigpt_jax.engine import trees_of
from minigpt_jax.formats.names import Parameters
from minigpt_jax.objective import BatchArrays
from minigpt_jax.train_step import init_state
from minigpt_torch import objective as torch_objective
from minigpt_torch import train_step as torch_steps
from minigpt_torch.model import Transformer
from minigpt_torch.weights import make_model

__all__ = ["Divergence", "find_divergence"]

Arrays = tuple[np.ndarray, ...]


def find_divergence(
    config: ModelConfig,
    parameters: Parameters,
    train: TrainConfig,
    batches: Sequence[Arrays],
    *,
    steps: int,
    make_twin: Callable[..., Transformer] = make_model,
) -> Divergence | None:
    """Train both sides and name the first step, layer and operation that rounding does not explain.

    Args:
        config: the model's shape.
        parameters: the first weights, a NumPy tree; cast to float64.
        train: a resolved configuration with optimizer adamw; its dropout and dtype are not used.
        batches: micro-batches of five [B, T] arrays: tokens, targets, loss_weights, segment_ids, positions. They are
            used over again when they run out.
        steps: updates to make; the schedule's length as well, where `train.steps` is None.
        make_twin: (config, parameters, dtype=) -> the PyTorch model.

    Returns:
        None where everything agrees.
    """
    train = dataclasses.replace(train, dropout=0.0, dtype="float64")
    total_updates = train.steps or steps
    with jax.enable_x64(True):
        tree = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), parameters)
        twin = make_twin(config, tree, dtype=torch.float64)
        theirs = torch_steps.init_state(twin, train)
        graph = recording.model_graphs(config)[0]
        ours = init_state(jax.tree.map(jnp.asarray, tree), train, total_updates=total_updates)
        before = jax.device_get(trees_of(ours))
        for number in range(steps * train.accumulation_steps):
            arrays: tuple[Any, ...] = batches[number % len(batches)]
            batch = BatchArrays(*arrays)
            advanced = recording.advance(graph, train, total_updates, ours, batch)
            after = jax.device_get(trees_of(advanced.state))
            ours, advanced = advanced.state, jax.device_get(advanced)
            found = MicroBatch(config, twin, theirs.updates + 1, before["parameters"], batch).compare(advanced)
            if found is None:
                take = {"total_updates": total_updates, "before": before, "after": after, "advanced": advanced}
                found = compare_update(theirs, torch_objective.batch_tensors(batch), train, **take)
            if found is not None:
                return found
            force_state(theirs, after)
            before = after
    return None
