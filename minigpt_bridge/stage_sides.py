"""A stage after pretraining in one framework: its first micro-batch, some updates, and adapters merged into their base.

The two frameworks' steps are read by one function, so that their answers can be laid side by side. Names begin with the
level that the same tensor has in pretraining, which decides its bound.

B batch  T time  S = B*T positions
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from minigpt_bridge.sides import Arrays, Value
from minigpt_jax import objective as jax_objective
from minigpt_jax import train_step as jax_steps
from minigpt_jax.config import ModelConfig, TrainConfig
from minigpt_jax.engine import trees_of as jax_trees
from minigpt_jax.formats.names import Parameters, flatten
from minigpt_jax.lora import layer_adapters as jax_adapters
from minigpt_jax.model import model_graph
from minigpt_torch import objective as torch_objective
from minigpt_torch import train_step as torch_steps
from minigpt_torch.engine import trees_of as torch_trees
from minigpt_torch.lora import adapter_tensors
from minigpt_torch.lora import layer_adapters as torch_adapters
from minigpt_torch.weights import as_array, make_model


@dataclass(frozen=True)
class StageStart:
    """A stage before its first update, in NumPy."""

    model: ModelConfig
    train: TrainConfig
    trained: Parameters
    """The model's parameters, or adapters in lora; in the precision of `train.dtype`."""
    frozen: Parameters | None = None
    """The base in lora, the teacher in distill."""
    teacher: ModelConfig | None = None
    """In distill, the teacher's shape."""

    def in_precision(self, dtype: Literal["float32", "float64"]) -> "StageStart":
        """The same numbers, computed with in `dtype`."""
        cast = partial(jax.tree.map, lambda leaf: leaf.astype(dtype))
        train = replace(self.train, dtype=dtype)
        return replace(self, train=train, trained=cast(self.trained), frozen=cast(self.frozen))


Step = tuple[Any, Callable[[], Any]]
"""What a micro-batch reported, and the checkpoint's trees after it; these are read before the next step."""


def jax_training(start: StageStart, batches: list[Arrays]) -> Iterator[Step]:
    """The stage's compiled steps in JAX, without dropout."""
    train, total = start.train, _updates(start, batches)
    graph, teacher = (None if shape is None else _graph(start, shape) for shape in (start.model, start.teacher))
    step = jax_steps.make_train_step(graph, train, total_updates=total, teacher=teacher)
    trained, frozen = jax.tree.map(jnp.asarray, (start.trained, start.frozen))
    # Compiled as one: leaf by leaf, each shape would be a compilation of its own.
    state = jax.jit(partial(jax_steps.init_state, config=train, total_updates=total))(trained)
    for arrays in batches:
        batch = jax_objective.BatchArrays(*map(jnp.asarray, arrays))
        state, metrics = step(state, batch, jax.random.key(0), frozen)
        yield metrics, partial(jax_trees, state)


def torch_training(start: StageStart, batches: list[Arrays]) -> Iterator[Step]:
    """The stage's steps in PyTorch, without dropout."""
    train, total = start.train, _updates(start, batches)
    if train.stage == "lora":
        state = torch_steps.init_state(_twin(start, start.frozen), train, adapters=adapter_tensors(start.trained))
    else:
        teacher = None if start.teacher is None else _twin(start, start.frozen, shape=start.teacher)
        state = torch_steps.init_state(_twin(start, start.trained), train, frozen=teacher)
    for arrays in batches:
        metrics = torch_steps.train_step(state, torch_objective.batch_tensors(arrays), train, total_updates=total)
        yield metrics, partial(torch_trees, state)


def training_values(start: StageStart, batches: list[Arrays], steps: Iterator[Step]) -> Iterator[Value]:
    """Of the first micro-batch every figure and gradient, of each the loss, and of the last every parameter and slot.

    Args:
        start: as the steps were given it; its window must be longer than one micro-batch.
        batches: as the steps were given them; the last one ends a window.
        steps: `jax_training` or `torch_training`.
    """
    level, real = start.train.stage, np.dtype(start.train.dtype)
    last = _updates(start, batches)
    for number, (metrics, trees) in enumerate(steps):
        terms = max(float(metrics.loss_terms), 1.0)
        loss = np.asarray(float(metrics.loss_sum) / terms, real)
        if number == 0:
            yield Value(level, "loss: terms", np.asarray(float(metrics.loss_terms), real))
            yield Value(level, "loss: mean loss", loss)
            for name, total in sorted(metrics.figures.items()):
                yield Value(level, f"loss: {name}", np.asarray(float(total) / terms, real))
            # The window has this micro-batch alone so far: what it has summed up is its gradient.
            sums = flatten(jax.device_get(trees()["optimizer"]["gradient_sums"]))
            for path in sorted(sums):
                yield Value(level, f"gradient: {path}", sums[path] / np.asarray(terms, real))
        yield Value(level, f"trajectory: loss of micro-batch {number}", loss)
        if number == len(batches) - 1:
            flat = flatten(jax.device_get(trees()))
            for path in sorted(flat):
                yield Value(level, f"update {last}: {path}", np.asarray(flat[path]))


def jax_logits(start: StageStart, parameters: Parameters, adapters: Parameters | None, arrays: Arrays) -> np.ndarray:
    """Logits [S, V] in JAX of a model, with adapters beside it or without."""
    graph, batch = _graph(start, start.model), jax_objective.BatchArrays(*map(jnp.asarray, arrays))

    def logits(parameters: Any, adapters: Any) -> jax.Array:
        model = nnx.merge(graph, parameters)
        low_rank = None if adapters is None else jax_adapters(adapters, start.train.lora)
        return model.logits(
            model(batch.tokens, segment_ids=batch.segment_ids, positions=batch.positions, adapters=low_rank)
        )

    return np.asarray(jax.jit(logits)(parameters, adapters))


@torch.no_grad()
def torch_logits(start: StageStart, parameters: Parameters, adapters: Parameters | None, arrays: Arrays) -> np.ndarray:
    """Logits [S, V] in PyTorch of a model, with adapters beside it or without."""
    model, batch = _twin(start, parameters), torch_objective.batch_tensors(arrays)
    low_rank = None if adapters is None else torch_adapters(adapter_tensors(adapters), start.train.lora)
    hidden = model(batch.tokens, segment_ids=batch.segment_ids, positions=batch.positions, adapters=low_rank)
    return as_array(model.logits(hidden))


def _graph(start: StageStart, shape: ModelConfig) -> Any:
    return model_graph(shape, dtype=jnp.dtype(start.train.dtype), kernel="blocked")


def _twin(start: StageStart, parameters: Parameters | None, *, shape: ModelConfig | None = None) -> Any:
    assert parameters is not None
    return make_model(shape or start.model, parameters, dtype=getattr(torch, start.train.dtype or "float32"))


def _updates(start: StageStart, batches: list[Arrays]) -> int:
    return len(batches) // start.train.accumulation_steps
