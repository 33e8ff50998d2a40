"""Build a token cache: tokenize a pretraining corpus once, in memory that does not grow with it.

Records are read one by one, deduplicated by digest, tokenized in chunks on all cores and appended to the files of
`cache_format`. The directory gets its name by a rename when it is complete; a killed build leaves a hidden directory
that is never opened and that the next build removes.
"""

import fcntl
import hashlib
import json
import os
import secrets
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from minigpt_jax.data.cache_format import (
    DOCUMENTS,
    ENTRY,
    FORMAT,
    FORMAT_VERSION,
    META,
    TOKENS,
    CacheReport,
    TokenCache,
    Tokenizer,
    is_token_cache,
    open_token_cache,
    read_meta,
    split_documents,
)
from minigpt_jax.data.dedupe import SeenTexts, text_digest
from minigpt_jax.data.records import ReadReport, Record, expand_paths, read_records
from minigpt_jax.errors import UserError

__all__ = [
    "CacheReport",
    "TokenCache",
    "build_token_cache",
    "is_token_cache",
    "open_token_cache",
    "split_documents",
    "write_token_cache",
]

_BUILDING = ".building-"
_CHUNK_BYTES = 1 << 20

OnProgress = Callable[[int, int], None]
"""Called with (bytes of the sources consumed, bytes in all)."""


def build_token_cache(
    inputs: Sequence[str | Path],
    tokenizer: Tokenizer,
    *,
    cache_root: Path,
    skip_bad_lines: bool = False,
    on_progress: OnProgress | None = None,
) -> TokenCache:
    """The cache of `inputs` below `cache_root`, made when it is not there yet.

    Its directory is named by the tokenizer, the content of every source file and the options, so a changed source is
    another cache and an unchanged one is only opened.

    Raises:
        UserError: bad input (see `read_records`), or the cache cannot be written.
    """
    sources = [_Source.of(path) for path in expand_paths(inputs)]
    directory = cache_root / _key(sources, tokenizer, skip_bad_lines=skip_bad_lines)
    if not directory.exists():
        _build(sources, tokenizer, directory, skip_bad_lines=skip_bad_lines, on_progress=on_progress)
    cache = open_token_cache(directory)
    # The same content may lie elsewhere than when the cache was made: name the files that were given now.
    cache.sources = [str(source.path) for source in sources]
    return cache


def write_token_cache(
    inputs: Sequence[str | Path],
    tokenizer: Tokenizer,
    *,
    directory: Path,
    skip_bad_lines: bool = False,
    on_progress: OnProgress | None = None,
) -> TokenCache:
    """As `build_token_cache`, with the cache's directory named by the caller.

    Raises:
        UserError: also when `directory` holds anything but the very same cache.
    """
    sources = [_Source.of(path) for path in expand_paths(inputs)]
    key = _key(sources, tokenizer, skip_bad_lines=skip_bad_lines)
    if is_token_cache(directory):
        if read_meta(directory)["key"] != key:
            raise UserError(f"{directory} holds a cache of other data; delete it or choose another directory")
    elif directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"{directory} exists and is not a token cache; choose another directory")
    else:
        _build(sources, tokenizer, directory, skip_bad_lines=skip_bad_lines, on_progress=on_progress)
    return open_token_cache(directory)


@dataclass(frozen=True)
class _Source:
    path: Path
    sha256: str
    size: int
    modified: int

    @classmethod
    def of(cls, path: Path) -> "_Source":
        try:
            with open(path, "rb") as file:
                status = os.fstat(file.fileno())
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
        return cls(path, digest, status.st_size, status.st_mtime_ns)

    def require_unchanged(self) -> None:
        status = self.path.stat()
        if (status.st_size, status.st_mtime_ns) != (self.size, self.modified):
            raise UserError(f"{self.path} changed while it was read; run again when nothing writes to it")


def _key(sources: Sequence[_Source], tokenizer: Tokenizer, *, skip_bad_lines: bool) -> str:
    made_from = {
        "version": FORMAT_VERSION,
        "tokenizer": tokenizer.sha256,
        "sources": [source.sha256 for source in sources],
        "skip_bad_lines": skip_bad_lines,
    }
    return hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:32]


def _build(
    sources: Sequence[_Source],
    tokenizer: Tokenizer,
    directory: Path,
    *,
    skip_bad_lines: bool,
    on_progress: OnProgress | None,
) -> None:
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _temporary_directory(directory.parent) as temporary:
            dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
            report = _write(temporary, sources, tokenizer, dtype, skip_bad_lines=skip_bad_lines, progress=on_progress)
            meta = {
                "format": FORMAT,
                "version": FORMAT_VERSION,
                "key": _key(sources, tokenizer, skip_bad_lines=skip_bad_lines),
                "tokenizer_sha256": tokenizer.sha256,
                "vocab_size": tokenizer.vocab_size,
                "dtype": dtype.str,
                "sources": [str(source.path.resolve()) for source in sources],
                "report": asdict(report),
            }
            with open(temporary / META, "x", encoding="utf-8") as file:
                json.dump(meta, file, indent=1, ensure_ascii=False)
                _flush_to_disk(file)
            _rename(temporary, directory)
    except (OSError, sqlite3.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            f"cannot write the token cache {directory}: {reason}; free space or choose another place"
        ) from error


def _write(
    temporary: Path,
    sources: Sequence[_Source],
    tokenizer: Tokenizer,
    dtype: np.dtype[Any],
    *,
    skip_bad_lines: bool,
    progress: OnProgress | None,
) -> CacheReport:
    read = ReadReport()
    records = read_records(
        [source.path for source in sources], stage="pretrain", skip_bad_lines=skip_bad_lines, report=read
    )
    source_number = {source.path: number for number, source in enumerate(sources)}
    total = sum(source.size for source in sources)
    documents, tokens, text_bytes = 0, 0, 0
    with (
        open(temporary / TOKENS, "xb") as token_file,
        open(temporary / DOCUMENTS, "xb") as entry_file,
        SeenTexts(temporary / "seen.sqlite") as seen,
    ):
        for chunk in _chunks(records, seen):
            ids = _with_marks(tokenizer, [text.record.value["text"] for text in chunk])
            entries = np.zeros(len(chunk), ENTRY)
            entries["length"] = [len(document) for document in ids]
            entries["start"] = tokens + np.cumsum(entries["length"], dtype=np.int64) - entries["length"]
            entries["digest"] = [int.from_bytes(text.digest[:8], "little") for text in chunk]
            entries["text_bytes"] = [text.num_bytes for text in chunk]
            entries["source"] = [source_number[text.record.path] for text in chunk]
            entries["line"] = [text.record.line for text in chunk]
            _append(token_file, np.concatenate(ids).astype(dtype))
            _append(entry_file, entries)
            documents += len(chunk)
            tokens += int(entries["length"].sum(dtype=np.int64))
            text_bytes += int(entries["text_bytes"].sum(dtype=np.int64))
            if progress:
                progress(read.source_bytes, total)
        _flush_to_disk(token_file)
        _flush_to_disk(entry_file)
    (temporary / "seen.sqlite").unlink()
    for source in sources:
        source.require_unchanged()
    return CacheReport(
        records=read.records,
        duplicates=read.records - documents,
        skipped=dict(read.skipped),
        examples=read.examples,
        documents=documents,
        tokens=tokens,
        text_bytes=text_bytes,
    )


def _with_marks(tokenizer: Tokenizer, texts: list[str]) -> list[NDArray[np.int64]]:
    """The ids of each text between the two marks; no id outside the vocabulary gets past here."""
    marked = [
        np.concatenate([[tokenizer.bos_id], ids, [tokenizer.eos_id]]).astype(np.int64)
        for ids in tokenizer.encode_batch(texts)
    ]
    largest = max(int(ids.max()) for ids in marked)
    if largest >= tokenizer.vocab_size:
        raise UserError(
            f"the tokenizer gave id {largest}, but says that its vocabulary has {tokenizer.vocab_size} entries; "
            "repair its tokenizer.json"
        )
    return marked


def _append(file: IO[bytes], values: NDArray[Any]) -> None:
    file.write(values.tobytes())


def _flush_to_disk(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())


# --- Chunks ---


@dataclass(frozen=True)
class _Text:
    record: Record
    digest: bytes
    num_bytes: int


def _chunks(records: Iterator[Record], seen: SeenTexts) -> Iterator[list[_Text]]:
    """The texts that are new, in lists of about a mebibyte."""
    chunk: list[_Text] = []
    size = 0
    for record in records:
        encoded = record.value["text"].encode("utf-8")
        digest = text_digest(encoded)
        if seen.add(digest):
            chunk.append(_Text(record, digest, len(encoded)))
            size += len(encoded)
        if size >= _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


# --- Directories ---


@contextmanager
def _temporary_directory(parent: Path) -> Iterator[Path]:
    """A hidden directory in `parent`, locked while this process lives, gone afterwards unless it was renamed."""
    _remove_abandoned(parent)
    temporary = parent / (_BUILDING + secrets.token_hex(8))
    temporary.mkdir()
    try:
        with open(temporary / "lock", "xb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _remove_abandoned(parent: Path) -> None:
    """Remove what killed builds left: directories whose lock nobody holds, once older than a minute.

    The minute covers the moment between a build's making its directory and locking it.
    """
    for directory in parent.glob(_BUILDING + "*"):
        try:
            with open(directory / "lock", "rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - directory.stat().st_mtime > 60:
                    shutil.rmtree(directory, ignore_errors=True)
        except OSError:  # locked, or being made, or just removed by another process
            continue


def _rename(temporary: Path, directory: Path) -> None:
    (temporary / "lock").unlink()
    try:
        temporary.rename(directory)
    except OSError:
        # Another process was faster with the same cache; its directory cannot be replaced and need not be.
        if not is_token_cache(directory):
            raise
