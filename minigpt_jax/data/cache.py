"""Build a token cache: tokenize a corpus once, in memory that does not grow with it.

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
from contextlib import ExitStack, contextmanager
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
    SUPERVISED,
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
from minigpt_jax.data.documents import Encoding, TextEncoding
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
    encoding: Encoding | None = None,
    texts: Sequence[str | Path] = (),
    skip_bad_lines: bool = False,
    on_progress: OnProgress | None = None,
) -> TokenCache:
    """The cache of `inputs` below `cache_root`, made when it is not there yet.

    Its directory is named by the tokenizer, the content of every source file and the options, so a changed source is
    another cache and an unchanged one is only opened.

    Args:
        inputs: files of records, or directories of them.
        tokenizer: makes the ids.
        cache_root: where caches lie.
        encoding: the form of the records and what becomes of them; pretraining text when None.
        texts: files of pretraining text that stand in the same cache, behind the records.
        skip_bad_lines: leave bad lines out and count them.
        on_progress: told how far it is.

    Raises:
        UserError: bad input (see `read_records`), or the cache cannot be written.
    """
    build = _Build.of(inputs, tokenizer, encoding=encoding, texts=texts, skip_bad_lines=skip_bad_lines)
    directory = cache_root / build.key
    if not directory.exists():
        build.write(directory, on_progress=on_progress)
    cache = open_token_cache(directory)
    # The same content may lie elsewhere than when the cache was made: name the files that were given now.
    cache.sources = [str(source.path) for source in build.sources]
    return cache


def write_token_cache(
    inputs: Sequence[str | Path],
    tokenizer: Tokenizer,
    *,
    directory: Path,
    encoding: Encoding | None = None,
    skip_bad_lines: bool = False,
    on_progress: OnProgress | None = None,
) -> TokenCache:
    """As `build_token_cache`, with the cache's directory named by the caller.

    Raises:
        UserError: also when `directory` holds anything but the very same cache.
    """
    build = _Build.of(inputs, tokenizer, encoding=encoding, texts=(), skip_bad_lines=skip_bad_lines)
    if is_token_cache(directory):
        if read_meta(directory)["key"] != build.key:
            raise UserError(f"{directory} holds a cache of other data; delete it or choose another directory")
    elif directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"{directory} exists and is not a token cache; choose another directory")
    else:
        build.write(directory, on_progress=on_progress)
    return open_token_cache(directory)


@dataclass(frozen=True)
class _Source:
    path: Path
    encoding: Encoding
    sha256: str
    size: int
    modified: int

    @classmethod
    def of(cls, path: Path, encoding: Encoding) -> "_Source":
        try:
            with open(path, "rb") as file:
                status = os.fstat(file.fileno())
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
        return cls(path, encoding, digest, status.st_size, status.st_mtime_ns)

    def require_unchanged(self) -> None:
        status = self.path.stat()
        if (status.st_size, status.st_mtime_ns) != (self.size, self.modified):
            raise UserError(f"{self.path} changed while it was read; run again when nothing writes to it")


@dataclass(frozen=True)
class _Build:
    """One cache to be made."""

    sources: tuple[_Source, ...]
    tokenizer: Tokenizer
    encoding: Encoding
    skip_bad_lines: bool

    @classmethod
    def of(
        cls,
        inputs: Sequence[str | Path],
        tokenizer: Tokenizer,
        *,
        encoding: Encoding | None,
        texts: Sequence[str | Path],
        skip_bad_lines: bool,
    ) -> "_Build":
        text = TextEncoding(tokenizer)
        encoding = encoding or text
        sources = [_Source.of(path, encoding) for path in expand_paths(inputs)]
        if texts:
            sources += [_Source.of(path, text) for path in expand_paths(texts)]
        return cls(tuple(sources), tokenizer, encoding, skip_bad_lines)

    @property
    def key(self) -> str:
        made_from: dict[str, Any] = {
            "version": FORMAT_VERSION,
            "tokenizer": self.tokenizer.sha256,
            "sources": [source.sha256 for source in self.sources],
            "skip_bad_lines": self.skip_bad_lines,
        }
        if self.encoding.options:
            made_from |= {"encoding": self.encoding.options, "stages": [s.encoding.stage for s in self.sources]}
        return hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:32]

    def write(self, directory: Path, *, on_progress: OnProgress | None) -> None:
        """Make the cache, whole or not at all."""
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            with _temporary_directory(directory.parent) as temporary:
                dtype = np.dtype("<u2" if self.tokenizer.vocab_size <= 1 << 16 else "<u4")
                report = self._write_files(temporary, dtype, progress=on_progress)
                meta = {
                    "format": FORMAT,
                    "version": FORMAT_VERSION,
                    "key": self.key,
                    "tokenizer_sha256": self.tokenizer.sha256,
                    "vocab_size": self.tokenizer.vocab_size,
                    "dtype": dtype.str,
                    "sources": [str(source.path.resolve()) for source in self.sources],
                    "report": asdict(report),
                }
                if self.encoding.options:
                    is_text = [source.encoding.stage == "pretrain" for source in self.sources]
                    meta |= {"encoding": self.encoding.options, "source_is_text": is_text}
                with open(temporary / META, "x", encoding="utf-8") as file:
                    json.dump(meta, file, indent=1, ensure_ascii=False)
                    _flush_to_disk(file)
                _rename(temporary, directory)
        except (OSError, sqlite3.Error) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UserError(
                f"cannot write the token cache {directory}: {reason}; free space or choose another place"
            ) from error

    def _write_files(self, temporary: Path, dtype: np.dtype[Any], *, progress: OnProgress | None) -> CacheReport:
        read = ReadReport()
        files = [TOKENS, DOCUMENTS, *([SUPERVISED] if self.encoding.options else [])]
        total = sum(source.size for source in self.sources)
        duplicates, documents, tokens, text_bytes = 0, 0, 0, 0
        with ExitStack() as stack:
            token_file, entry_file, *mask_file = (stack.enter_context(open(temporary / name, "xb")) for name in files)
            seen = stack.enter_context(SeenTexts(temporary / "seen.sqlite"))
            for encoding, chunk in self._chunks(read):
                new = [record for record in chunk if seen.add(record.digest)]
                duplicates += len(chunk) - len(new)
                if not new:
                    continue
                made = encoding.encode([text.record for text in new])
                flat = [(text, document) for text, group in zip(new, made, strict=True) for document in group]
                entries = np.zeros(len(flat), ENTRY)
                entries["length"] = [len(document.ids) for _, document in flat]
                entries["start"] = tokens + np.cumsum(entries["length"], dtype=np.int64) - entries["length"]
                entries["digest"] = [int.from_bytes(text.digest[:8], "little") for text, _ in flat]
                entries["text_bytes"] = [document.text_bytes for _, document in flat]
                entries["source"] = [text.source for text, _ in flat]
                entries["line"] = [text.record.line for text, _ in flat]
                _append(token_file, np.concatenate([document.ids for _, document in flat]).astype(dtype))
                _append(entry_file, entries)
                for file in mask_file:
                    _append(file, np.concatenate([document.supervised for _, document in flat]).astype(np.uint8))
                documents += len(flat)
                tokens += int(entries["length"].sum(dtype=np.int64))
                text_bytes += int(entries["text_bytes"].sum(dtype=np.int64))
                if progress:
                    progress(read.source_bytes, total)
            for file in (token_file, entry_file, *mask_file):
                _flush_to_disk(file)
        (temporary / "seen.sqlite").unlink()
        for source in self.sources:
            source.require_unchanged()
        return CacheReport(
            records=read.records,
            duplicates=duplicates,
            skipped=dict(read.skipped),
            examples=read.examples,
            documents=documents,
            tokens=tokens,
            text_bytes=text_bytes,
        )

    def _chunks(self, report: ReadReport) -> Iterator[tuple[Encoding, list["_Text"]]]:
        """Records of one encoding, in lists of about a mebibyte."""
        number = {source.path: index for index, source in enumerate(self.sources)}
        for encoding in dict.fromkeys(source.encoding for source in self.sources):
            paths = [source.path for source in self.sources if source.encoding is encoding]
            chunk: list[_Text] = []
            size = 0
            for record in read_records(paths, stage=encoding.stage, skip_bad_lines=self.skip_bad_lines, report=report):
                content = encoding.content(record.value)
                chunk.append(_Text(record, number[record.path], text_digest(content)))
                size += len(content)
                if size >= _CHUNK_BYTES:
                    yield encoding, chunk
                    chunk, size = [], 0
            if chunk:
                yield encoding, chunk


@dataclass(frozen=True)
class _Text:
    record: Record
    source: int
    digest: bytes


def _append(file: IO[bytes], values: NDArray[Any]) -> None:
    file.write(values.tobytes())


def _flush_to_disk(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())


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
