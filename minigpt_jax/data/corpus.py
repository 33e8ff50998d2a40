"""From a training configuration to the micro-batches of its run: which files, which cache, which documents.

Framework-free.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from minigpt_jax.config import TrainConfig
from minigpt_jax.data import sample
from minigpt_jax.data.batching import BatchSource, evaluation_batches
from minigpt_jax.data.cache import OnProgress, build_token_cache
from minigpt_jax.data.cache_format import CacheReport, TokenCache, is_token_cache, open_token_cache, split_documents
from minigpt_jax.data.documents import encoding_of
from minigpt_jax.data.pairs import PairSource, evaluation_pairs, split_pairs, usable_pairs
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
    validation_key: str
    """Likewise of what the validation documents are among; empty when there is no validation."""
    validation_documents: int
    validation_bytes: int
    """UTF-8 bytes of the text that the validation predicts; 0 where it predicts none, as in dpo."""
    overlap: int
    """Validation documents whose text is in the training data as well."""
    left_out: str
    """What of the files was not used, in words; empty when everything was."""
    questions: tuple[sample.Question, ...]
    """Questions on the sample corpus that no training text contains; empty on other data."""


def cache_directory() -> Path:
    """$XDG_CACHE_HOME/minigpt, or ~/.cache/minigpt."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minigpt"


def load_corpus(
    config: TrainConfig, tokenizer: Tokenizer, *, model_vocab_size: int, on_progress: OnProgress | None = None
) -> Corpus:
    """Read, tokenize (once; later runs reuse the cache) and plan the data of a run.

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
    assert config.batching is not None
    files = None if config.data else sample_files(config.seed)
    training_paths = config.data if files is None else (str(files[config.record_form]),)
    validation_paths = config.val_data
    if files is not None and not validation_paths and config.stage == "pretrain":
        validation_paths = (str(files["pretrain_val"]),)
    tokenized = partial(_tokenized, config=config, tokenizer=tokenizer, on_progress=on_progress)

    training = tokenized(training_paths, texts=config.mix_data)
    training_documents: IntArray
    validation_documents: IntArray
    if validation_paths:
        training_documents, held_out = _all_documents(training), tokenized(validation_paths)
        validation_documents = _all_documents(held_out)
    else:
        held_out = training
        training_documents, validation_documents = _split(training, config)
    training_documents, unusable = _usable(training, training_documents, config)
    validation_documents, unusable_held_out = _usable(held_out, validation_documents, config)
    _require_some(training_documents, unusable, of="training", config=config)
    if validation_paths:
        _require_some(validation_documents, unusable_held_out, of="validation", config=config)
        unusable += [f"of the validation data {part}" for part in unusable_held_out]
    if config.mix_data:
        training_documents = _mixed(training, training_documents, config)
    assert config.batch_size is not None
    # With a number of updates the data is repeated for as long as it takes to make them.
    endless = sys.maxsize // 2
    make_source = PairSource if training.holds_pairs else BatchSource
    source = make_source(
        training,
        training_documents,
        batching=config.batching,
        batch_size=config.batch_size,
        max_seq_len=config.max_seq_len,
        seed=config.seed + (config.stage_number << 32),
        num_epochs=config.epochs,
        num_batches=endless if config.epochs is None else None,
        drop_last=config.drop_last,
    )
    validation, documents = None, validation_documents[:VALIDATION_DOCUMENTS]
    if len(documents) > 0:
        make_batches = evaluation_pairs if held_out.holds_pairs else evaluation_batches
        validation = make_batches(held_out, documents, batch_size=config.batch_size, max_seq_len=config.max_seq_len)
    return Corpus(
        source,
        validation,
        training.key,
        held_out.key if len(documents) else "",
        len(documents),
        0 if validation is None or config.stage == "dpo" else validation.text_bytes(tokenizer.text_bytes),
        _overlap(training, training_documents, held_out, documents),
        _left_out(training.report, unusable),
        tuple(sample.heldout_questions(count=QUESTIONS)) if files is not None else (),
    )


def _tokenized(
    paths: Sequence[str],
    *,
    config: TrainConfig,
    tokenizer: Tokenizer,
    on_progress: OnProgress | None,
    texts: Sequence[str] = (),
) -> TokenCache:
    encoding = encoding_of(config.record_form, tokenizer, chat_mask=config.chat_mask)
    if len(paths) > 1 and any(is_token_cache(Path(path)) for path in paths):
        raise UserError("a prepared cache is given alone: prepare all the data into one")
    if len(paths) == 1 and is_token_cache(Path(paths[0])):
        if texts:
            raise UserError(f"--mix-data goes with files of conversations, and {paths[0]} is a prepared cache")
        cache = open_token_cache(Path(paths[0]))
        cache.require_tokenizer(tokenizer)
        cache.require_encoding(encoding.options)
        return cache
    return build_token_cache(
        paths,
        tokenizer,
        cache_root=cache_directory() / "tokens",
        encoding=encoding,
        texts=texts,
        skip_bad_lines=config.skip_bad_lines,
        on_progress=on_progress,
    )


def _all_documents(cache: TokenCache) -> IntArray:
    """All that are trained on or validated; of pairs, which go by their chosen documents, every second one."""
    return np.arange(0, cache.num_documents, 2 if cache.holds_pairs else 1)


def _split(cache: TokenCache, config: TrainConfig) -> tuple[IntArray, IntArray]:
    """(training, validation) documents; what is mixed in is not validated."""
    if cache.holds_pairs:
        return split_pairs(cache)
    mixed_in = np.flatnonzero(cache.is_text) if config.mix_data else np.arange(0)
    own = np.setdiff1d(np.arange(cache.num_documents), mixed_in)
    training, validation = split_documents(cache, own)
    return np.concatenate([training, mixed_in]), validation


def _usable(cache: TokenCache, documents: IntArray, config: TrainConfig) -> tuple[IntArray, list[str]]:
    """The conversations or pairs of which a row holds something to learn, and in words how many were left out."""
    if cache.supervised is None:
        return documents, []
    if cache.holds_pairs:
        drop = config.over_long == "drop"
        usable, left_out = usable_pairs(cache, documents, max_seq_len=config.max_seq_len, drop_over_long=drop)
        return usable, left_out
    left_out = []
    most = config.max_seq_len + 1
    too_long = (cache.lengths[documents] > most) & ~cache.is_text[documents]
    if config.over_long == "drop" and too_long.any():
        left_out.append(f"{np.count_nonzero(too_long)} conversations longer than {most} tokens")
        documents = documents[~too_long]
    silent = cache.supervised_counts(most)[documents] == 0
    if silent.any():
        left_out.append(f"{np.count_nonzero(silent)} conversations in which the first {most} tokens have no answer")
    return documents[~silent], left_out


def _require_some(usable: IntArray, left_out: list[str], *, of: str, config: TrainConfig) -> None:
    if left_out and not len(usable):
        raise UserError(
            f"the {of} data has nothing to learn within --max-seq-len {config.max_seq_len}: "
            f"{', '.join(left_out)}; give a larger one, or other data"
        )


def _mixed(cache: TokenCache, documents: IntArray, config: TrainConfig) -> IntArray:
    """All conversations, and as much text as makes up `mix_fraction` of the tokens that are learned, if there is."""
    is_text = cache.is_text[documents]
    chats, texts = documents[~is_text], documents[is_text]
    # Rows hold the whole of a text, and the beginning of a conversation.
    whole = cache.supervised_counts(np.iinfo(np.int32).max)
    learned = np.where(cache.is_text, whole, cache.supervised_counts(config.max_seq_len + 1))
    wanted = learned[chats].sum() * config.mix_fraction / (1 - config.mix_fraction)
    order = np.argsort(np.random.PCG64([config.seed, int.from_bytes(b"mix", "big")]).random_raw(len(texts)))
    enough = np.searchsorted(np.cumsum(learned[texts[order]]), wanted) + 1
    return np.sort(np.concatenate([chats, texts[order[:enough]]]))


def _overlap(
    training: TokenCache, training_documents: IntArray, held_out: TokenCache, validation_documents: IntArray
) -> int:
    met = np.isin(held_out.digests[validation_documents], training.digests[training_documents])
    return int(np.count_nonzero(met))


def _left_out(report: CacheReport, unusable: list[str]) -> str:
    parts = [f"{report.duplicates} duplicates"] if report.duplicates else []
    for reason, count in report.skipped.items():
        parts.append(f"{count} lines ({reason}; first at {report.examples[reason]})")
    return ", ".join([*parts, *unusable])


def sample_files(seed: int) -> dict[str, Path]:
    """The files of the sample corpus, by the form of their records; written when they are not there yet.

    Raises:
        UserError: they cannot be written.
    """
    directory = cache_directory() / "sample" / f"seed-{seed}"
    try:
        return sample.write_sample(directory, seed=seed)
    except OSError as error:
        reason = f"cannot write the sample corpus to {directory}: {error.strerror}"
        raise UserError(f"{reason}; XDG_CACHE_HOME names another place") from error
