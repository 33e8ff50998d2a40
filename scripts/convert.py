"""Convert a model between formats: `python scripts/convert.py out/pretrain-tiny exported --to hf`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from minigpt_jax.cli import run
from minigpt_jax.formats import AdapterFormat, FileDType, Format


@dataclass(frozen=True)
class Convert:
    """Write a model in another format, read it back, and compare the logits."""

    source: tyro.conf.Positional[str]
    """A run directory (its best checkpoint), a Hugging Face directory, a .safetensors or a .pth file; or an adapter: a
    run of --stage lora, a PEFT directory, with --to peft also MiniMind's .pth."""
    target: tyro.conf.Positional[str]
    """The new file or directory."""
    to: Format | AdapterFormat
    """torch (MiniMind's .pth), safetensors, hf (a Hugging Face directory), or run; of an adapter peft, or torch."""
    dtype: FileDType = "float32"
    """Precision of the weights in the file: float32, or float16 as MiniMind's own."""
    merge_lora: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Adapter to merge into the model before it is written: a run of --stage lora, a PEFT directory or MiniMind's
    .pth. Given again, another one after it."""


def main(command: Convert) -> None:
    """Convert and say what was compared."""
    from minigpt_bridge.convert import convert, convert_adapter
    from minigpt_bridge.models import is_adapter

    options: dict[str, Any] = {"dtype": command.dtype, "merge_lora": command.merge_lora}
    if command.to == "peft" or is_adapter(Path(command.source)):
        path = convert_adapter(command.source, command.target, to=command.to, **options)
        print(f"{path}: read back; every number is the same. Done.")
        return
    done = convert(command.source, command.target, to=command.to, **options)
    if done.note is not None:
        print(done.note)
    for merged in done.merged:
        print(f"{merged.adapter}: merged; largest logit difference from base and adapter {merged.logit_difference:.1e}")
        if merged.other_base is not None:
            print(
                f"{merged.adapter}: was trained on {merged.other_base}, whose weights are not those of {command.source}"
            )
    rounded = done.rounding is not None
    rounding = f"; {command.dtype} rounds the weights, which moves them by {done.rounding:.1e}" if rounded else ""
    difference = f"largest logit difference {done.logit_difference:.1e}{rounding}"
    print(f"{done.path}: read back by {done.reader}; {difference}. Done.")


if __name__ == "__main__":
    run(main, Convert)
