"""How fast is it here? `python scripts/bench.py decode` compares ours with PyTorch and transformers, in turn."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from minigpt_jax.cli import run
from minigpt_jax.config import PRESETS, ModelConfig, preset
from minigpt_jax.console import say
from minigpt_jax.errors import UserError, missing_extra
from minigpt_jax.files import require_writable, write_json
from minigpt_jax.formats.names import Parameters, map_leaves
from minigpt_jax.initialization import initial_parameters
from minigpt_jax.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from minigpt_bridge.bench.limits import Limits
    from minigpt_bridge.bench.timing import Row


@dataclass(frozen=True)
class Command:
    """Measure both frameworks side by side in one process. Only ratios count: machines are noisy."""

    what: tyro.conf.Positional[Literal["train", "decode", "data", "startup", "all"]] = "all"
    """A training step and greedy decoding against the twin (minigpt_torch), torch.compile and transformers; the way of
    data into batches against the tokenizers library; start-up, from a process's beginning to the first training step;
    or all. A ratio above 1 says that ours is better. "Of the bandwidth bound" divides by the rate at which reading each
    weight once a token would take all the time, "of the matrix-product rate" by that of one large product."""
    model: str = "minimind2-small"
    """A preset (random weights), or a model: run directory, Hugging Face directory, .safetensors or .pth."""
    rounds: int = 5
    """How often the sides take turns."""
    json: str | None = None
    """Write limits and rows to this file as well."""


def main(command: Command) -> None:
    """Measure, and print row by row."""
    if command.rounds < 1:
        raise UserError(f"--rounds must be at least 1, got {command.rounds}")
    if command.what == "startup" and command.model not in PRESETS:
        raise UserError(f"bench.py startup trains from nothing: --model must be a preset ({', '.join(PRESETS)})")
    if command.json is not None:
        require_writable(Path(command.json), option="--json")
    try:
        from minigpt_bridge.bench.limits import measure_limits
        from minigpt_bridge.bench.timing import HEADING, as_json, as_line
    except ModuleNotFoundError as error:
        raise missing_extra("bench.py", "torch") from error
    if command.what in ("decode", "all") and find_spec("transformers") is None:
        raise missing_extra("bench.py decode", "hf")
    from minigpt_jax.engine import configure_jax

    model = _model(command.model)
    configure_jax("float32")
    load = os.getloadavg()[0]
    if load > (os.cpu_count() or 1) / 2:
        say(f"this machine is busy (load {load:.1f}): threads wait for each other, and ratios mislead")
    limits = measure_limits()
    say(f"this machine: {limits.matmul_gflops:.0f} GFLOP/s in a matrix product, {limits.read_gb_per_s:.1f} GB/s read")
    say(HEADING)
    rows = []
    for row in _rows(command, limits, *model):
        say(as_line(row))
        rows.append(row)
    if command.json is not None:
        write_json(Path(command.json), as_json(limits, rows))


def _rows(
    command: Command, limits: "Limits", config: ModelConfig, parameters: Parameters, tokenizer: Tokenizer
) -> "Iterator[Row]":
    from minigpt_bridge.bench.data import data_rows
    from minigpt_bridge.bench.decode import decode_rows
    from minigpt_bridge.bench.startup import startup_rows
    from minigpt_bridge.bench.train import train_rows

    if command.what in ("train", "all"):
        yield from train_rows(config, parameters, limits, rounds=command.rounds)
    if command.what in ("decode", "all"):
        yield from decode_rows(config, parameters, tokenizer, limits, rounds=command.rounds)
    if command.what in ("data", "all"):
        yield from data_rows(config, parameters, tokenizer, rounds=command.rounds)
    if command.what in ("startup", "all") and command.model in PRESETS:
        yield from startup_rows(command.model, rounds=command.rounds)


def _model(name: str) -> tuple[ModelConfig, Parameters, Tokenizer]:
    if name in PRESETS:
        shape = preset(name)
        return shape, initial_parameters(shape, initializer="scaled_normal", seed=0), load_tokenizer()
    from minigpt_bridge.models import open_model

    if not Path(name).exists():
        raise UserError(f"--model {name} is neither a preset ({', '.join(PRESETS)}) nor a model's path")
    model = open_model(name)
    in_float32 = map_leaves(lambda leaf: leaf.astype("float32"), model.read_parameters())
    return model.config, in_float32, model.require_tokenizer()


if __name__ == "__main__":
    run(main, Command)
