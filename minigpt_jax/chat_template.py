"""Rendering a chat template in Jinja's sandbox, with what transformers offers a template.

Framework-free. A template is a stranger's program: it may come with a downloaded tokenizer. Messages are strangers'
text: `render_marked` lets what stands in them be told from what the template wrote.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.meta
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minigpt_jax.errors import UserError

OPEN, CLOSE = "\ufdd1", "\ufdd2"
"""Around what the assistant writes, in a marked rendering. Like the escape, no characters: no text needs them."""

_FAULTS_OF_TEMPLATES = (
    jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError, MemoryError
)  # fmt: skip
"""What a template's own program can end in."""

_ESCAPE = "\ufdd0"
_MEANINGS = {"0": _ESCAPE, "1": OPEN, "2": CLOSE, "-": ""}
_CODES = {meaning: code for code, meaning in _MEANINGS.items() if meaning}


class ChatTemplate:
    """A compiled template.

    Args:
        source: Jinja, with the filters and functions that transformers offers.

    Raises:
        UserError: the source is not Jinja.
    """

    def __init__(self, source: str):
        try:
            self._template = _environment(_Generation).from_string(source)
            self._marked = _environment(_MarkedGeneration).from_string(source)
            read = jinja2.meta.find_undeclared_variables(_environment(_Generation).parse(source))
        except jinja2.TemplateError as error:
            raise UserError(f"the chat template is not Jinja: {error}") from error
        self.variables = frozenset(read) - {"messages", "tools", "add_generation_prompt"}
        """What the template reads besides the conversation."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, str],
    ) -> str:
        """The conversation as one string.

        Args:
            messages: each with "role" and "content", optional "reasoning_content" and "tool_calls". A JSON string in
                "tool_calls", or in "tools" of the first system message, is parsed first (the form of MiniMind's files).
            tools: JSON descriptions of functions; the first system message's when None.
            add_generation_prompt: end with the head of an assistant turn.
            variables: what else it reads, such as bos_token.

        Raises:
            UserError: the template refuses the conversation, or a JSON string in it is not JSON.
        """
        messages, tools = _with_parsed_json(messages, tools)
        return _render(self._template, messages, tools, add_generation_prompt, variables)

    def render_marked(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        *,
        protected: re.Pattern[str],
        add_generation_prompt: bool,
        variables: Mapping[str, str],
    ) -> str:
        """As `render`, with `OPEN` and `CLOSE` around each generation block and every message escaped.

        Args:
            messages: as for `render`.
            tools: as for `render`.
            protected: strings that mean something only where the template writes them; in a message they are broken
                up until `unescape`.
            add_generation_prompt: end with the head of an assistant turn.
            variables: what else it reads.

        Raises:
            UserError: as `render`.
        """
        messages, tools = _escaped(_with_parsed_json(messages, tools), protected)
        return _render(self._marked, messages, tools, add_generation_prompt, variables)


def unescape(text: str) -> str:
    """A part of a marked rendering, between marks and protected strings, as it was meant."""
    return re.sub(f"{_ESCAPE}(.)", lambda found: _MEANINGS.get(found[1], found[0]), text)


def _environment(generation: type[Extension]) -> ImmutableSandboxedEnvironment:
    # The options are those of transformers, for which chat templates are written.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _render(
    template: jinja2.Template,
    messages: Any,
    tools: Any,
    add_generation_prompt: bool,
    variables: Mapping[str, str],
) -> str:
    try:
        return template.render(messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables)
    except _FAULTS_OF_TEMPLATES as error:
        raise UserError(
            f"the chat template cannot render this conversation: {error or type(error).__name__}"
        ) from error


def _with_parsed_json(messages: Sequence[Mapping[str, Any]], tools: Any) -> tuple[list[dict[str, Any]], Any]:
    parsed = [{key: _parsed(key, value) for key, value in message.items()} for message in messages]
    if tools is None and parsed and parsed[0].get("role") == "system":
        tools = parsed[0].get("tools")
    return parsed, tools


def _escaped(value: Any, protected: re.Pattern[str]) -> Any:
    """`value` with every string in it escaped, names of fields included where they hold a protected string."""
    if isinstance(value, str):
        value = re.sub(f"[{''.join(_CODES)}]", lambda found: _ESCAPE + _CODES[found[0]], value)
        return protected.sub(lambda found: f"{found[0][0]}{_ESCAPE}-{found[0][1:]}", value)
    if isinstance(value, dict):
        return {_escaped(key, protected): _escaped(item, protected) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_escaped(item, protected) for item in value]
    return value


class _Generation(Extension):
    """`{% generation %}` renders its body as it is; transformers marks what the assistant wrote by it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _MarkedGeneration(_Generation):
    """The same between marks."""

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        def write(mark: str) -> jinja2.nodes.Node:
            return jinja2.nodes.Output([jinja2.nodes.Const(mark)])

        return [write(OPEN), *super().parse(parser), write(CLOSE)]


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
