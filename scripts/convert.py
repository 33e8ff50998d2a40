"""Convert a model between formats: `python scripts/convert.py out/pretrain-tiny exported --to hf`."""

from dataclasses import dataclass

import tyro

from minigpt_jax.cli import run
from minigpt_jax.formats import FileDType, Format


@dataclass(frozen=True)
class Convert:
    """Write a model in another format, read it back, and compare the logits."""

    source: tyro.conf.Positional[str]
    """A run directory (its best checkpoint), a Hugging Face directory, a .safetensors or a .pth file."""
    target: tyro.conf.Positional[str]
    """The new file or directory."""
    to: Format
    """torch (MiniMind's .pth), safetensors, hf (a Hugging Face directory), or run."""
    dtype: FileDType = "float32"
    """Precision of the weights in the file: float32, or float16 as MiniMind's own."""


def main(command: Convert) -> None:
    """Convert and say what was compared."""
    from minigpt_bridge.convert import convert

    done = convert(command.source, command.target, to=command.to, dtype=command.dtype)
    if done.note is not None:
        print(done.note)
    rounded = done.rounding is not None
    rounding = f"; {command.dtype} rounds the weights, which moves them by {done.rounding:.1e}" if rounded else ""
    difference = f"largest logit difference {done.logit_difference:.1e}{rounding}"
    print(f"{done.path}: read back by {done.reader}; {difference}. Done.")


if __name__ == "__main__":
    run(main, Convert)
