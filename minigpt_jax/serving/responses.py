"""What is answered, in OpenAI's form: pieces of a stream, and whole answers made of the same pieces. Framework-free.

A conversation's answer has reasoning_content beside content, as MiniMind's server gives it.
"""

import secrets
import time
from collections.abc import Sequence
from typing import Any

from minigpt_jax.generation import FinishReason
from minigpt_jax.logprobs import TokenLogprob
from minigpt_jax.serving.answers import AnswerSplitter, Content, Part, Reasoning, ToolCall
from minigpt_jax.serving.api import ChatRequest, CompletionRequest
from minigpt_jax.serving.requests import Finished, Piece
from minigpt_jax.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0
"""Stands for every smaller one, as with OpenAI: JSON has no infinity."""


class Answer:
    """The choices of one request, while their text comes.

    Args:
        kind: the beginning of the id, and the object's name whole and as a piece of a stream.
        model: the name that was asked for.
        prompt_tokens: of all prompts, each counted once.
        include_usage: a stream ends with the numbers of tokens.
    """

    def __init__(self, kind: tuple[str, str, str], *, model: str, prompt_tokens: int, include_usage: bool):
        prefix, self._whole, self._piece = kind
        self._head = {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._prompt_tokens, self._completion_tokens = prompt_tokens, 0
        self._includes_usage = include_usage

    def opening(self) -> list[dict[str, Any]]:
        """Pieces of a stream before the first token."""
        raise NotImplementedError

    def take(self, number: int, event: Piece | Finished) -> list[dict[str, Any]]:
        """Add what happened to one choice; returns the pieces of a stream that say so."""
        raise NotImplementedError

    def choices(self) -> list[dict[str, Any]]:
        """The choices, whole."""
        raise NotImplementedError

    def whole(self) -> dict[str, Any]:
        """The answer, once every choice is finished."""
        return {**self._head, "object": self._whole, "choices": self.choices(), "usage": self._usage()}

    def ending(self) -> list[dict[str, Any]]:
        """Pieces of a stream after the last choice has finished."""
        if not self._includes_usage:
            return []
        return [{**self._head, "object": self._piece, "choices": [], "usage": self._usage()}]

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        usage = {"usage": None} if self._includes_usage else {}
        return {**self._head, "object": self._piece, "choices": [choice], **usage}

    def _usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
        }


# --- Conversations ---


class ChatAnswer(Answer):
    """Answers to a conversation.

    Args:
        request: what was asked.
        model: its name.
        tokenizer: of the model.
        prompt_tokens: of the conversation.
        is_thinking: the prompt has opened the reasoning already.
    """

    def __init__(
        self, request: ChatRequest, *, model: str, tokenizer: Tokenizer, prompt_tokens: int, is_thinking: bool
    ):
        kind = ("chatcmpl", "chat.completion", "chat.completion.chunk")
        super().__init__(kind, model=model, prompt_tokens=prompt_tokens, include_usage=request.include_usage)
        self._choices = [
            _ChatChoice(
                AnswerSplitter(is_thinking=is_thinking, reads_calls=bool(request.tools)),
                None if request.num_logprobs is None else tokenizer,
            )
            for _ in range(request.n)
        ]

    def opening(self) -> list[dict[str, Any]]:
        """The role of each choice."""
        delta = {"role": "assistant", "content": ""}
        return [self._chunk(_chat_piece(number, delta)) for number in range(len(self._choices))]

    def take(self, number: int, event: Piece | Finished) -> list[dict[str, Any]]:
        """As of every answer."""
        choice = self._choices[number]
        if isinstance(event, Piece):
            pieces = choice.push(event)
        else:
            self._completion_tokens += event.completion_tokens
            pieces = choice.finish(event.reason)
        return [self._chunk(_chat_piece(number, **piece)) for piece in pieces]

    def choices(self) -> list[dict[str, Any]]:
        """As of every answer."""
        return [{"index": number, **choice.whole()} for number, choice in enumerate(self._choices)]


class _ChatChoice:
    """One choice: its message so far."""

    def __init__(self, splitter: AnswerSplitter, tokenizer: Tokenizer | None):
        self._splitter, self._tokenizer = splitter, tokenizer
        self._content = self._reasoning = ""
        self._calls: list[dict[str, Any]] = []
        self._logprobs: list[dict[str, Any]] = []
        self._num_told = 0  # of the log-probabilities
        self._reason: str | None = None

    def push(self, piece: Piece) -> list[dict[str, Any]]:
        """Delta and log-probabilities of each piece of the stream."""
        if self._tokenizer is not None:
            self._logprobs += [_chat_logprob(each, self._tokenizer) for each in piece.logprobs]
        return self._told(self._splitter.push(piece.text))

    def finish(self, reason: FinishReason) -> list[dict[str, Any]]:
        """The rest, and why it ended."""
        told = self._told(self._splitter.finish())
        self._reason = "tool_calls" if self._calls and reason == "stop" else reason
        return [*told, {"delta": {}, "logprobs": self._fresh_logprobs(), "finish_reason": self._reason}]

    def whole(self) -> dict[str, Any]:
        """The choice without its number."""
        message: dict[str, Any] = {"role": "assistant", "content": self._content or (None if self._calls else "")}
        if self._reasoning:
            message["reasoning_content"] = self._reasoning
        if self._calls:
            message["tool_calls"] = [{key: call[key] for key in call if key != "index"} for call in self._calls]
        logprobs = None if self._tokenizer is None else {"content": self._logprobs, "refusal": None}
        return {"message": message, "logprobs": logprobs, "finish_reason": self._reason}

    def _told(self, parts: Sequence[Part]) -> list[dict[str, Any]]:
        return [{"delta": self._delta(part), "logprobs": self._fresh_logprobs()} for part in parts]

    def _delta(self, part: Part) -> dict[str, Any]:
        match part:
            case Reasoning(text):
                self._reasoning += text
                return {"reasoning_content": text}
            case Content(text):
                self._content += text
                return {"content": text}
            case ToolCall(name, arguments):
                self._calls.append({
                    "index": len(self._calls),
                    "id": f"call_{secrets.token_hex(12)}",
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                })  # fmt: skip
                return {"tool_calls": [self._calls[-1]]}

    def _fresh_logprobs(self) -> dict[str, Any] | None:
        fresh, self._num_told = self._logprobs[self._num_told :], len(self._logprobs)
        return {"content": fresh, "refusal": None} if fresh else None


def _chat_piece(
    number: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _chat_logprob(each: TokenLogprob, tokenizer: Tokenizer) -> dict[str, Any]:
    def entry(id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": _token_text(id, tokenizer),
            "bytes": list(tokenizer.token_bytes(id)),
            "logprob": max(logprob, LEAST_LOGPROB),
        }

    return {**entry(each.id, each.logprob), "top_logprobs": [entry(id, logprob) for id, logprob in each.top]}


def _token_text(id: int, tokenizer: Tokenizer) -> str:
    """The text of a token; one that is half a character as its bytes, as OpenAI writes it."""
    content = tokenizer.token_bytes(id)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


# --- Texts ---


class CompletionAnswer(Answer):
    """Continuations of texts: those of the first prompt, of the second, and so on.

    Args:
        request: what was asked.
        model: its name.
        tokenizer: of the model.
        prompts: of each prompt its ids.
    """

    def __init__(
        self, request: CompletionRequest, *, model: str, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]]
    ):
        super().__init__(
            ("cmpl", "text_completion", "text_completion"),
            model=model,
            prompt_tokens=sum(map(len, prompts)),
            include_usage=request.include_usage,
        )
        echoes = [""] * len(prompts)
        if request.echo:
            echoes = [prompt if isinstance(prompt, str) else tokenizer.decode(prompt) for prompt in request.prompts]
        self._choices = [
            _TextChoice(echo, None if request.num_logprobs is None else tokenizer)
            for echo in echoes
            for _ in range(request.n)
        ]

    def opening(self) -> list[dict[str, Any]]:
        """The prompts, where they are to be repeated."""
        return [
            self._chunk(_text_piece(number, choice.text)) for number, choice in enumerate(self._choices) if choice.text
        ]

    def take(self, number: int, event: Piece | Finished) -> list[dict[str, Any]]:
        """As of every answer."""
        choice = self._choices[number]
        if isinstance(event, Piece):
            return [self._chunk(_text_piece(number, event.text, choice.push(event)))]
        self._completion_tokens += event.completion_tokens
        choice.reason = event.reason
        return [self._chunk(_text_piece(number, "", None, event.reason))]

    def choices(self) -> list[dict[str, Any]]:
        """As of every answer."""
        return [
            _text_piece(number, choice.text, choice.logprobs, choice.reason)
            for number, choice in enumerate(self._choices)
        ]


class _TextChoice:
    """One choice: its text so far."""

    def __init__(self, text: str, tokenizer: Tokenizer | None):
        self.text = text
        self.reason: str | None = None
        self.logprobs: dict[str, list[Any]] | None = None
        self._tokenizer = tokenizer
        if tokenizer is not None:
            self.logprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
            self._characters = tokenizer.stream_decoder(skip_special_tokens=True)
            self._offset = 0

    def push(self, piece: Piece) -> dict[str, list[Any]] | None:
        """The log-probabilities of a piece."""
        self.text += piece.text
        if self.logprobs is None or self._tokenizer is None:
            return None
        fresh: dict[str, list[Any]] = {name: [] for name in self.logprobs}
        for each in piece.logprobs:
            likeliest = [*each.top, (each.id, each.logprob)]
            fresh["tokens"].append(_token_text(each.id, self._tokenizer))
            fresh["token_logprobs"].append(max(each.logprob, LEAST_LOGPROB))
            fresh["top_logprobs"].append(
                {_token_text(id, self._tokenizer): max(logprob, LEAST_LOGPROB) for id, logprob in likeliest}
            )
            fresh["text_offset"].append(self._offset)
            self._offset += len(self._characters.push(each.id))
        for name, values in fresh.items():
            self.logprobs[name] += values
        return fresh


def _text_piece(
    number: int, text: str, logprobs: dict[str, list[Any]] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
