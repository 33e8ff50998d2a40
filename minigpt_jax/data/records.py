"""Training records: JSONL files in, validated records out, one line at a time.

Choices: a line ends at a newline byte only (CRLF is accepted; U+2028 inside a text is text); a byte order mark at
the start of a file is dropped, anywhere else it is a fault. A line that cannot be trained on (record_forms.py) is an
error that names file and line, or is skipped and counted by reason.
"""

import gzip
import importlib
import io
import os
import stat
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from minigpt_jax.data.record_forms import BadLineError, any_form, conversation, pair, parse_line, pretraining_text
from minigpt_jax.errors import UserError, missing_extra

RecordStage = Literal["pretrain", "sft", "dpo"]

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


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


# --- Files ---


def expand_paths(inputs: Sequence[str | Path], *, suffixes: tuple[str, ...] = SUFFIXES) -> list[Path]:
    """The files that `inputs` name: files as they are, directories as every file below them of a suffix, sorted.

    Raises:
        UserError: an input does not exist or cannot be read, or a directory holds no such file.
    """
    found: list[Path] = []
    for path in map(Path, inputs):
        try:
            directory = stat.S_ISDIR(path.stat().st_mode)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}; check the path") from error
        below = sorted(_walk(path, suffixes)) if directory else [path]
        if not below:
            raise UserError(f"{path} holds no {', '.join(suffixes)} file; name a file or another directory")
        found += below
    if not found:
        raise UserError("no input was named; give a JSONL file or a directory of them")
    return list(dict.fromkeys(found))


def _walk(directory: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise UserError(f"cannot read {error.filename}: {error.strerror}") from error

    for parent, _, names in os.walk(directory, onerror=refuse):
        for name in names:
            if name.lower().endswith(suffixes):
                yield Path(parent) / name


def is_compressed(path: Path) -> bool:
    """Whether a file's name says that it is an archive."""
    return path.suffix.lower() in (".gz", ".zst")


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
    if path.suffix.lower() == ".gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=raw)), (EOFError, zlib.error, gzip.BadGzipFile)
    if path.suffix.lower() == ".zst":
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
    validate = {"pretrain": pretraining_text, "sft": conversation, "dpo": pair}[stage]
    return read_validated(paths, validate, skip_bad_lines=skip_bad_lines, report=report)


def iter_texts(paths: Sequence[Path]) -> Iterator[str]:
    """Every text that a tokenizer may learn from, of records of any stage: texts, contents, reasonings.

    Raises:
        UserError: as `read_validated`.
    """
    for record in read_validated(paths, any_form):
        yield from texts_of(record)


def texts_of(record: Record) -> Iterator[str]:
    """Every text in a record of any stage: texts, contents, reasonings."""
    if "text" in record.value:
        yield record.value["text"]
    for key in ("conversations", "chosen", "rejected"):
        for message in record.value.get(key, ()):
            yield from (message[part] for part in ("reasoning_content", "content") if message.get(part))


def read_validated(
    paths: Sequence[Path],
    validate: Callable[[dict[str, Any]], dict[str, Any]],
    *,
    skip_bad_lines: bool | None = None,
    report: ReadReport | None = None,
) -> Iterator[Record]:
    """The records of `paths` that `validate` lets through, as `read_records` gives those of a stage.

    Args:
        paths: files, as `expand_paths` gives them.
        validate: JSON object -> what `Record.value` holds; raises BadLineError.
        skip_bad_lines: as for `read_records`; None where the command has no such option to recommend.
        report: counts are added to it when given.

    Raises:
        UserError: as `read_records`.
    """
    report = report or ReadReport()
    for path in paths:
        number = 0
        for number, line in _lines(path, report):
            try:
                value = validate(parse_line(line))
            except BadLineError as fault:
                if not skip_bad_lines:
                    otherwise = "" if skip_bad_lines is None else ", or pass --skip-bad-lines"
                    raise UserError(f"{path}:{number}: {fault.reason}; {fault.remedy}{otherwise}") from fault
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
