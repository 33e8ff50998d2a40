"""Byte-level BPE: train a tokenizer and measure one.

Framework-free.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from minigpt_jax.byte_level import BYTE_OF
from minigpt_jax.errors import UserError
from minigpt_jax.languages import is_chinese
from minigpt_jax.tokenizer import ADDED_TOKENS, SPLIT_PATTERN, TAGS, Tokenizer

# --- Train ---


def train_tokenizer(
    texts: Iterable[str], *, vocab_size: int = 6400, min_frequency: int = 2, show_progress: bool = False
) -> Tokenizer:
    """A tokenizer learned from `texts`; the same texts give the same tokenizer, byte for byte.

    Ids: `ADDED_TOKENS`, the 256 bytes, then merges by falling frequency.

    Args:
        texts: read once.
        vocab_size: entries in all.
        min_frequency: a pair seen less often is not merged.
        show_progress: draw the library's progress bars on stderr.

    Raises:
        UserError: a size that cannot hold the bytes, or text too short to fill the vocabulary.
    """
    smallest = len(ADDED_TOKENS) + 256
    if vocab_size < smallest:
        raise UserError(f"--vocab-size must be at least {smallest} (added tokens and bytes), got {vocab_size}")
    if min_frequency < 1:
        raise UserError(f"--min-frequency must be at least 1, got {min_frequency}")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=list(ADDED_TOKENS),
        initial_alphabet=sorted(BYTE_OF),
        show_progress=show_progress,
    )
    tokenizer.train_from_iterator(texts, trainer)
    definition = json.loads(tokenizer.to_str())
    for token in definition["added_tokens"]:
        token["special"] = token["content"] not in TAGS  # the trainer makes all of them special
    trained = Tokenizer(definition, where="the trained tokenizer")
    if trained.vocab_size < vocab_size:
        raise UserError(
            f"the text gives only {trained.vocab_size} entries, not {vocab_size}; give more text, a smaller "
            "--vocab-size or a smaller --min-frequency"
        )
    return trained


def weight_english(texts: Iterable[str], weight: float) -> Iterator[str]:
    """`texts`, the English ones as if there were `weight` times as many: 1.25 gives every fourth one twice.

    A vocabulary is shared out by what the training text holds; this moves the balance between the two languages.
    """
    if not 0 < weight < float("inf"):
        raise UserError(f"--english-weight must be positive and finite, got {weight}")
    owed = 0.0
    for text in texts:
        if language_of(text) == "zh":
            yield text
            continue
        owed += weight
        while owed >= 1:
            yield text
            owed -= 1


# --- Evaluate ---


@dataclass(frozen=True)
class EvaluationRow:
    """How densely a tokenizer writes the documents of one language ("zh", "en") or of both ("all")."""

    language: str
    documents: int
    bytes: int
    characters: int
    tokens: int
    bytes_per_token: float
    characters_per_token: float


def language_of(text: str) -> Literal["zh", "en"]:
    """Chinese by `is_chinese`, else English."""
    return "zh" if is_chinese(text) else "en"


def evaluate_tokenizer(tokenizer: Tokenizer, texts: Iterable[str]) -> list[EvaluationRow]:
    """Bytes and characters a token, by language; each text is one document, counted without special tokens.

    A document is Chinese when more than 30 % of its characters are CJK ideographs, else English.
    """
    counts: dict[str, list[int]] = {"zh": [0] * 4, "en": [0] * 4, "all": [0] * 4}
    remaining = iter(texts)
    while chunk := list(islice(remaining, 1000)):
        for text, ids in zip(chunk, tokenizer.encode_batch(chunk), strict=True):
            document = (1, len(text.encode("utf-8")), len(text), len(ids))
            for name in (language_of(text), "all"):
                counts[name] = [sum(pair) for pair in zip(counts[name], document, strict=True)]
    return [
        EvaluationRow(name, documents, size, characters, tokens, size / tokens, characters / tokens)
        for name, (documents, size, characters, tokens) in counts.items()
        if tokens
    ]
