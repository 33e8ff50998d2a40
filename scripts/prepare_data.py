"""Prepare a data set: validate, clean, dedupe, tokenize into a cache that `train.py --data` accepts; print a table."""

import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from minigpt_jax.cli import run
from minigpt_jax.config import ChatMask
from minigpt_jax.console import work_progress
from minigpt_jax.cost import peak_memory_bytes
from minigpt_jax.data.prepare import ROW_LENGTH, prepare_data
from minigpt_jax.errors import UserError, python
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
    chat_mask: ChatMask = "assistant"
    """What of a conversation is learned; as in train.py."""
    skip_bad_lines: bool = False
    """Count and report lines that are not valid records instead of stopping at the first."""
    json: str | None = None
    """Write the figures to this file as well."""


def main(command: Command) -> None:
    """Prepare the data and print the table."""
    begin = time.perf_counter()
    if command.stage == "pretrain" and command.chat_mask != "assistant":
        raise UserError("--chat-mask is for --stage sft or dpo, not pretrain")
    if command.json is not None:
        require_writable(Path(command.json), option="--json")
    with work_progress("tokenizing") as report:
        figures = prepare_data(
            command.inputs,
            load_tokenizer(command.tokenizer),
            stage=command.stage,
            out=Path(command.out),
            chat_mask=command.chat_mask,
            skip_bad_lines=command.skip_bad_lines,
            on_progress=report,
        )
    figures["seconds"] = time.perf_counter() - begin
    figures["peak_memory_bytes"] = peak_memory_bytes()
    print_table(figures)
    print(f"{command.out} is prepared; next: {next_command(command)}")
    if command.json is not None:
        write_json(Path(command.json), figures)


def next_command(command: Command) -> str:
    """Training on what was prepared, by the tokenizer and the rule that it was prepared with."""
    words = [python(), "scripts/train.py", "--stage", command.stage]
    if command.stage != "pretrain":
        words += ["--init-from", "MODEL"]
        if command.chat_mask != "assistant":
            words += ["--chat-mask", command.chat_mask]
    elif command.tokenizer is not None:
        words += ["--tokenizer", command.tokenizer]
    return shlex.join([*words, "--data", command.out])


def print_table(figures: dict[str, Any]) -> None:
    """One figure a line."""
    rows = [
        ("documents", f"{figures['documents']:,}" + (f", {figures['pairs']:,} pairs" if "pairs" in figures else "")),
        ("duplicates left out", f"{figures['duplicates']:,}"),
        ("bad lines left out", f"{sum(figures['skipped'].values()):,}"),
    ]
    for reason, count in sorted(figures["skipped"].items()):
        rows.append((f"  {reason}", f"{count:,} (first: {figures['examples'][reason]})"))
    rows.append(("tokens", f"{figures['tokens']:,}"))
    if "supervised_tokens" in figures:
        rows.append(("tokens that are learned", f"{figures['supervised_tokens']:,}"))
        rows.append((f"conversations longer than {ROW_LENGTH + 1} tokens", f"{figures['longer_than_a_row']:,}"))
    rows.append(("UTF-8 bytes of text", f"{figures['text_bytes']:,}"))
    rows.append(("bytes per token", f"{figures['bytes_per_token']:.3f}"))
    for batching, fraction in figures["real_fraction"].items():
        rows.append((f"real tokens, {batching} rows of {ROW_LENGTH}", f"{100 * fraction:.2f} %"))
    rows.append(("seconds", f"{figures['seconds']:.1f}"))
    rows.append(("peak memory", f"{figures['peak_memory_bytes'] / 1e6:,.0f} MB"))
    for name, value in rows:
        print(f"{name:36} {value}")


if __name__ == "__main__":
    run(main, Command)
