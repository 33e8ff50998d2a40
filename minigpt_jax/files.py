"""Files that are written whole or not at all. Framework-free."""

import json
import os
from pathlib import Path

from minigpt_jax.errors import UserError


def replace_file(path: Path, content: bytes) -> None:
    """Write `content` to `path` so that a reader or a crash sees the old file or the new one, never a part."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_json(path: Path, figures: object) -> None:
    """Write what a person asked to have as JSON.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        replace_file(path, (json.dumps(figures, ensure_ascii=False, indent=2) + "\n").encode("utf-8"))
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose another --json") from error
