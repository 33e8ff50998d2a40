"""What a model wrote, told apart while it comes: its reasoning, its answer, and the tools it calls. Framework-free.

`<think>...</think>` is reasoning; `<tool_call>...</tool_call>` around a JSON object with a name is a call. White space
beside these marks belongs to them. A mark is never given out by halves, and the parts are the same however the text was
cut on its way. What looks like a call and is none stays text.
"""

import json
from dataclasses import dataclass
from typing import Literal

from minigpt_jax.row_text import overlap
from minigpt_jax.serving.fields import parse_json

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class Reasoning:
    """A piece of what the model thought before it answered."""

    text: str


@dataclass(frozen=True)
class Content:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """A function that the model wants called, whole."""

    name: str
    arguments: str
    """JSON."""


Part = Reasoning | Content | ToolCall


class AnswerSplitter:
    """One answer.

    Args:
        is_thinking: the prompt has opened the reasoning already.
        reads_calls: there are tools to call; else what looks like a call is text.
    """

    def __init__(self, *, is_thinking: bool, reads_calls: bool):
        self._place: Literal["thinking", "content", "call"] = "thinking" if is_thinking else "content"
        self._marks = (THINK, CALL) if reads_calls else (THINK,)
        self._is_beside_mark = is_thinking
        self._text = ""  # what has not been given out
        self._opening = ""  # of a call: its mark, and the white space before it

    def push(self, text: str) -> list[Part]:
        """The parts that can be told after some more text."""
        self._text += text
        return self._parts(is_last=False)

    def finish(self) -> list[Part]:
        """The rest; no more text will come."""
        return self._parts(is_last=True)

    def _parts(self, *, is_last: bool) -> list[Part]:
        parts: list[Part] = []
        while True:
            if self._is_beside_mark:
                self._text = self._text.lstrip()
                self._is_beside_mark = not self._text
            place = self._place
            if place == "call":
                parts += self._call(is_last)
            elif place == "thinking":
                parts += [Reasoning(text) for text in self._until((END_THINK,), is_last)]
            else:
                parts += [Content(text) for text in self._until(self._marks, is_last)]
            if self._place == place:
                return parts

    def _until(self, marks: tuple[str, ...], is_last: bool) -> list[str]:
        """The text before the first of `marks`, or as much of it as cannot belong to one; behind one another place."""
        found = [(at, mark) for mark in marks if (at := self._text.find(mark)) >= 0]
        if not found:
            end = len(self._text)
            if not is_last:
                end -= max(overlap(self._text, mark) for mark in marks)
                end = len(self._text[:end].rstrip())
            given, self._text = self._text[:end], self._text[end:]
            return [given] if given else []
        at, mark = min(found)
        given, space = self._text[:at].rstrip(), self._text[len(self._text[:at].rstrip()) : at]
        self._text = self._text[at + len(mark) :]
        if mark == CALL:
            self._place, self._opening = "call", space + mark
        else:
            self._place, self._is_beside_mark = "thinking" if mark == THINK else "content", True
        return [given] if given else []

    def _call(self, is_last: bool) -> list[Part]:
        body, mark, rest = self._text.partition(END_CALL)
        if not mark and not is_last:
            return []
        self._text, self._place = rest, "content"
        call = _parsed_call(body) if mark else None
        self._is_beside_mark = call is not None
        return [Content(self._opening + body + mark) if call is None else call]


def _parsed_call(body: str) -> ToolCall | None:
    try:
        call = parse_json(body)
    except ValueError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    return ToolCall(
        call["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    )
