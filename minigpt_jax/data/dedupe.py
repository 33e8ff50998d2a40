"""Exact duplicates, found in memory that does not grow with the number of texts."""

import hashlib
import sqlite3
from pathlib import Path


def text_digest(encoded: bytes) -> bytes:
    """The 16 bytes by which two texts are held to be the same."""
    return hashlib.blake2b(encoded, digest_size=16).digest()


class SeenTexts:
    """The set of digests met so far, in a database on disk with a bounded page cache.

    Args:
        path: a file that does not exist yet; a private temporary one when empty.
    """

    def __init__(self, path: str | Path = ""):
        self._database = sqlite3.connect(path, isolation_level=None)
        # Nothing here outlives the build, so it needs no journal and no waiting for the disk.
        for pragma in ("journal_mode=OFF", "synchronous=OFF", "locking_mode=EXCLUSIVE", "cache_size=-16384"):
            self._database.execute(f"PRAGMA {pragma}")
        self._database.execute("CREATE TABLE seen (digest BLOB PRIMARY KEY) WITHOUT ROWID")
        self._database.execute("BEGIN")

    def add(self, digest: bytes) -> bool:
        """Whether the digest is new."""
        return self._database.execute("INSERT OR IGNORE INTO seen VALUES (?)", (digest,)).rowcount == 1

    def __enter__(self) -> "SeenTexts":
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()
