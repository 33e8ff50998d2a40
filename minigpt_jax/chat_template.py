"""Rendering a chat template in Jinja's sandbox, with what transformers offers a template.

Framework-free. A template is a stranger's program: it may come with a downloaded tokenizer.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minigpt_jax.errors import UserError


class ChatTemplate:
    """A compiled template.

    Args:
        source: Jinja, with the filters and functions that transformers offers.

    Raises:
        UserError: the source is not Jinja.
    """

    def __init__(self, source: str):
        # The options are those of transformers, for which chat templates are written.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise UserError(f"the chat template is not Jinja: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        *,
        add_generation_prompt: bool,
        special_tokens: Mapping[str, str],
    ) -> str:
        """The conversation as one string.

        Args:
            messages: each with "role" and "content", optional "reasoning_content" and "tool_calls". A JSON string in
                "tool_calls", or in "tools" of the first system message, is parsed first (the form of MiniMind's files).
            tools: JSON descriptions of functions; the first system message's when None.
            add_generation_prompt: end with the head of an assistant turn.
            special_tokens: further variables, such as bos_token.

        Raises:
            UserError: the template refuses the conversation, or a JSON string in it is not JSON.
        """
        parsed = [{key: _parsed(key, value) for key, value in message.items()} for message in messages]
        if tools is None and parsed and parsed[0].get("role") == "system":
            tools = parsed[0].get("tools")
        try:
            return self._template.render(
                messages=parsed, tools=tools, add_generation_prompt=add_generation_prompt, **special_tokens
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise UserError(f"the chat template cannot render this conversation: {error}") from error


class _Generation(Extension):
    """`{% generation %}` renders its body as it is; transformers marks what the assistant wrote by it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, *, ensure_ascii: bool = False, indent: int | None = None) -> str:
    # Jinja's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _parsed(key: str, value: Any) -> Any:
    if key not in ("tools", "tool_calls") or not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else []
    except ValueError as error:
        raise UserError(f"{key} is a string that is not JSON ({error}); write a list, or its JSON") from error
