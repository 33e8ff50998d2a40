"""What a record becomes in the token cache: ids, and which of them are learned.

Framework-free. A stage's encoding says how its records are read, told from duplicates and turned into documents. The
mask of a conversation is made by minigpt_jax/data/chat.py and only carried here.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from minigpt_jax.config import ChatMask
from minigpt_jax.data.cache_format import Tokenizer as IdMaker
from minigpt_jax.data.chat import ChatEncoder, EncodedChat
from minigpt_jax.data.records import Record, RecordStage
from minigpt_jax.errors import UserError
from minigpt_jax.tokenizer import Tokenizer

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Document:
    """One sequence of the cache."""

    ids: Ids
    supervised: NDArray[np.bool_]
    """Whether each token is learned, as the target of the token before it."""
    text_bytes: int
    """UTF-8 bytes of the text in it, or of the messages' contents."""


class Encoding(Protocol):
    """How the records of one stage become documents."""

    @property
    def stage(self) -> RecordStage:
        """Form of the records."""
        ...

    @property
    def options(self) -> dict[str, str]:
        """What decides the ids and masks besides the tokenizer; empty for plain text, which has no mask."""
        ...

    def content(self, value: dict[str, Any]) -> bytes:
        """What two records are compared by."""
        ...

    def encode(self, records: Sequence[Record]) -> list[tuple[Document, ...]]:
        """The documents of each record.

        Raises:
            UserError: a record that cannot be encoded, or an id outside the vocabulary.
        """
        ...


class TextEncoding:
    """A pretraining text: `<|im_start|>` text `<|im_end|>`, every prediction of which is learned."""

    stage: RecordStage = "pretrain"

    def __init__(self, tokenizer: IdMaker):
        self._tokenizer = tokenizer

    @property
    def options(self) -> dict[str, str]:
        """Nothing but the tokenizer decides."""
        return {}

    def content(self, value: dict[str, Any]) -> bytes:
        """The text."""
        return str(value["text"]).encode("utf-8")

    def encode(self, records: Sequence[Record]) -> list[tuple[Document, ...]]:
        """The texts between their two marks."""
        tokenizer, texts = self._tokenizer, [record.value["text"] for record in records]
        documents: list[tuple[Document, ...]] = []
        for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
            marked = np.concatenate([[tokenizer.bos_id], ids, [tokenizer.eos_id]]).astype(np.int64)
            documents.append((Document(marked, np.ones(len(marked), bool), len(text.encode("utf-8"))),))
        _require_ids(documents, tokenizer.vocab_size)
        return documents


class ChatEncoding:
    """A conversation by the tokenizer's own template; only what the assistant says is learned."""

    stage: RecordStage = "sft"

    def __init__(self, tokenizer: Tokenizer, *, mask: ChatMask = "assistant"):
        self._encoder = ChatEncoder(tokenizer, mask=mask)
        self._vocab_size, self._mask = tokenizer.vocab_size, mask

    @property
    def options(self) -> dict[str, str]:
        """The stage and the kind of mask."""
        return {"stage": self.stage, "mask": self._mask}

    def content(self, value: dict[str, Any]) -> bytes:
        """Everything that the template may look at."""
        return json.dumps(value, sort_keys=True, ensure_ascii=False).encode("utf-8")

    def encode(self, records: Sequence[Record]) -> list[tuple[Document, ...]]:
        """One document for each conversation of a record."""
        documents = [
            tuple(self._document(messages, record) for messages in self._conversations(record.value))
            for record in records
        ]
        _require_ids(documents, self._vocab_size)
        return documents

    def _conversations(self, value: dict[str, Any]) -> list[list[dict[str, Any]]]:
        return [value["conversations"]]

    def _document(self, messages: list[dict[str, Any]], record: Record) -> Document:
        try:
            chat: EncodedChat = self._encoder.encode(messages)
        except UserError as error:
            raise UserError(f"{record.path}:{record.line}: {error}") from error
        text_bytes = sum(len(message["content"].encode("utf-8")) for message in messages)
        return Document(chat.ids.astype(np.int64), chat.supervised, text_bytes)


class PairEncoding(ChatEncoding):
    """A preference pair: the chosen conversation and the rejected one, two documents next to each other."""

    stage: RecordStage = "dpo"

    def _conversations(self, value: dict[str, Any]) -> list[list[dict[str, Any]]]:
        return [value["chosen"], value["rejected"]]


def encoding_of(stage: RecordStage, tokenizer: Tokenizer, *, chat_mask: ChatMask) -> Encoding:
    """The encoding of a form of records."""
    match stage:
        case "pretrain":
            return TextEncoding(tokenizer)
        case "sft":
            return ChatEncoding(tokenizer, mask=chat_mask)
        case "dpo":
            return PairEncoding(tokenizer, mask=chat_mask)


def _require_ids(documents: Sequence[tuple[Document, ...]], vocab_size: int) -> None:
    largest = max(int(document.ids.max()) for record in documents for document in record)
    if largest >= vocab_size:
        raise UserError(
            f"the tokenizer gave id {largest}, but says that its vocabulary has {vocab_size} entries; "
            "repair its tokenizer.json"
        )
