"""Prepare a data set: validate, clean, dedupe, tokenize into a cache that `train.py --data` accepts; print a table."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from minigpt_jax.cli import run
from minigpt_jax.console import tokenizing_progress
from minigpt_jax.cost import peak_memory_bytes
from minigpt_jax.data.prepare import ROW_LENGTH, check_conversations, prepare_texts
from minigpt_jax.errors import python
from minigpt_jax.files import require_writable, write_json
from minigpt_jax.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Command:
    """Validate, clean, dedupe and tokenize a data set, and print what was found."""

    inputs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="INPUT ...")]
    """JSONL files (also .gz, .zst), or directories of them."""
    out: str
    """Directory that the token cache is written to; must not exist yet, or hold the very same cache."""
    stage: Literal["pretrain", "sft", "dpo"] = "pretrain"
    """Form of the records: {"text"}, {"conversations"} or {"chosen", "rejected"}."""
    tokenizer: str | None = None
    """A tokenizer.json, or a directory that holds one; the shipped 6400-entry tokenizer when not given."""
    skip_bad_lines: bool = False
    """Count and report lines that are not valid records instead of stopping at the first."""
    json: str | None = None
    """Write the figures to this file as well."""


def main(command: Command) -> None:
    """Prepare the data and print the table."""
    begin = time.perf_counter()
    if command.json is not None:
        require_writable(Path(command.json), option="--json")
    with tokenizing_progress() as report:
        options: dict[str, Any] = {"skip_bad_lines": command.skip_bad_lines, "on_progress": report}
        tokenizer = load_tokenizer(command.tokenizer)
        if command.stage == "pretrain":
            figures = prepare_texts(command.inputs, tokenizer, out=Path(command.out), **options)
        else:
            figures = check_conversations(command.inputs, tokenizer, stage=command.stage, **options)
    figures["seconds"] = time.perf_counter() - begin
    figures["peak_memory_bytes"] = peak_memory_bytes()
    print_table(figures)
    if command.stage == "pretrain":
        print(f"wrote {command.out}; next: {python()} scripts/train.py --stage pretrain --data {command.out}")
    else:
        print(f"checked; {command.stage} data is encoded by its training stage, which this version does not have")
    if command.json is not None:
        write_json(Path(command.json), figures)


def print_table(figures: dict[str, Any]) -> None:
    """One figure a line."""
    rows = [
        ("documents", f"{figures['documents']:,}"),
        ("duplicates left out", f"{figures['duplicates']:,}"),
        ("bad lines left out", f"{sum(figures['skipped'].values()):,}"),
    ]
    for reason, count in sorted(figures["skipped"].items()):
        rows.append((f"  {reason}", f"{count:,} (first: {figures['examples'][reason]})"))
    if "tokens" in figures:
        rows.append(("tokens", f"{figures['tokens']:,}"))
    if "supervised_tokens" in figures:
        rows.append(("tokens that are learned", f"{figures['supervised_tokens']:,}"))
    rows.append(("UTF-8 bytes of text", f"{figures['text_bytes']:,}"))
    if "tokens" in figures:
        rows.append(("bytes per token", f"{figures['bytes_per_token']:.3f}"))
    for batching, fraction in figures.get("real_fraction", {}).items():
        rows.append((f"real tokens, {batching} rows of {ROW_LENGTH}", f"{100 * fraction:.2f} %"))
    rows.append(("seconds", f"{figures['seconds']:.1f}"))
    rows.append(("peak memory", f"{figures['peak_memory_bytes'] / 1e6:,.0f} MB"))
    for name, value in rows:
        print(f"{name:36} {value}")


if __name__ == "__main__":
    run(main, Command)
