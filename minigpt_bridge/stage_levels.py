"""The proof of the stages after pretraining: one level each, and one for adapters merged into their base.

sft, lora, dpo and distill change what is summed and what is trained, not the model, which minigpt_bridge/levels.py
compares part by part. So they are compared on its first block alone.

B batch  T time  P = B/2 pairs
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import jax
import numpy as np
import torch

from minigpt_bridge.levels import COMPARED_TRAINING, Row, Table, moved, random_batch, random_weights
from minigpt_bridge.sides import Arrays, Precision, Value, stored
from minigpt_bridge.stage_sides import (
    StageStart,
    jax_logits,
    jax_training,
    torch_logits,
    torch_training,
    training_values,
)
from minigpt_jax.adapter_tree import merge
from minigpt_jax.config import ModelConfig, Stage
from minigpt_jax.formats.names import Parameters
from minigpt_jax.initialization import initial_adapters
from minigpt_jax.lora_config import TARGETS

STAGES: tuple[Stage, ...] = ("sft", "lora", "dpo", "distill")
"""The stages that are compared, each a level of its own."""

UPDATES = 10
"""Updates of each."""

ROWS, MOST_TIME = 4, 32
"""Size of a batch: small, for every stage trains twice."""


def compare_stages(
    config: ModelConfig,
    parameters: Parameters,
    *,
    precision: Precision,
    time: int,
    stages: Sequence[Stage] = STAGES,
) -> list[Row]:
    """Every row of the stages, on the first block of one model.

    Args:
        config: the model's shape.
        parameters: its weights, a NumPy tree.
        precision: float64 or float32.
        time: tokens of a row; at most MOST_TIME are taken.
        stages: which of them.
    """
    time = min(time, MOST_TIME)
    shape = replace(config, num_layers=1)
    weights = stored(parameters | {"layers": {0: parameters["layers"][0]}}, precision)
    table = Table(precision)
    with jax.enable_x64(precision == "float64"), _one_thread():
        for stage in stages:
            start = stage_start(stage, shape, weights, precision=precision)
            count = UPDATES * start.train.accumulation_steps
            batches = [stage_batch(stage, shape, seed=seed, time=time) for seed in range(count)]
            table.add(*_training(start, batches))
            if stage == "lora":
                table.add(*_merging(start, batches[0], "JAX"))
                table.add(*_merging(start, batches[0], "PyTorch"))
    return list(table.rows.values())


def stage_start(stage: Stage, model: ModelConfig, weights: Parameters, *, precision: Precision) -> StageStart:
    """The stage on these weights: in lora they are frozen; in distill the teacher is wider than the model."""
    train = replace(COMPARED_TRAINING, stage=stage, dtype=precision)
    if stage == "lora":
        train = replace(train, lora_dropout=0.0, lora_targets=tuple(TARGETS), lora_rank=4, lora_alpha=2.0)
        # The first B is 0, which hides A.
        adapters = moved(initial_adapters(model, train.lora, seed=42, dtype="float64"), seed=42)
        return StageStart(model, train, stored(adapters, precision), weights)
    if stage == "distill":
        teacher = replace(model, hidden_size=model.hidden_size + 16)
        return StageStart(model, train, weights, stored(random_weights(teacher), precision), teacher)
    return StageStart(model, train, weights)


def stage_batch(stage: Stage, config: ModelConfig, *, seed: int, time: int) -> Arrays:
    """A batch of the stage. In dpo it has a reference, and every third batch lacks its last pair."""
    arrays = random_batch(config, seed=seed, rows=ROWS, time=time)
    if stage != "dpo":
        return arrays
    tokens, targets, weights, *places = arrays
    is_row = np.ones(ROWS, np.float32)
    is_row[[ROWS // 2 - 1, ROWS - 1]] = seed % 3 != 0
    weights = weights * is_row[:, None]
    # About what a model says that knows nothing.
    noise = np.random.default_rng(seed).normal(scale=3.0, size=ROWS)
    reference = is_row * (noise - weights.sum(axis=1) * np.log(config.vocab_size))
    return tokens, targets, weights, *places, reference


def _training(start: StageStart, batches: list[Arrays]) -> Iterator[Iterator[Value]]:
    """The training in JAX, in PyTorch, and below float64 in PyTorch in float64."""
    yield training_values(start, batches, jax_training(start, batches))
    for each in (start, *_exact(start)):
        yield training_values(each, batches, torch_training(each, batches))


def _merging(start: StageStart, arrays: Arrays, framework: str) -> Iterator[Iterator[Value]]:
    """One framework's logits with adapters beside their base, and merged into it; below float64 the exact ones."""
    logits = jax_logits if framework == "JAX" else torch_logits
    name = f"merge: logits of {framework}, beside and merged"
    assert start.frozen is not None
    merged = merge(start.frozen, start.trained, start.train.lora)
    yield iter([Value("lora merge", name, logits(start, start.frozen, start.trained, arrays))])
    yield iter([Value("lora merge", name, logits(start, merged, None, arrays))])
    for each in _exact(start):
        assert each.frozen is not None
        yield iter([Value("lora merge", name, torch_logits(each, each.frozen, each.trained, arrays))])


def _exact(start: StageStart) -> list[StageStart]:
    return [] if start.train.dtype == "float64" else [start.in_precision("float64")]


@contextmanager
def _one_thread() -> Iterator[None]:
    """PyTorch on one thread: in batches as small as these several threads wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
