"""Files that are written whole or not at all. Framework-free."""

import json
import os
from pathlib import Path
from typing import Any

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


def require_writable(path: Path, *, option: str) -> None:
    """Refuse a file that could not be written, before the work whose result it is to hold.

    Raises:
        UserError: it is a directory, or its directory is missing or closed.
    """
    if path.is_dir() or path.name == "":
        raise UserError(f"{option} {str(path)!r} is a directory; name a file")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise UserError(f"{option} {path}: the directory {path.parent} is missing or cannot be written")


def write_json(path: Path, figures: object) -> None:
    """Write what a person asked to have as JSON.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        replace_file(path, (json.dumps(figures, ensure_ascii=False, indent=2) + "\n").encode("utf-8"))
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose another --json") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        UserError: the file is missing, unreadable, or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold one JSON object, not {type(value).__name__}")
    return value
