"""Byte-level BPE: load, encode, decode, save.

Framework-free. Choices:
- Text is never trusted. It is encoded by a model that knows no added token, so "<|im_end|>" written by a user is ten
  characters like any others; only code places special ids. Hugging Face's own classes match added tokens in any text.
- Any string comes back exactly: all 256 bytes are in the vocabulary and nothing is normalised.
- Before the merges, text is cut by the pattern of the Qwen2 line, which lets one sign join the word after it: measured
  2 % better than GPT-2's on Chinese and English, and known to every runtime that reads such tokenizers (GGUF readers
  know it by name). Every digit is a token of its own, so a number is always spelled in the same way.
- `<think>` and the tool tags are added tokens but not "special" ones, as in the Qwen and MiniMind lines: decoding with
  `skip_special_tokens` keeps what a reader of the answer must parse.
"""

import codecs
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minigpt_jax.byte_level import (
    complete_definition,
    refuse_surrogates,
    round_trip_probes,
    text_encoder,
    token_bytes_of,
)
from minigpt_jax.chat_template import ChatTemplate
from minigpt_jax.errors import UserError
from minigpt_jax.files import read_json_object, replace_file

PAD, BOS, EOS = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
ADDED_TOKENS = (PAD, BOS, EOS, *TAGS, *(f"<|reserved_{index}|>" for index in range(27)))
"""Ids 0 to 35 of a tokenizer trained here, in order."""

SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen2's pattern, character for character: a GGUF file names it "qwen2"."""

SPECIAL_TOKENS_MAP = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}


# --- Tokenizer ---


class Tokenizer:
    """A byte-level BPE tokenizer with its chat template.

    Attributes:
        vocab_size: one more than the largest id.
        pad_id, bos_id, eos_id: ids of `<|endoftext|>`, `<|im_start|>`, `<|im_end|>`.
        chat_template: Jinja source.

    Args:
        definition: the content of a tokenizer.json.
        config: the content of its tokenizer_config.json.
        chat_template: wins over the config's; the shipped one is taken when there is neither.
        where: the file, named in errors.

    Raises:
        UserError: the definition is not a byte-level BPE tokenizer, lacks one of the three special tokens, or does
            not give every text back.
    """

    def __init__(
        self,
        definition: Mapping[str, Any],
        *,
        config: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        where: str = "tokenizer",
    ):
        self._definition = definition
        self._config = dict(config or {})
        template = chat_template or self._config.get("chat_template") or _shipped_chat_template()
        if not isinstance(template, str):
            raise UserError(f"{where}: its chat_template must be one string, not {type(template).__name__}")
        self.chat_template: str = template
        complete = complete_definition(definition, where)
        added = complete["added_tokens"]
        self._added_ids = {token["content"]: int(token["id"]) for token in added}
        missing = [token for token in (PAD, BOS, EOS) if token not in self._added_ids]
        if missing:
            raise UserError(f"{where} has no added token {', '.join(missing)}, which mark documents and turns")
        self.pad_id, self.bos_id, self.eos_id = (self._added_ids[token] for token in (PAD, BOS, EOS))
        self._skippable = frozenset(token["id"] for token in added if token["special"])
        self._bytes = {id: token_bytes_of(token) for token, id in complete["model"]["vocab"].items()}
        self._bytes |= {id: token.encode("utf-8") for token, id in self._added_ids.items()}
        self.vocab_size = max(self._bytes) + 1
        self._dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.int32
        self._encoder = text_encoder(complete)
        for probe in round_trip_probes():
            if self.decode(self.encode(probe)) != probe:
                raise UserError(f"{where} is not lossless: {probe[:20]!r} comes back changed; choose another tokenizer")

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, in which the strings of special tokens are ordinary characters.

        Raises:
            UserError: `text` holds a lone surrogate, which is no character.
        """
        try:
            ids: list[int] = self._encoder.encode(text, add_special_tokens=False).ids
        except TypeError:
            refuse_surrogates(text)
            raise
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """`encode` of each text, in parallel; uint16 arrays, or int32 where the vocabulary needs it.

        Raises:
            UserError: as `encode`.
        """
        try:
            encodings = self._encoder.encode_batch_fast(texts, add_special_tokens=False)
        except TypeError:
            for text in texts:
                refuse_surrogates(text)
            raise
        return [np.fromiter(encoding.ids, self._dtype, len(encoding)) for encoding in encodings]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD.

        Args:
            ids: any ids of the vocabulary.
            skip_special_tokens: leave out the added tokens that the tokenizer marks as special.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        skipped = self._skippable if skip_special_tokens else frozenset()
        return b"".join(self.token_bytes(id) for id in ids if id not in skipped).decode("utf-8", errors="replace")

    def token_bytes(self, id: int) -> bytes:
        """The bytes that one id stands for.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        try:
            return self._bytes[id]
        except KeyError:
            raise ValueError(f"id {id} is not in the vocabulary of {self.vocab_size} entries") from None

    @cached_property
    def text_bytes(self) -> NDArray[np.int64]:
        """[V] how many bytes of text each id stands for; 0 for added tokens, which are marks."""
        lengths = np.zeros(self.vocab_size, np.int64)
        for id, text in self._bytes.items():
            lengths[id] = len(text)
        lengths[list(self._added_ids.values())] = 0
        return lengths

    @property
    def added_tokens(self) -> dict[str, int]:
        """Ids of the added tokens, which are ids of their own wherever they are meant."""
        return dict(self._added_ids)

    def special_id(self, token: str) -> int:
        """The id of an added token such as `<think>`.

        Raises:
            UserError: the tokenizer has no such added token.
        """
        if token not in self._added_ids:
            raise UserError(f"the tokenizer has no added token {token!r}; it has {', '.join(self._added_ids)}")
        return self._added_ids[token]

    def stream_decoder(self, *, skip_special_tokens: bool = False) -> "StreamDecoder":
        """A decoder for ids that arrive one at a time."""
        return StreamDecoder(self, skipped=self._skippable if skip_special_tokens else frozenset())

    @cached_property
    def sha256(self) -> str:
        """Identity of the mapping from text to ids: the hash of tokenizer.json, however that file is laid out."""
        canonical = json.dumps(self._definition, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        return hashlib.sha256(canonical.encode("utf-8")).hexdigest()

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        """The conversation as the chat template writes it: see `ChatTemplate.render`.

        It is for people, and for comparing with other systems. In the string markers cannot be told from what a user
        typed, so ids are never made from it.

        Raises:
            UserError: the template cannot render the conversation.
        """
        return self._compiled_template.render(
            messages, tools, add_generation_prompt=add_generation_prompt, variables=SPECIAL_TOKENS_MAP
        )

    @cached_property
    def _compiled_template(self) -> ChatTemplate:
        return ChatTemplate(self.chat_template)

    def save(self, directory: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, each whole or not at all.

        Raises:
            UserError: the directory cannot be written.
        """
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **SPECIAL_TOKENS_MAP,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 32768,
            **self._config,
            "chat_template": self.chat_template,
        }
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for name, content in (("tokenizer.json", self._definition), ("tokenizer_config.json", config)):
                replace_file(directory / name, (json.dumps(content, ensure_ascii=False, indent=1) + "\n").encode())
        except OSError as error:
            raise UserError(f"cannot write the tokenizer to {directory}: {error.strerror}") from error


class StreamDecoder:
    """Text of ids that arrive one at a time; a character is given out when its last byte has come.

    What `push` and `finish` return, joined, is `Tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, *, skipped: frozenset[int]):
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, id: int) -> str:
        """The characters that `id` completes; often none.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        return "" if id in self._skipped else self._utf8.decode(self._tokenizer.token_bytes(id))

    def finish(self) -> str:
        """U+FFFD when the ids ended inside a character, else nothing."""
        return self._utf8.decode(b"", final=True)


# --- Load ---


def load_tokenizer(source: str | Path | None = None) -> Tokenizer:
    """The tokenizer in `source`.

    Args:
        source: a tokenizer.json, or a directory that holds one; the shipped tokenizer when None. A
            tokenizer_config.json and a chat_template.jinja beside it are used too (the latter wins, as in
            transformers).

    Raises:
        UserError: a missing file, or one that is no byte-level, lossless tokenizer with our three special tokens.
    """
    path = _shipped_directory() if source is None else Path(source)
    if path.is_dir():
        path = path / "tokenizer.json"
    config, template = path.with_name("tokenizer_config.json"), path.with_name("chat_template.jinja")
    return Tokenizer(
        read_json_object(path),
        config=read_json_object(config) if config.is_file() else None,
        chat_template=template.read_text(encoding="utf-8") if template.is_file() else None,
        where=str(path),
    )


def _shipped_directory() -> Path:
    return Path(str(resources.files("minigpt_jax.assets"))) / "tokenizer"


def _shipped_chat_template() -> str:
    return (_shipped_directory() / "chat_template.jinja").read_text(encoding="utf-8")
