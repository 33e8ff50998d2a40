"""Train a byte-level BPE tokenizer on JSONL text and say how densely it writes held-out text.

The shipped tokenizer was made by this script: minigpt_jax/assets/tokenizer/TRAINED_WITH.md has the command.
"""

import dataclasses
import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from minigpt_jax.cli import run
from minigpt_jax.data.records import expand_paths, iter_texts
from minigpt_jax.errors import UserError
from minigpt_jax.files import write_json
from minigpt_jax.tokenizer_training import EvaluationRow, evaluate_tokenizer, train_tokenizer, weight_english


@dataclass(frozen=True)
class TrainTokenizerConfig:
    """Train a tokenizer."""

    paths: tyro.conf.Positional[tuple[str, ...]]
    """Training text: JSONL files (also .gz, .zst) of pretraining documents or conversations, or directories of them."""
    out: str
    """Directory for tokenizer.json and tokenizer_config.json."""
    vocab_size: int = 6400
    """Entries in all: 36 added tokens, 256 bytes, and merges."""
    min_frequency: int = 2
    """A pair of entries seen less often than this is not merged."""
    english_weight: float = 1.25
    """Count English text this many times. 1.25 balances both languages on text that is two thirds Chinese."""
    evaluate: tuple[str, ...] = ()
    """Held-out text in the same form, for the table of bytes and characters per token."""
    json: str | None = None
    """Write sources, hashes and the table to this file."""


def main(config: TrainTokenizerConfig) -> None:
    """Train, save, evaluate, print."""
    sources = expand_paths(config.paths)
    held_out = expand_paths(config.evaluate) if config.evaluate else []
    for path in held_out:
        if any(path.samefile(source) for source in sources):
            raise UserError(f"{path} is both training and held-out text; leave it out of one of them")
    tokenizer = train_tokenizer(
        weight_english(iter_texts(sources), config.english_weight),
        vocab_size=config.vocab_size,
        min_frequency=config.min_frequency,
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.save(Path(config.out))
    print(f"{config.out}: {tokenizer.vocab_size} entries, sha256 {tokenizer.sha256}")
    rows = evaluate_tokenizer(tokenizer, iter_texts(held_out)) if held_out else []
    if rows:
        print(table(rows))
    if config.json is not None:
        report = {
            "vocab_size": tokenizer.vocab_size,
            "sha256": tokenizer.sha256,
            "sources": [{"path": str(path), "sha256": file_sha256(path)} for path in sources],
            "evaluation": [dataclasses.asdict(row) for row in rows],
        }
        write_json(Path(config.json), report)


def table(rows: list[EvaluationRow]) -> str:
    """The evaluation as Markdown."""
    names = [field.name for field in dataclasses.fields(EvaluationRow)]
    lines = ["| " + " | ".join(name.replace("_", " ") for name in names) + " |", "|---" * len(names) + "|"]
    for row in rows:
        cells = (f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in dataclasses.astuple(row))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def file_sha256(path: Path) -> str:
    """The hash of the file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    run(main, TrainTokenizerConfig)
