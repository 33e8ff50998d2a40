"""From a training configuration to the micro-batches of its run: which files, which cache, which documents.

Framework-free.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from minigpt_jax.config import TrainConfig
from minigpt_jax.data import sample
from minigpt_jax.data.batching import BatchSource, evaluation_batches
from minigpt_jax.data.cache import OnProgress, build_token_cache
from minigpt_jax.data.cache_format import CacheReport, TokenCache, is_token_cache, open_token_cache, split_documents
from minigpt_jax.errors import UserError
from minigpt_jax.tokenizer import Tokenizer

VALIDATION_DOCUMENTS = 200
"""A validation reads this many documents at most, the first ones."""

QUESTIONS = 104
"""Held-out questions that a model trained on the sample is asked: four of each kind in each language."""


IntArray = NDArray[np.integer]


@dataclass(frozen=True)
class Corpus:
    """The data of one run."""

    training: BatchSource
    validation: BatchSource | None
    """None when a single document leaves nothing to hold out."""
    training_key: str
    """Hash of the training documents and how they were tokenized; a resumed run needs the same."""
    validation_documents: int
    overlap: int
    """Validation documents whose text is in the training data as well."""
    left_out: str
    """What of the training files was not used, in words; empty when everything was."""
    questions: tuple[sample.Question, ...]
    """Questions on the sample corpus that no training text contains; empty on other data."""


def cache_directory() -> Path:
    """$XDG_CACHE_HOME/minigpt, or ~/.cache/minigpt."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minigpt"


def load_corpus(
    config: TrainConfig, tokenizer: Tokenizer, *, model_vocab_size: int, on_progress: OnProgress | None = None
) -> Corpus:
    """Read, tokenize (once; later runs reuse the cache) and plan the data of a pretraining run.

    Args:
        config: resolved.
        tokenizer: for text that is not tokenized yet; a prepared cache must have been made with it.
        model_vocab_size: rows of the model's embedding.
        on_progress: told how far tokenizing is.

    Raises:
        UserError: a file is missing or has a bad record, the vocabulary is too large for the model, or there is
            nothing to learn from.
    """
    if tokenizer.vocab_size > model_vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} entries but the model's vocabulary only {model_vocab_size}; "
            "choose a tokenizer that fits the model"
        )
    files = None if config.data else _sample_files(config.seed)
    training_paths = config.data if files is None else (str(files["pretrain"]),)
    validation_paths = config.val_data if files is None or config.val_data else (str(files["pretrain_val"]),)

    def tokenized(paths: Sequence[str]) -> TokenCache:
        if len(paths) > 1 and any(is_token_cache(Path(path)) for path in paths):
            raise UserError("a prepared cache is given alone: prepare all the data into one")
        if len(paths) == 1 and is_token_cache(Path(paths[0])):
            cache = open_token_cache(Path(paths[0]))
            cache.require_tokenizer(tokenizer)
            return cache
        return build_token_cache(
            paths,
            tokenizer,
            cache_root=cache_directory() / "tokens",
            skip_bad_lines=config.skip_bad_lines,
            on_progress=on_progress,
        )

    training = tokenized(training_paths)
    if validation_paths:
        training_documents, held_out = np.arange(training.num_documents), tokenized(validation_paths)
        validation_documents = np.arange(held_out.num_documents)
    else:
        held_out = training
        training_documents, validation_documents = split_documents(training)
    assert config.batch_size is not None
    rows, time = config.batch_size, config.max_seq_len
    # With a number of updates the data is repeated for as long as it takes to make them.
    endless = sys.maxsize // 2
    source = BatchSource(
        training,
        training_documents,
        batching=config.batching,
        batch_size=rows,
        max_seq_len=time,
        seed=config.seed + (config.stage_number << 32),
        num_epochs=config.epochs,
        num_batches=endless if config.epochs is None else None,
    )
    validation = None
    if len(validation_documents) > 0:
        documents = validation_documents[:VALIDATION_DOCUMENTS]
        validation = evaluation_batches(held_out, documents, batch_size=rows, max_seq_len=time)
    questions = tuple(sample.heldout_questions(count=QUESTIONS)) if files is not None else ()
    return Corpus(
        source,
        validation,
        training.key,
        min(len(validation_documents), VALIDATION_DOCUMENTS),
        _overlap(training, training_documents, held_out, validation_documents[:VALIDATION_DOCUMENTS]),
        _left_out(training.report),
        questions,
    )


def _overlap(
    training: TokenCache, training_documents: IntArray, held_out: TokenCache, validation_documents: IntArray
) -> int:
    met = np.isin(held_out.digests[validation_documents], training.digests[training_documents])
    return int(np.count_nonzero(met))


def _left_out(report: CacheReport) -> str:
    parts = [f"{report.duplicates} duplicates"] if report.duplicates else []
    for reason, count in report.skipped.items():
        parts.append(f"{count} lines ({reason}; first at {report.examples[reason]})")
    return ", ".join(parts)


def _sample_files(seed: int) -> dict[str, Path]:
    directory = cache_directory() / "sample" / f"seed-{seed}"
    try:
        return sample.write_sample(directory, seed=seed)
    except OSError as error:
        reason = f"cannot write the sample corpus to {directory}: {error.strerror}"
        raise UserError(f"{reason}; XDG_CACHE_HOME names another place") from error
