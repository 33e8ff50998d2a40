"""Is it really the same? `python scripts/parity.py --model tiny` compares JAX and PyTorch tensor by tensor."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from minigpt_jax.cli import run
from minigpt_jax.config import PRESETS, TrainConfig, preset
from minigpt_jax.files import replace_file, write_json


@dataclass(frozen=True)
class Parity:
    """Compare the JAX model and its PyTorch twin: parts, logits, loss, gradients, training. Exit code 1 on a miss."""

    model: str = "tiny"
    """A preset (random weights), or a model: run directory, Hugging Face directory, .safetensors or .pth."""
    dtype: Literal["float64", "float32"] = "float64"
    """Precision of the comparison."""
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
    from minigpt_bridge.levels import compare, random_batch
    from minigpt_bridge.models import open_model
    from minigpt_bridge.parity_report import as_json, as_page, worst_of_levels
    from minigpt_jax.initialization import initial_parameters

    if command.model in PRESETS:
        config = preset(command.model)
        parameters = initial_parameters(config, initializer="scaled_normal", seed=42, dtype="float64")
    else:
        opened = open_model(command.model)
        config, parameters = opened.config, opened.read_parameters()
    if command.find:
        from minigpt_bridge.finder import find_divergence

        train = TrainConfig(learning_rate=1e-3, warmup_steps=5, accumulation_steps=2, grad_clip=0.5, dtype="float64")
        batches = [random_batch(config, seed=s, rows=command.rows, time=command.max_seq_len) for s in range(6)]
        found = find_divergence(config, parameters, train, batches, steps=3)
        print("3 training steps: no operation differs by more than rounding" if found is None else str(found))
        sys.exit(0 if found is None else 1)
    rows = compare(config, parameters, precision=command.dtype, rows=command.rows, time=command.max_seq_len)
    print(f"{'level':12} {'tensors':>7}  {'nearest to its bound':52} {'relative':>9} {'ulp':>7} {'bound':>7}")
    for row in worst_of_levels(rows):
        count = sum(other.level == row.level for other in rows)
        verdict = "ok" if row.ok else "MISSED"
        print(f"{row.level:12} {count:7}  {row.name:52} {row.relative:9.1e} {row.ulp:7.1f} {row.bound:7.0e} {verdict}")
    if command.json is not None:
        write_json(Path(command.json), as_json(rows))
    if command.html is not None:
        replace_file(Path(command.html), as_page(rows, title=f"JAX and PyTorch: {command.model}").encode())
    sys.exit(0 if all(row.ok for row in rows) else 1)


if __name__ == "__main__":
    run(main, Parity)
