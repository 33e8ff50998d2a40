"""What makes a tokenizer byte-level and lossless: the table of bytes, and the model that encodes untrusted text.

Framework-free. A definition is the content of a Hugging Face tokenizer.json.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers

from minigpt_jax.errors import UserError

_SURROGATE = re.compile("[\ud800-\udfff]")


def complete_definition(definition: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`definition` with every optional field filled in by the library, once it is known to be byte-level BPE.

    Raises:
        UserError: it is something else; `where` is the file named in the message.
    """
    try:
        complete: dict[str, Any] = json.loads(tokenizers.Tokenizer.from_str(json.dumps(definition)).to_str())
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"{where} is not a tokenizer: {error}; give the tokenizer.json of a model") from error
    decoder = complete["decoder"] or {}
    stages = {stage["type"] for stage in decoder.get("decoders", [decoder]) if stage}
    if complete["model"]["type"] != "BPE" or "ByteLevel" not in stages:
        raise UserError(f"{where} is not byte-level BPE, so it could lose bytes; choose a tokenizer that is")
    return complete


def text_encoder(complete: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer without its added tokens, so that nothing a text contains can become one."""
    model = complete["model"]
    added_ids = {token["id"] for token in complete["added_tokens"]}
    # Merges, or a whole word that is an entry, could still spell an added token: it must not be an entry either.
    vocab = {token: id for token, id in model["vocab"].items() if id not in added_ids or token in BYTE_OF}
    merges = [pair for pair in model["merges"] if {*pair, "".join(pair)} <= vocab.keys()]
    plain = {
        **complete,
        "model": {**model, "vocab": vocab, "merges": merges},
        "added_tokens": [],
        "post_processor": None,
        "truncation": None,
        "padding": None,
    }
    return tokenizers.Tokenizer.from_str(json.dumps(plain))


def _byte_characters() -> dict[str, int]:
    """The printable character by which a byte-level vocabulary writes each byte (GPT-2's table)."""
    printable = [byte for first, last in ("!~", "¡¬", "®ÿ") for byte in range(ord(first), ord(last) + 1)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(rest)}


BYTE_OF = _byte_characters()
"""The byte that each character of a byte-level vocabulary entry stands for."""


def token_bytes_of(token: str) -> bytes:
    """The bytes of a vocabulary entry; one with a character outside the table stands for itself."""
    if BYTE_OF.keys() >= set(token):
        return bytes(BYTE_OF[character] for character in token)
    return token.encode("utf-8")


def refuse_surrogates(text: str) -> None:
    """Raise a UserError that names the first lone surrogate of `text`, if there is one."""
    found = _SURROGATE.search(text)
    if found:
        raise UserError(
            f"the text has the lone surrogate U+{ord(found[0]):04X} at character {found.start() + 1}; half of a pair "
            "is not a character: repair or remove it"
        )


def round_trip_probes() -> Iterator[str]:
    """What normalising, trimming or incomplete tokenizers change; together, every byte that UTF-8 has."""
    yield from (" a", "a ", "  a  b ", "\r\n\t\n", "\u00e9 e\u0301", "\uff21\u3000\u00a0", "\x00", "A's, I.E. 'RE !")
    yield "".join(map(chr, range(0x800)))
    yield "".join(map(chr, (*range(0x800, 0xD800, 0x3F), *range(0xE000, 0x110000, 0xFFD))))
