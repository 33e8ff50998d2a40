"""Prepare a data set before training: validate, clean, dedupe, tokenize, and say what was found.

Framework-free.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from minigpt_jax.config import Batching, ChatMask
from minigpt_jax.data.cache import OnProgress, write_token_cache
from minigpt_jax.data.documents import encoding_of
from minigpt_jax.data.packing import count_pieces, real_fraction
from minigpt_jax.data.records import RecordStage
from minigpt_jax.tokenizer import Tokenizer

ROW_LENGTH = 512
"""Row length for which the real-token fractions are given."""


def prepare_data(
    inputs: Sequence[str | Path],
    tokenizer: Tokenizer,
    *,
    stage: RecordStage,
    out: Path,
    chat_mask: ChatMask = "assistant",
    skip_bad_lines: bool = False,
    on_progress: OnProgress | None = None,
) -> dict[str, Any]:
    """Make the token cache `out` of one stage's records and give its figures.

    Raises:
        UserError: as `write_token_cache`.
    """
    cache = write_token_cache(
        inputs,
        tokenizer,
        directory=out,
        encoding=encoding_of(stage, tokenizer, chat_mask=chat_mask),
        skip_bad_lines=skip_bad_lines,
        on_progress=on_progress,
    )
    figures = asdict(cache.report)
    figures["bytes_per_token"] = cache.report.text_bytes / cache.num_tokens
    figures["real_fraction"] = _real_fractions(cache.lengths, stage)
    if stage != "pretrain":
        figures["longer_than_a_row"] = int(np.count_nonzero(cache.lengths > ROW_LENGTH + 1))
        figures["supervised_tokens"] = int(cache.supervised_counts(np.iinfo(np.int32).max).sum())
    if stage == "dpo":
        figures["pairs"] = cache.num_documents // 2
    return figures


def _real_fractions(lengths: NDArray[np.integer], stage: RecordStage) -> dict[Batching, float]:
    """By each batching that the stage has."""
    # Of a conversation longer than a row a row has the beginning; a text goes on in the next one.
    cut = lengths if stage == "pretrain" else np.minimum(lengths, ROW_LENGTH + 1)
    if stage != "dpo":
        counts = count_pieces(cut, ROW_LENGTH)
        return {batching: real_fraction(counts, batching) for batching in get_args(Batching)}
    # Both sides of a pair stand in rows as wide as the longer one asks for.
    wider = np.maximum(cut[::2], cut[1::2])
    counts = count_pieces(wider, ROW_LENGTH)
    real = float((cut - 1).sum() / (2 * (wider - 1).sum()))
    return {batching: real * real_fraction(counts, batching) for batching in ("bucketed", "padded")}
