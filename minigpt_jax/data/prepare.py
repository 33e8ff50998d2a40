"""Prepare a data set before training: validate, clean, dedupe, tokenize, and say what was found.

Framework-free.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, get_args

from minigpt_jax.config import Batching
from minigpt_jax.data.cache import OnProgress, write_token_cache
from minigpt_jax.data.chat import ChatEncoder, EncodedChat
from minigpt_jax.data.dedupe import SeenTexts, text_digest
from minigpt_jax.data.packing import count_pieces, real_fraction
from minigpt_jax.data.records import ReadReport, Record, expand_paths, read_records
from minigpt_jax.errors import UserError
from minigpt_jax.tokenizer import Tokenizer

ROW_LENGTH = 512
"""Row length for which the real-token fractions are given."""


def prepare_texts(
    inputs: Sequence[str | Path],
    tokenizer: Tokenizer,
    *,
    out: Path,
    skip_bad_lines: bool = False,
    on_progress: OnProgress | None = None,
) -> dict[str, Any]:
    """Make the token cache `out` of pretraining texts and give its figures.

    Raises:
        UserError: as `write_token_cache`.
    """
    cache = write_token_cache(inputs, tokenizer, directory=out, skip_bad_lines=skip_bad_lines, on_progress=on_progress)
    figures = asdict(cache.report)
    figures["bytes_per_token"] = cache.report.text_bytes / cache.num_tokens
    counts = count_pieces(cache.lengths, ROW_LENGTH)
    figures["real_fraction"] = {batching: real_fraction(counts, batching) for batching in get_args(Batching)}
    return figures


def check_conversations(
    inputs: Sequence[str | Path],
    tokenizer: Tokenizer,
    *,
    stage: Literal["sft", "dpo"],
    skip_bad_lines: bool = False,
    on_progress: OnProgress | None = None,
) -> dict[str, Any]:
    """Validate and encode conversations or preference pairs, find exact duplicates, and give the figures.

    Nothing is written: a stage encodes its conversations when it trains.

    Raises:
        UserError: as `read_records`.
    """
    paths = expand_paths(inputs)
    total = sum(path.stat().st_size for path in paths)
    read = ReadReport()
    documents, text_bytes, tokens, supervised = 0, 0, 0, 0
    encoder = ChatEncoder(tokenizer)
    with SeenTexts() as seen:
        for record in read_records(paths, stage=stage, skip_bad_lines=skip_bad_lines, report=read):
            encoded = json.dumps(record.value, sort_keys=True, ensure_ascii=False).encode("utf-8")
            if seen.add(text_digest(encoded)):
                documents += 1
                text_bytes += _content_bytes(record.value)
                for conversation in _conversations(record.value):
                    chat = _encoded(encoder, conversation, record)
                    tokens += len(chat.ids)
                    supervised += int(chat.supervised.sum())
            if on_progress and read.records % 1000 == 0:
                on_progress(read.source_bytes, total)
    if on_progress:
        on_progress(total, total)
    return {
        "records": read.records,
        "duplicates": read.records - documents,
        "skipped": dict(read.skipped),
        "examples": read.examples,
        "documents": documents,
        "text_bytes": text_bytes,
        "tokens": tokens,
        "bytes_per_token": text_bytes / max(tokens, 1),
        "supervised_tokens": supervised,
    }


def _conversations(value: dict[str, Any]) -> list[list[dict[str, Any]]]:
    return [value[name] for name in ("conversations", "chosen", "rejected") if name in value]


def _content_bytes(value: dict[str, Any]) -> int:
    return sum(len(message["content"].encode("utf-8")) for chat in _conversations(value) for message in chat)


def _encoded(encoder: ChatEncoder, messages: list[dict[str, Any]], record: Record) -> EncodedChat:
    try:
        return encoder.encode(messages)
    except UserError as error:
        raise UserError(f"{record.path}:{record.line}: {error}") from error
