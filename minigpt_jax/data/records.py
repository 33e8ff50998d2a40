"""Training records: JSONL files in, validated records out, one line at a time.

Choices: a line ends at a newline byte only (CRLF is accepted; U+2028 inside a text is text); a byte order mark at
the start of a file is dropped, anywhere else it is a fault; a null that stands for "nothing" (the content beside tool
calls, an absent reasoning) becomes an empty string or disappears, never the word None. A line that cannot be trained
on is an error that names file and line, or is skipped and counted by reason.
"""

import gzip
import importlib
import io
import itertools
import json
import os
import re
import stat
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from minigpt_jax.errors import UserError, missing_extra

RecordStage = Literal["pretrain", "sft", "dpo"]

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
DEEPEST = 100
"""Levels of lists and objects in each other that a record may have."""

_ROLES = ("system", "user", "assistant", "tool")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SURROGATE_ESCAPE = re.compile(rb"\\ud[89a-f]", re.IGNORECASE)


@dataclass(frozen=True)
class Record:
    """One valid line: `value` is its JSON object, `path` and `line` (from 1) say where it stands."""

    path: Path
    line: int
    value: dict[str, Any]


@dataclass
class ReadReport:
    """What `read_records` has met so far; it is updated while the records are consumed."""

    records: int = 0
    """Valid records."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Lines left out, by reason."""
    examples: dict[str, str] = field(default_factory=dict)
    """Where each reason was met first, as FILE:LINE."""
    source_bytes: int = 0
    """Bytes of the files on disk that have been consumed, for progress bars."""


class _BadLineError(Exception):
    """A line that is not a valid record: `reason` is what it is counted under, `remedy` how to mend it."""

    def __init__(self, reason: str, remedy: str):
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy


# --- Files ---


def expand_paths(inputs: Sequence[str | Path]) -> list[Path]:
    """The files that `inputs` name: files as they are, directories as every JSONL file below them, sorted.

    Raises:
        UserError: an input does not exist or cannot be read, or a directory holds no JSONL file.
    """
    found: list[Path] = []
    for path in map(Path, inputs):
        try:
            directory = stat.S_ISDIR(path.stat().st_mode)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}; check the path") from error
        below = sorted(_walk(path)) if directory else [path]
        if not below:
            raise UserError(f"{path} holds no {', '.join(SUFFIXES)} file; name a file or another directory")
        found += below
    if not found:
        raise UserError("no input was named; give a JSONL file or a directory of them")
    return list(dict.fromkeys(found))


def _walk(directory: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise UserError(f"cannot read {error.filename}: {error.strerror}") from error

    for parent, _, names in os.walk(directory, onerror=refuse):
        for name in names:
            if name.endswith(SUFFIXES):
                yield Path(parent) / name


class _ZstdStream(io.RawIOBase):
    """Decompressed bytes of a zstd file; unlike the library's own reader it refuses an unfinished frame."""

    def __init__(self, raw: IO[bytes], library: Any):
        self._raw = raw
        self._make = library.ZstdDecompressor
        self._frame: Any = None
        self._pending = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._pending:
            compressed = self._raw.read(1 << 16)
            if not compressed:
                if self._frame is not None:
                    raise EOFError("unfinished zstd frame")
                return 0
            self._decompress(compressed)
        size = min(len(buffer), len(self._pending))
        buffer[:size] = self._pending[:size]
        self._pending = self._pending[size:]
        return size

    def _decompress(self, compressed: bytes) -> None:
        while compressed:
            if self._frame is None:
                self._frame = self._make().decompressobj()
            self._pending += self._frame.decompress(compressed)
            if not self._frame.eof:
                return
            compressed = self._frame.unused_data
            self._frame = None


def _decompressed(path: Path, raw: IO[bytes]) -> tuple[IO[bytes], tuple[type[Exception], ...]]:
    """The stream of the text's bytes, and the errors by which it tells a damaged archive."""
    if path.suffix == ".gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=raw)), (EOFError, zlib.error, gzip.BadGzipFile)
    if path.suffix == ".zst":
        try:
            library = importlib.import_module("zstandard")
        except ImportError as error:
            raise missing_extra(f"reading {path}", "data") from error
        return io.BufferedReader(_ZstdStream(raw, library), 1 << 18), (EOFError, library.ZstdError)
    return raw, ()


def _lines(path: Path, report: ReadReport) -> Iterator[tuple[int, bytes]]:
    """Every line of `path` with its number; the newline stays on, so that a cut last line can be told."""
    consumed_before = report.source_bytes
    damage: tuple[type[Exception], ...] = ()
    try:
        with open(path, "rb") as raw:
            stream, damage = _decompressed(path, raw)
            for number, line in enumerate(stream, start=1):
                report.source_bytes = consumed_before + raw.tell()
                yield number, line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
    except damage as error:
        raise UserError(f"{path} is a damaged or cut archive ({error}); fetch or write it again") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


# --- Records ---


def read_records(
    paths: Sequence[Path],
    *,
    stage: RecordStage,
    skip_bad_lines: bool = False,
    report: ReadReport | None = None,
) -> Iterator[Record]:
    """The valid records of `paths` in order, in memory that does not grow with the files.

    Args:
        paths: files, as `expand_paths` gives them.
        stage: the form of the records: `{"text"}`, `{"conversations"}` or `{"chosen", "rejected"}`.
        skip_bad_lines: leave a bad line out and count it, instead of raising.
        report: counts are added to it when given.

    Raises:
        UserError: a bad line (`FILE:LINE: reason`), a file without records, an unreadable or damaged file. With
            `skip_bad_lines` only when no valid record is left, or a file cannot be read to its end.
    """
    validate = {"pretrain": _pretrain, "sft": _conversation, "dpo": _pair}[stage]
    return _read(paths, validate, skip_bad_lines=skip_bad_lines, report=report or ReadReport())


def iter_texts(paths: Sequence[Path]) -> Iterator[str]:
    """Every text that a tokenizer may learn from, of records of any stage: texts, contents, reasonings.

    Raises:
        UserError: as `read_records` without `skip_bad_lines`.
    """
    for record in _read(paths, _any_form, skip_bad_lines=False, report=ReadReport()):
        if "text" in record.value:
            yield record.value["text"]
        for conversation in ("conversations", "chosen", "rejected"):
            for message in record.value.get(conversation, ()):
                yield from (message[key] for key in ("reasoning_content", "content") if message.get(key))


def _read(
    paths: Sequence[Path],
    validate: Callable[[dict[str, Any]], dict[str, Any]],
    *,
    skip_bad_lines: bool,
    report: ReadReport,
) -> Iterator[Record]:
    for path in paths:
        number = 0
        for number, line in _lines(path, report):
            try:
                value = validate(_parse(line))
            except _BadLineError as fault:
                if not skip_bad_lines:
                    remedy = f"{fault.remedy}, or pass --skip-bad-lines"
                    raise UserError(f"{path}:{number}: {fault.reason}; {remedy}") from fault
                report.skipped[fault.reason] += 1
                report.examples.setdefault(fault.reason, f"{path}:{number}")
                continue
            report.records += 1
            yield Record(path, number, value)
        if number == 0:
            if not skip_bad_lines:
                raise UserError(f"{path} is empty; it must hold one JSON object a line")
            report.skipped["empty file"] += 1
            report.examples.setdefault("empty file", str(path))
    if report.records == 0:
        raise UserError(f"no valid record in {', '.join(map(str, paths))}; check the files and --stage")


def _parse(line: bytes) -> dict[str, Any]:
    """The JSON object in `line`."""
    if not line.strip():
        raise _BadLineError("empty line", "delete it")
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _BadLineError("not UTF-8", f"byte {error.start + 1} of the line; save the file as UTF-8") from error
    except RecursionError as error:
        raise _BadLineError("nested too deeply", "flatten it") from error
    except ValueError as error:  # JSONDecodeError, and a number too long for an int
        if not line.endswith(b"\n"):
            raise _BadLineError("cut last line", "the file ends inside a record; write it again") from error
        raise _BadLineError("not JSON", f"{error}; write one JSON object a line") from error
    if _is_deep(value):
        raise _BadLineError("nested too deeply", f"more than {DEEPEST} levels; flatten it")
    if not isinstance(value, dict):
        raise _BadLineError("not an object", f'it is {_kind(value)}; write an object such as {{"text": "..."}}')
    if _SURROGATE_ESCAPE.search(line) and not _is_text(value):
        remedy = "half of a \\ud83d\\ude00 pair is not a character; write both halves or none"
        raise _BadLineError("lone surrogate", remedy)
    return value


def _is_deep(value: Any) -> bool:
    """Whether something lies more than DEEPEST levels down, where what walks a value by recursion would fail."""
    level = [value]
    for _ in range(DEEPEST):
        level = [
            item
            for holder in level
            if isinstance(holder, dict | list)
            for item in (holder.values() if isinstance(holder, dict) else holder)
        ]
        if not level:
            return False
    return True


# --- Forms ---


def _pretrain(value: dict[str, Any]) -> dict[str, Any]:
    if "text" not in value:
        raise _BadLineError("no text field", f"found {_keys(value)}; name the field text, or choose another --stage")
    text = _string(value["text"], "text")
    if not text.strip():
        raise _BadLineError("text is empty", "delete the line")
    return value


def _conversation(value: dict[str, Any], key: str = "conversations") -> dict[str, Any]:
    if key not in value:
        raise _BadLineError(f"no {key} field", f"found {_keys(value)}; name the field {key}, or choose another --stage")
    messages = value[key]
    if not isinstance(messages, list):
        raise _BadLineError(f"{key} is not a list", f"it is {_kind(messages)}; write a list of messages")
    if not messages:
        raise _BadLineError(f"{key} is empty", "delete the line")
    value[key] = [_message(message) for message in messages]
    for number, message in enumerate(value[key]):
        if _parsed_list(message, "tools") and (number > 0 or message["role"] != "system"):
            raise _BadLineError(
                "tools are not in the first system message", "put them there; elsewhere nobody reads them"
            )
    if value.get("tools"):
        raise _BadLineError(f"tools are beside {key}", "put them into the first message, a system one")
    roles = [message["role"] for message in value[key]]
    turns = [role for role in roles if role != "system"]
    if not turns:
        raise _BadLineError("only system messages", "add a user and an assistant message, or delete the line")
    if turns[0] != "user":
        raise _BadLineError(f"{turns[0]} speaks first", "begin with a user message (a system message may precede it)")
    if roles[-1] != "assistant":
        raise _BadLineError(f"ends with {roles[-1]}", "end with an assistant message: there is no answer to learn")
    return value


def _pair(value: dict[str, Any]) -> dict[str, Any]:
    value = _conversation(_conversation(value, "chosen"), "rejected")
    for ours, theirs in itertools.zip_longest(value["chosen"], value["rejected"]):
        if ours != theirs:
            if not (ours and theirs and ours["role"] == theirs["role"] == "assistant"):
                raise _BadLineError(
                    "chosen and rejected differ before the answer",
                    "a pair is two answers to one conversation: up to an assistant message both must be the same",
                )
            break
    return value


def _any_form(value: dict[str, Any]) -> dict[str, Any]:
    if "conversations" in value:
        return _conversation(value)
    return _pair(value) if "chosen" in value else _pretrain(value)


def _message(value: Any) -> dict[str, Any]:
    """One message, with every null field read as absent (and a null content beside tool calls as empty)."""
    if not isinstance(value, dict):
        raise _BadLineError("message is not an object", f'it is {_kind(value)}; write {{"role", "content"}}')
    message: dict[str, Any] = {
        key: item for key, item in value.items() if item is not None or key in ("role", "content")
    }
    role = message.get("role")
    if role not in _ROLES:
        raise _BadLineError("unknown role", f"{role!r} is not one of {', '.join(_ROLES)}; rename it")
    calls = _parsed_list(message, "tool_calls")
    if calls and role != "assistant":
        raise _BadLineError(f"{role} has tool_calls", "only an assistant calls tools; delete them")
    for call in calls:
        _require_call(call)
    if message.get("content") is None and calls:
        message["content"] = ""
    content = _string(message.get("content"), "content")
    reasoning = _string(message.get("reasoning_content", ""), "reasoning_content")
    # A system message may carry tools alone, and a tool may answer nothing.
    if role == "user" and not content.strip():
        raise _BadLineError("user content is empty", "write the question, or delete the line")
    if role == "assistant" and not (content.strip() or reasoning.strip() or calls):
        raise _BadLineError("assistant content is empty", "write the answer, or delete the line")
    if not all(isinstance(tool, dict) for tool in _parsed_list(message, "tools")):
        raise _BadLineError("a tool is not an object", 'write its description, such as {"name", "parameters"}')
    return message


def _parsed_list(message: dict[str, Any], key: str) -> list[Any]:
    """The list in a field that may hold it as JSON in a string; empty where there is none."""
    value = message.get(key, [])
    if isinstance(value, str):
        try:
            value = (json.loads(value) if value.strip() else None) or []
        except RecursionError as error:
            raise _BadLineError("nested too deeply", f"in {key}; flatten it") from error
        except ValueError as error:
            raise _BadLineError(f"{key} is a string that is not JSON", f"{error}; write a list") from error
        if _is_deep(value):
            raise _BadLineError("nested too deeply", f"more than {DEEPEST} levels in {key}; flatten it")
        if _SURROGATE_ESCAPE.search(message[key].encode("utf-8")) and not _is_text(value):
            raise _BadLineError("lone surrogate", f"in {key}; write both halves of a character or none")
    if not isinstance(value, list):
        remedy = f"it is {_kind(value)}; write a list, or its JSON as a string"
        raise _BadLineError(f"{key} is not a string or list", remedy)
    return value


def _require_call(call: Any) -> None:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _BadLineError("a tool call has no name", 'write {"name": "...", "arguments": {...}}')
    if not isinstance(function.get("arguments", {}), dict | str | None):
        raise _BadLineError("the arguments of a tool call are no object", "write an object, or its JSON as a string")


def _is_text(value: Any) -> bool:
    """Whether every string in it can be written as UTF-8."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _string(value: Any, name: str) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        raise _BadLineError(f"{name} is null", f"write a string in {name}")
    raise _BadLineError(f"{name} is not a string", f"it is {_kind(value)}; put it in quotes")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")


def _keys(value: dict[str, Any]) -> str:
    return ", ".join(sorted(value)[:5]) or "no field at all"
