"""What a run would take, before it starts: parameters, memory, time. Estimates, marked as such by their names.

Framework-free.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minigpt_jax.config import TrainConfig
from minigpt_jax.cost import (
    parameter_count,
    rows_of_example,
    trained_parameter_count,
    training_bytes,
    training_flops_per_token,
)
from minigpt_jax.data.cache_format import is_token_cache, open_token_cache
from minigpt_jax.data.records import expand_paths, is_compressed, read_records
from minigpt_jax.defaults import model_config, require_model_to_start_from, resolve
from minigpt_jax.errors import UserError
from minigpt_jax.formats.model_files import Model
from minigpt_jax.tokenizer import load_tokenizer

BYTES_PER_TOKEN = 3.2
"""Of the shipped tokenizer on Chinese and English text."""

SAMPLE_SIZES = {"pretrain": (371_000, 2_633), "sft": (168_000, 1_924), "dpo": (76_400, 989)}
"""Tokens and records of the sample corpus, by the form of the records."""

BYTES_PER_RECORD = 1500
"""Of archives, whose lines are not counted."""

BUCKETED_FRACTION = 0.6
"""Part of the positions that is real in bucketed rows; between 0.5 and 0.9 on the data at hand."""

COMPRESSION_RATIO = 3
"""Of .gz and .zst files of text."""

REACHED_FRACTION = 0.6
"""Part of a large matrix product's rate that a training step is taken to reach."""


def expected_cost(
    config: TrainConfig,
    *,
    accelerator: str | None,
    matmul_flops: Callable[[Any], float],
    open_model: Callable[[str], Model],
) -> dict[str, Any]:
    """The figures that `--dry-run` prints. Nothing is written and no text is tokenized.

    Args:
        config: as the person gave it.
        accelerator: the platform when it is not a CPU.
        matmul_flops: dtype name -> FLOPs per second of a large matrix product, measured.
        open_model: finds the models that --init-from and --teacher name.

    Returns:
        parameters, active_parameters, trained_parameters, bytes_estimated (peak device memory of a step),
        tokens_per_update, updates, tokens_estimated (of the whole run), seconds_estimated, and what was chosen.
    """
    if config.resume:
        raise UserError("--dry-run describes a run before it starts; leave --resume out")
    require_model_to_start_from(config)
    source = open_model(config.init_from).config if config.init_from is not None else None
    train = resolve(config, accelerator=accelerator, source=source)
    teacher = open_model(train.teacher).config if train.teacher is not None else None
    model = model_config(train, source=source)
    assert train.batch_size is not None
    for inputs in (train.data, train.val_data):
        _check_first_records(inputs, train)
    tokens, records = _size_of(train.data) if train.data else SAMPLE_SIZES[train.record_form]
    rows_per_update = train.batch_size * rows_of_example(train) * train.accumulation_steps
    tokens_per_update = rows_per_update * train.max_seq_len
    if train.steps is not None:
        updates = train.steps
    else:
        assert train.epochs is not None
        rows = rows_of_example(train) * rows_expected(train, tokens=tokens / rows_of_example(train), records=records)
        updates = max(1, math.ceil(train.epochs * rows / rows_per_update))
    flops = training_flops_per_token(model, time=train.max_seq_len) * tokens_per_update * updates
    return {
        "model": train.model,
        "dtype": train.dtype,
        "parameters": parameter_count(model),
        "active_parameters": parameter_count(model),
        "trained_parameters": trained_parameter_count(model, train),
        "bytes_estimated": training_bytes(model, train, teacher=teacher),
        "tokens_per_update": tokens_per_update,
        "updates": updates,
        "tokens_estimated": updates * tokens_per_update,
        "seconds_estimated": round(flops / (REACHED_FRACTION * matmul_flops(train.dtype))),
    }


def _check_first_records(inputs: tuple[str, ...], train: TrainConfig) -> None:
    """Refuse what training would refuse at once: no file, a first line that is no record, another tokenizer's cache."""
    if len(inputs) == 1 and is_token_cache(Path(inputs[0])):
        if train.init_from is None:
            open_token_cache(Path(inputs[0])).require_tokenizer(load_tokenizer(train.tokenizer))
        return
    for path in expand_paths(inputs) if inputs else ():
        next(read_records([path], stage=train.record_form, skip_bad_lines=train.skip_bad_lines), None)


def rows_expected(train: TrainConfig, *, tokens: float, records: float) -> float:
    """Rows of one pass over records of as many tokens in all, as the run batches them."""
    packed = tokens / train.max_seq_len
    if train.batching == "packed":
        return packed
    # One row a record; a text that goes on in more has half of its last one to itself, on average.
    padded = max(records, packed + records / 2 if train.stage == "pretrain" else 0)
    return padded if train.batching == "padded" else min(padded, packed / BUCKETED_FRACTION)


def _size_of(inputs: tuple[str, ...]) -> tuple[float, float]:
    """Tokens and records of the training data: counted where it is prepared, else estimated from sizes and lines."""
    if len(inputs) == 1 and is_token_cache(Path(inputs[0])):
        cache = open_token_cache(Path(inputs[0]))
        return cache.num_tokens, cache.num_documents // (2 if cache.holds_pairs else 1)
    tokens = records = 0.0
    for path in expand_paths(inputs):
        size = path.stat().st_size * (COMPRESSION_RATIO if is_compressed(path) else 1)
        tokens += size / BYTES_PER_TOKEN
        records += size / BYTES_PER_RECORD if is_compressed(path) else _lines(path)
    return tokens, records


def _lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
