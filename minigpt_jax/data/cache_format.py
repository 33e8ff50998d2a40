"""The token cache on disk, and its reader.

A cache is a directory of three files or four. `tokens.bin` holds the ids of all documents one after another, as uint16
where the vocabulary fits, else uint32: `<|im_start|>` text `<|im_end|>`, or a conversation by the chat template.
`documents.bin` holds one 32-byte entry a document. `supervised.bin`, where there are conversations, holds one byte a
token: 1 where it is learned. `cache.json` says what the cache was made from. The arrays are mapped, never loaded.
"""

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from minigpt_jax.errors import UserError
from minigpt_jax.files import read_json_object

FORMAT = "minigpt token cache"
FORMAT_VERSION = 1
META, TOKENS, DOCUMENTS, SUPERVISED = "cache.json", "tokens.bin", "documents.bin", "supervised.bin"
_DOCUMENTS_AT_A_TIME = 4096
ENTRY = np.dtype(
    [
        ("start", "<i8"),  # first token in tokens.bin
        ("digest", "<u8"),  # first half of the record's digest
        ("length", "<i4"),  # tokens, marks included
        ("text_bytes", "<i4"),  # UTF-8 length of the text, or of the messages' contents
        ("source", "<i4"),  # index into the sources of cache.json
        ("line", "<i4"),  # from 1
    ]
)


class Tokenizer(Protocol):
    """What the cache needs of `minigpt_jax.tokenizer.Tokenizer`."""

    @property
    def vocab_size(self) -> int: ...  # noqa: D102
    @property
    def bos_id(self) -> int: ...  # noqa: D102
    @property
    def eos_id(self) -> int: ...  # noqa: D102
    @property
    def sha256(self) -> str: ...  # noqa: D102
    def encode_batch(self, texts: list[str], /) -> Sequence[NDArray[np.integer[Any]]]: ...  # noqa: D102


@dataclass(frozen=True)
class CacheReport:
    """What became of the lines that a cache was made from."""

    records: int
    """Valid records."""
    duplicates: int
    """Records that had been met before; left out."""
    skipped: dict[str, int]
    """Lines left out, by reason."""
    examples: dict[str, str]
    """Where each reason was met first, as FILE:LINE."""
    documents: int
    """Documents in the cache; a preference pair is two."""
    tokens: int
    """Tokens in the cache, the marks included."""
    text_bytes: int
    """UTF-8 bytes of the documents' text, or of their messages' contents."""


class TokenCache:
    """An open cache. The arrays are read-only views of mapped files.

    Attributes:
        directory: where it lies.
        key: hash of the tokenizer, the content of the source files and the options that it was made with.
        tokens: uint16 or uint32, every document's ids one after another.
        supervised: uint8, 1 where a token is learned; None where every prediction is.
        encoding: what decided ids and masks besides the tokenizer; empty for plain text.
        tokenizer_sha256: identity of the tokenizer that made the ids.
        vocab_size: of that tokenizer; every id is below it.
        report: what became of the source lines.
        sources: the files that its documents were read from.
    """

    def __init__(self, directory: Path, meta: dict[str, Any]):
        self.directory = directory
        self.key: str = meta["key"]
        self.tokenizer_sha256: str = meta["tokenizer_sha256"]
        self.vocab_size: int = meta["vocab_size"]
        self.report = CacheReport(**meta["report"])
        self.sources: list[str] = meta["sources"]
        self.encoding: dict[str, str] = meta.get("encoding", {})
        self._source_is_text = np.array(meta.get("source_is_text", [True] * len(self.sources)))
        self._map, self.tokens = _map(directory / TOKENS, np.dtype(meta["dtype"]), self.report.tokens)
        _, self._entries = _map(directory / DOCUMENTS, ENTRY, self.report.documents)
        self.supervised: NDArray[np.uint8] | None = None
        if self.encoding:
            _, self.supervised = _map(directory / SUPERVISED, np.dtype(np.uint8), self.report.tokens)

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return self.report.documents

    @property
    def num_tokens(self) -> int:
        """Number of tokens, marks included."""
        return self.report.tokens

    @property
    def starts(self) -> NDArray[np.int64]:
        """Where each document begins in `tokens`."""
        return self._entries["start"]

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of each document, marks included."""
        return self._entries["length"]

    @property
    def text_bytes(self) -> NDArray[np.int32]:
        """UTF-8 bytes of each document's text, or of its messages' contents."""
        return self._entries["text_bytes"]

    @property
    def is_text(self) -> NDArray[np.bool_]:
        """Whether each document is pretraining text, every prediction of which is learned."""
        return self._source_is_text[self._entries["source"]]

    def supervised_counts(self, most_tokens: int) -> NDArray[np.int64]:
        """Learned tokens among the first `most_tokens` of each document; a document's first token never counts."""
        if self.supervised is None:
            return np.minimum(self.lengths.astype(np.int64), most_tokens) - 1
        counts = np.empty(self.num_documents, np.int64)
        for begin in range(0, self.num_documents, _DOCUMENTS_AT_A_TIME):
            chunk = slice(begin, begin + _DOCUMENTS_AT_A_TIME)
            starts, lengths = self.starts[chunk], self.lengths[chunk].astype(np.int64)
            mask = self.supervised[starts[0] : starts[-1] + lengths[-1]]
            before = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])  # learned tokens before each place
            first = starts - starts[0]
            counts[chunk] = before[first + np.minimum(lengths, most_tokens)] - before[first + 1]
        return counts

    @property
    def digests(self) -> NDArray[np.uint64]:
        """Eight bytes of the digest of each document's record."""
        return self._entries["digest"]

    def record_id(self, document: int) -> str:
        """Where the document was read, as FILE:LINE."""
        entry = self._entries[document]
        return f"{self.sources[entry['source']]}:{entry['line']}"

    def require_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Refuse a tokenizer other than the one that made the ids.

        Raises:
            UserError: it is another.
        """
        if tokenizer.sha256 != self.tokenizer_sha256:
            raise UserError(
                f"{self.directory} was made with another tokenizer ({self.tokenizer_sha256[:12]}, not "
                f"{tokenizer.sha256[:12]}); pass that one with --tokenizer, or prepare the data again"
            )

    @property
    def holds_pairs(self) -> bool:
        """Whether its documents are the two sides of preference pairs, the chosen one before the rejected one."""
        return self.encoding.get("stage") == "dpo"

    def require_encoding(self, options: dict[str, str]) -> None:
        """Refuse a cache that was made for another stage or mask.

        Raises:
            UserError: it was.
        """
        if self.encoding != options:
            made, wanted = (", ".join(has.values()) or "pretrain" for has in (self.encoding, options))
            raise UserError(
                f"{self.directory} was prepared for another stage or mask ({made}, not {wanted}); give --stage and "
                "--chat-mask as they were then, or prepare the data again with scripts/prepare_data.py"
            )

    def release(self) -> None:
        """Let go of the pages that reads have mapped, so that a long run's resident memory stays small."""
        self._map.madvise(mmap.MADV_DONTNEED)


# --- Open ---


def is_token_cache(directory: Path) -> bool:
    """Whether `directory` is meant to be a token cache; `open_token_cache` says whether it is whole."""
    try:
        return (directory / META).is_file()
    except OSError:  # a name that is too long, say
        return False


def open_token_cache(directory: Path) -> TokenCache:
    """Map the cache in `directory`.

    Raises:
        UserError: it is not a cache, was cut or damaged, or has a version that this program does not read.
    """
    if not is_token_cache(directory):
        raise UserError(f"{directory} is not a token cache (no {META}); make one with scripts/prepare_data.py")
    meta = read_meta(directory)
    try:
        return TokenCache(directory, meta)
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise UserError(f"{directory} is damaged ({error}); delete it and prepare the data again") from error


def read_meta(directory: Path) -> dict[str, Any]:
    """The fields of cache.json, of a format and version that this program reads."""
    meta = read_json_object(directory / META)
    if meta.get("format") != FORMAT or meta.get("version") != FORMAT_VERSION:
        raise UserError(
            f"{directory} is not a token cache of version {FORMAT_VERSION}; make one with scripts/prepare_data.py"
        )
    return meta


def _map(path: Path, dtype: np.dtype[Any], count: int) -> tuple[mmap.mmap, NDArray[Any]]:
    expected = dtype.itemsize * count
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size != expected or not count:
            raise ValueError(f"{path.name} has {size} bytes, not {expected}")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return mapped, np.frombuffer(mapped, dtype)


# --- Held-out split ---


def split_documents(
    cache: TokenCache, documents: NDArray[np.int64] | None = None, *, val_fraction: float = 0.01
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(training, validation) numbers of `documents`, all when None; its content alone decides where a document falls.

    With two documents or more both sides have at least one; a single document is trained on and nothing is validated.
    """
    documents = np.arange(cache.num_documents) if documents is None else documents
    digests = np.array(cache.digests[documents])
    held_out = digests < np.uint64(min(int(val_fraction * 2.0**64), 2**64 - 1))
    if len(digests) > 1:
        held_out[digests.argmin()] = True
        held_out[digests.argmax()] = False
    return documents[~held_out], documents[held_out]
