"""Conversations as token ids, and which of them are learned: the only place where a loss mask is made. Framework-free.

The tokenizer's own template writes the conversation. What the template wrote is told from what stands in a message
(minigpt_jax/chat_template.py), so the text of a special token in a message stays text and cannot open a turn. The mask
comes out of the same pass: nothing is searched for among the ids.

L tokens of a conversation
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minigpt_jax.chat_template import CLOSE, OPEN, ChatTemplate, unescape
from minigpt_jax.config import ChatMask
from minigpt_jax.errors import UserError
from minigpt_jax.tokenizer import EOS, SPECIAL_TOKENS_MAP, Tokenizer


@dataclass(frozen=True)
class EncodedChat:
    """One conversation. A cut one is a slice of both arrays: no end is put where there was none."""

    ids: NDArray[np.int32]  # [L]
    supervised: NDArray[np.bool_]  # [L]
    """Whether this token is learned, as the target of the position before it."""


class ChatEncoder:
    """Encodes conversations with one tokenizer and one kind of mask.

    Where the template marks what the assistant writes by `{% generation %}`, as transformers does, that is what is
    learned. Another template is rendered turn by turn: an assistant turn is what is there beyond the prompt for it, to
    its end marker.

    Args:
        tokenizer: with a chat template.
        mask: which tokens are learned.

    Raises:
        UserError: the template is not Jinja.
    """

    def __init__(self, tokenizer: Tokenizer, *, mask: ChatMask = "assistant"):
        self._tokenizer, self._mask = tokenizer, mask
        self._template = ChatTemplate(tokenizer.chat_template)
        self._added_ids = tokenizer.added_tokens
        longest_first = sorted(self._added_ids, key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, longest_first)))
        self._pieces = re.compile(f"({OPEN}|{CLOSE}|{self._added.pattern})")

    def encode(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None) -> EncodedChat:
        """The ids of a conversation and its mask.

        Args:
            messages: each with "role" and "content", optional "reasoning_content", "tools" and "tool_calls".
            tools: JSON descriptions of functions; the first system message's when None.

        Raises:
            UserError: the template cannot render the conversation, or changes earlier turns when later ones come and
                marks none itself.
        """
        rendered = self._render(messages, tools)
        if OPEN not in rendered:
            rendered = self._marked_by_turns(messages, tools, rendered)
        ids: list[int] = []
        supervised: list[bool] = []
        is_open, after_close = False, False
        for piece in self._pieces.split(rendered):
            if piece in (OPEN, CLOSE):
                is_open, after_close = piece == OPEN, piece == CLOSE
            elif piece:
                new = self._ids_of(piece)
                ids += new
                supervised += [is_open] * len(new)
                if after_close and self._mask == "minimind" and piece.startswith("\n"):
                    supervised[-len(new)] = True
                after_close = False
        return EncodedChat(np.array(ids, np.int32), np.array(supervised, np.bool_))

    def encode_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The ids of a conversation up to where the assistant's next turn begins.

        Args:
            messages: as for `encode`.
            tools: as for `encode`.
            variables: what else the template reads, such as "open_thinking"; `template_variables` lists it.

        Raises:
            UserError: as `encode`.
        """
        pieces = self._pieces.split(self._render(messages, tools, add_generation_prompt=True, variables=variables))
        return [id for piece in pieces if piece and piece not in (OPEN, CLOSE) for id in self._ids_of(piece)]

    @property
    def template_variables(self) -> frozenset[str]:
        """What the template reads besides the conversation, the tools and the special tokens."""
        return self._template.variables - SPECIAL_TOKENS_MAP.keys()

    def _ids_of(self, piece: str) -> list[int]:
        added = self._added_ids.get(piece)
        return self._tokenizer.encode(unescape(piece)) if added is None else [added]

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        *,
        add_generation_prompt: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        return self._template.render_marked(
            messages,
            tools,
            protected=self._added,
            add_generation_prompt=add_generation_prompt,
            variables={**(variables or {}), **SPECIAL_TOKENS_MAP},
        )

    def _marked_by_turns(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, whole: str) -> str:
        marked, done = "", 0
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:number], tools, add_generation_prompt=True)
            after = self._render(messages[: number + 1], tools)
            end = after.rfind(EOS) + len(EOS)
            if not (whole.startswith(before) and whole.startswith(after[:end]) and done <= len(before) < end):
                raise UserError(
                    "the chat template writes earlier turns otherwise when later ones follow, so what the assistant "
                    "said cannot be told; put {% generation %} and {% endgeneration %} around it in the template"
                )
            marked += whole[done : len(before)] + OPEN + whole[len(before) : end] + CLOSE
            done = end
        return marked + whole[done:]
