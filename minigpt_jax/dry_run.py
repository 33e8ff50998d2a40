"""What a run would take, before it starts: parameters, memory, time. Estimates, marked as such by their names.

Framework-free.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minigpt_jax.config import TrainConfig
from minigpt_jax.cost import parameter_count, training_bytes, training_flops_per_token
from minigpt_jax.data.records import expand_paths
from minigpt_jax.defaults import model_config, resolve
from minigpt_jax.errors import UserError
from minigpt_jax.tracking import replace_file

BYTES_PER_TOKEN = 3.2
"""Of the shipped tokenizer on Chinese and English text."""

SAMPLE_BYTES = 1_000_000
"""Of the sample corpus."""

REACHED_FRACTION = 0.6
"""Part of a large matrix product's rate that a training step is taken to reach."""


def expected_cost(
    config: TrainConfig, *, accelerator: str | None, matmul_flops: Callable[[Any], float]
) -> dict[str, Any]:
    """The figures that `--dry-run` prints. Nothing is written and no text is tokenized.

    Args:
        config: as the person gave it.
        accelerator: the platform when it is not a CPU.
        matmul_flops: dtype name -> FLOPs per second of a large matrix product, measured.

    Returns:
        parameters, active_parameters, bytes_estimated (peak device memory of a step), tokens_per_update, updates,
        tokens_estimated (of the whole run), seconds_estimated, and what was chosen.
    """
    train = resolve(config, accelerator=accelerator)
    model = model_config(train)
    assert train.batch_size is not None
    tokens_per_update = train.batch_size * train.accumulation_steps * train.max_seq_len
    if train.steps is not None:
        updates = train.steps
    else:
        assert train.epochs is not None
        size = sum(path.stat().st_size for path in expand_paths(train.data)) if train.data else SAMPLE_BYTES
        updates = max(1, math.ceil(train.epochs * size / BYTES_PER_TOKEN / tokens_per_update))
    flops = training_flops_per_token(model, time=train.max_seq_len) * tokens_per_update * updates
    return {
        "model": train.model,
        "dtype": train.dtype,
        "parameters": parameter_count(model),
        "active_parameters": parameter_count(model),
        "bytes_estimated": training_bytes(model, train),
        "tokens_per_update": tokens_per_update,
        "updates": updates,
        "tokens_estimated": updates * tokens_per_update,
        "seconds_estimated": round(flops / (REACHED_FRACTION * matmul_flops(train.dtype))),
    }


def write_json(figures: dict[str, Any], path: Path) -> None:
    """Write `figures` to `path` for machines.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        replace_file(path, (json.dumps(figures, indent=2) + "\n").encode())
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
