"""Is it really the same? `python scripts/parity.py --model tiny` compares JAX and PyTorch tensor by tensor."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from minigpt_jax.cli import run
from minigpt_jax.config import PRESETS, preset
from minigpt_jax.errors import UserError
from minigpt_jax.files import replace_file, require_writable, write_json


@dataclass(frozen=True)
class Parity:
    """Compare the JAX model and its PyTorch twin: parts, logits, loss, gradients, stages. Exit code 1 on a miss."""

    model: str = "tiny"
    """A preset (random weights), or a model: run directory, Hugging Face directory, .safetensors or .pth."""
    dtype: Literal["float64", "float32", "bfloat16"] = "float64"
    """Precision of the comparison; in bfloat16 without training."""
    rows: int = 2
    """Rows of a batch."""
    max_seq_len: int = 64
    """Tokens of a row."""
    find: bool = False
    """Train both in lock-step instead, and name the first step, layer and operation where they part."""
    json: str | None = None
    """Write every row to this file."""
    html: str | None = None
    """Write a page with pictures to this file."""


def main(command: Parity) -> None:
    """Compare, print, and say by the exit code whether every bound holds."""
    _check(command)
    from minigpt_bridge.levels import COMPARED_TRAINING, compare, random_batch, random_weights
    from minigpt_bridge.models import open_model
    from minigpt_bridge.parity_report import as_json, as_page, as_text
    from minigpt_bridge.stage_levels import compare_stages

    if command.model in PRESETS:
        config = preset(command.model)
        parameters = random_weights(config)
    else:
        opened = open_model(command.model)
        config, parameters = opened.config, opened.read_parameters()
    if command.max_seq_len > config.max_position_embeddings:
        raise UserError(
            f"--max-seq-len {command.max_seq_len} is more than the model's {config.max_position_embeddings}"
        )
    if command.find:
        from minigpt_bridge.finder.search import find_divergence

        batches = [random_batch(config, seed=s, rows=command.rows, time=command.max_seq_len) for s in range(6)]
        found = find_divergence(config, parameters, COMPARED_TRAINING, batches, steps=3)
        print("3 training steps: no operation differs by more than rounding" if found is None else str(found))
        sys.exit(0 if found is None else 1)
    rows = compare(config, parameters, precision=command.dtype, rows=command.rows, time=command.max_seq_len)
    if command.dtype != "bfloat16":
        rows += compare_stages(config, parameters, precision=command.dtype, time=command.max_seq_len)
    print(as_text(rows))
    if command.json is not None:
        write_json(Path(command.json), as_json(rows))
    if command.html is not None:
        replace_file(Path(command.html), as_page(rows, title=f"JAX and PyTorch: {command.model}").encode())
    sys.exit(0 if all(row.ok for row in rows) else 1)


def _check(command: Parity) -> None:
    for name in ("rows", "max_seq_len"):
        if getattr(command, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(command, name)}")
    for option, target in (("--json", command.json), ("--html", command.html)):
        if target is not None:
            require_writable(Path(target), option=option)
    if command.find and (command.json or command.html or command.dtype != "float64"):
        raise UserError("--find prints one finding, in float64; leave --json, --html and --dtype out")


if __name__ == "__main__":
    run(main, Parity)
