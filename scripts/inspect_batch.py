"""Show what training makes of a data file: the tokens of its documents, coloured by their weight in the loss."""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from minigpt_jax.cli import run
from minigpt_jax.config import ChatMask, Stage, TrainConfig
from minigpt_jax.console import say
from minigpt_jax.data.corpus import sample_files
from minigpt_jax.data.inspection import describe_row, inspect_data, render_row
from minigpt_jax.errors import UserError
from minigpt_jax.files import require_writable, write_json
from minigpt_jax.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Command:
    """Show what training makes of a data file: the tokens of its documents, coloured by their weight in the loss.

    Green tokens are learned, the others only read; without colours the learned ones stand in brackets. One blank
    parts two tokens; a space in a token is shown as a middle dot, a line break as an arrow.
    """

    stage: Stage = "pretrain"
    """What the data is for."""
    data: str | None = None
    """A JSONL file (also .gz, .zst), a directory of them, or a cache that prepare_data.py made. The generated sample
    corpus when not given."""
    index: int | None = None
    """The record to show, from 0; the first three when not given."""
    tokenizer: str | None = None
    """A tokenizer.json, or a directory that holds one; the shipped 6400-entry tokenizer when not given."""
    chat_mask: ChatMask = "assistant"
    """What of a conversation is learned; as in train.py."""
    max_seq_len: int = 512
    """Tokens of one row; as in train.py."""
    skip_bad_lines: bool = False
    """Pass over lines that are not valid records instead of stopping at the first; they have no index."""
    json: str | None = None
    """Write ids, loss weights and tokens of what is shown to this file as well."""


def main(command: Command) -> None:
    """Show the rows and their counts."""
    config = TrainConfig(
        stage=command.stage,
        data=() if command.data is None else (command.data,),
        tokenizer=command.tokenizer,
        chat_mask=command.chat_mask,
        max_seq_len=command.max_seq_len,
        skip_bad_lines=command.skip_bad_lines,
    )
    if command.index is not None and command.index < 0:
        raise UserError(f"--index must be at least 0, got {command.index}")
    if command.json is not None:
        require_writable(Path(command.json), option="--json")
    tokenizer = load_tokenizer(command.tokenizer)
    path = sample_files(config.seed)[config.record_form] if command.data is None else Path(command.data)
    rows = inspect_data(path, tokenizer, config, index=command.index)
    console = Console()
    coloured = console.color_system is not None and not console.no_color
    for row in rows:
        say(describe_row(row), console=console)
        console.print(render_row(row, tokenizer, coloured=coloured), soft_wrap=not console.is_terminal)
        say("", console=console)
    total, learned = sum(len(row.ids) for row in rows), sum(row.num_learned for row in rows)
    say(f"in all {total} tokens, {learned} of them learned ({100 * learned / max(total, 1):.0f} %)", console=console)
    if command.json is not None:
        write_json(Path(command.json), [row.to_json() for row in rows])


if __name__ == "__main__":
    run(main, Command)
