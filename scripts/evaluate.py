"""Measure a model: `python scripts/evaluate.py out/pretrain-tiny` gives its loss on held-out text."""

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from minigpt_jax.cli import run
from minigpt_jax.config import Backend, DType
from minigpt_jax.errors import UserError
from minigpt_jax.evaluation_config import EvaluationConfig
from minigpt_jax.files import require_writable, write_json


@dataclass(frozen=True)
class Command(EvaluationConfig):
    """Measure a model on what it was not trained on: by default on what the sample corpus holds out."""

    model: tyro.conf.Positional[str] = ""
    """A run directory (its best checkpoint), a Hugging Face directory, a .safetensors or a .pth file."""
    lora: str | None = None
    """An adapter, applied without merging it: a run of --stage lora, a PEFT directory or MiniMind's .pth."""
    backend: Backend = "jax"
    """Framework that computes: jax, or torch (the twin)."""
    dtype: DType = "float32"
    """Precision of the computation; from the logits on at least float32."""
    int8: bool = False
    """Hold the weights of linear layers as 8-bit integers, a quarter of their float32 bytes; the numbers are a little
    off."""
    json: str | None = None
    """Write the figures to this file as well."""


def main(command: Command) -> None:
    """Measure and print."""
    if not command.model:
        raise UserError("name a model: a run directory, a Hugging Face directory, a .safetensors or a .pth file")
    if command.json is not None:
        require_writable(Path(command.json), option="--json")
        for read in (command.model, *command.data, *command.few_shot_data):
            if Path(read).resolve() == Path(command.json).resolve():
                raise UserError(f"--json {command.json} would replace what is measured; choose another name")
    from minigpt_bridge.measure import Opening, measure

    found = measure(Opening(command.model, command.backend, command.dtype, command.int8, command.lora), command)
    if found.note is not None:
        print(found.note, file=sys.stderr)
    if command.json is not None:
        asked = {name: getattr(command, name) for name in ("model", "task", "backend", "dtype", "int8")}
        write_json(Path(command.json), asked | found.table.figures)
    for line in found.table.lines:
        print(line)


if __name__ == "__main__":
    run(main, Command)
