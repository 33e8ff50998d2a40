"""What can be asked for in OpenAI's form, and what is refused by name. Framework-free.

Besides OpenAI's fields there are top_k, min_p and repetition_penalty, and, as in MiniMind's server, open_thinking and
chat_template_kwargs. A field that would change the answer and is not supported is refused unless it has the value at
which it changes nothing.
"""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minigpt_jax.generation import GenerationConfig
from minigpt_jax.logprobs import MOST_LOGPROBS
from minigpt_jax.serving.fields import Fields, RequestError

IGNORED = (
    "metadata", "prediction", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier",
    "store", "user",
)  # fmt: skip
"""Fields without any bearing on the answer, accepted and not looked at."""

NEUTRAL: Mapping[str, Any] = {
    "audio": None,
    "best_of": 1,
    "frequency_penalty": 0,
    "function_call": None,
    "functions": [],
    "logit_bias": {},
    "modalities": ["text"],
    "parallel_tool_calls": True,
    "presence_penalty": 0,
    "reasoning_effort": None,
    "response_format": {"type": "text"},
    "suffix": "",
    "verbosity": None,
    "web_search_options": None,
}
"""Fields that are not supported, each with the value at which it changes nothing."""

COMPLETION_TOKENS = 16
"""New tokens of a /v1/completions request that does not say how many, as with OpenAI."""

MOST_STOPS, LONGEST_STOP = 4, 1000
ROLES = ("system", "user", "assistant", "tool")

# --- What was asked ---


@dataclass(frozen=True)
class Asked:
    """What both kinds of requests say."""

    model: str | None
    config: GenerationConfig
    n: int
    """Choices, of each prompt."""
    num_logprobs: int | None
    """Alternatives beside each token's own log-probability; None for no log-probabilities."""
    streams: bool
    include_usage: bool
    """A stream ends with the numbers of tokens."""


@dataclass(frozen=True)
class ChatRequest(Asked):
    """A conversation to go on with."""

    messages: tuple[dict[str, Any], ...]
    """As a chat template takes them: "role", "content" as one string, and what else there was."""
    tools: tuple[dict[str, Any], ...]
    """Functions that the model may call."""
    variables: dict[str, Any]
    """What else the chat template is told."""


@dataclass(frozen=True)
class CompletionRequest(Asked):
    """Texts to go on with."""

    prompts: tuple[str | tuple[int, ...], ...]
    """Each a text, or ids."""
    echo: bool
    """The answer begins with the prompt."""


# --- Reading a body ---


def chat_request(body: Any, *, context: int) -> ChatRequest:
    """The request in the JSON value of a body.

    Args:
        body: as it was parsed.
        context: the most new tokens; all of them where the request does not say.

    Raises:
        RequestError: a field that is wrong, missing, unknown or not supported.
    """
    fields = Fields(body)
    messages = _messages(fields)
    tools, choice = _tools(fields), fields.take("tool_choice")
    if choice not in (None, "auto", "none"):
        raise fields.wrong(
            "tool_choice", 'can be "auto" or "none": the model decides whether it calls', code="unsupported_value"
        )
    variables = {"open_thinking": fields.flag("open_thinking")}
    kwargs = fields.take("chat_template_kwargs")
    if kwargs is not None:
        if not isinstance(kwargs, dict):
            raise fields.wrong_type("chat_template_kwargs", "an object", kwargs)
        variables |= kwargs
    wants_logprobs = fields.flag("logprobs")
    num_logprobs = fields.integer("top_logprobs", least=0, most=MOST_LOGPROBS)
    if num_logprobs is not None and not wants_logprobs:
        raise fields.wrong("top_logprobs", "takes logprobs: true beside it")
    max_tokens = _max_tokens(fields, "max_completion_tokens", context)
    asked = _asked(fields, max_tokens or context, (num_logprobs or 0) if wants_logprobs else None)
    return ChatRequest(**asked, messages=messages, tools=() if choice == "none" else tools, variables=variables)


def completion_request(body: Any, *, context: int) -> CompletionRequest:
    """As `chat_request`, for texts."""
    fields = Fields(body)
    prompts = _prompts(fields)
    echo, num_logprobs = fields.flag("echo"), fields.integer("logprobs", least=0, most=MOST_LOGPROBS)
    if echo and num_logprobs is not None:
        raise fields.wrong(
            "logprobs", "cannot be given with echo: those of the prompt are not known", code="unsupported_value"
        )
    asked = _asked(fields, _max_tokens(fields, None, context) or COMPLETION_TOKENS, num_logprobs)
    return CompletionRequest(**asked, prompts=prompts, echo=echo)


def _asked(fields: Fields, max_tokens: int, num_logprobs: int | None) -> dict[str, Any]:
    """The fields of `Asked`; nothing else may be left."""
    model, n = fields.text("model"), fields.integer("n", least=1, most=128) or 1
    config = _config(fields, max_tokens)
    streams, options = fields.flag("stream"), fields.take("stream_options")
    include_usage = False
    if options is not None:
        if not streams:
            raise fields.wrong("stream_options", "takes stream: true beside it")
        within = Fields(options, "stream_options")
        include_usage = within.flag("include_usage")
        within.take("include_obfuscation")
        within.require_empty()
    for name in IGNORED:
        fields.take(name)
    for name, neutral in NEUTRAL.items():
        value = fields.take(name)
        if value is not None and value != neutral:
            remedy = "leave it out" if neutral is None else f"leave it out, or at {json.dumps(neutral)}"
            raise fields.wrong(name, f"is not supported; {remedy}", code="unsupported_parameter")
    fields.require_empty()
    return {
        "model": model or None,
        "config": config,
        "n": n,
        "num_logprobs": num_logprobs,
        "streams": streams,
        "include_usage": include_usage,
    }


def _max_tokens(fields: Fields, newer: str | None, context: int) -> int | None:
    """The most new tokens. More than the context holds are as good as the context."""
    given = [fields.integer(name, least=1, most=2**31 - 1) for name in ("max_tokens", newer) if name is not None]
    said = [number for number in given if number is not None]
    if len(said) > 1:
        raise fields.wrong("max_tokens", f"and {newer} are the same; give one of them")
    return min(said[0], context) if said else None


def _config(fields: Fields, max_tokens: int) -> GenerationConfig:
    """How tokens are drawn; where nothing is said, as scripts/generate.py draws them, by a seed of its own."""
    default = GenerationConfig()
    temperature = fields.number("temperature", least=0, most=2)
    top_p = fields.number("top_p", least=0, most=1, may_be_least=False)
    top_k = fields.integer("top_k", least=0, most=2**31 - 1)
    min_p = fields.number("min_p", least=0, most=1)
    penalty = fields.number("repetition_penalty", least=0, most=100, may_be_least=False)
    seed = fields.integer("seed", least=0, most=2**31 - 1)
    return GenerationConfig(
        max_new_tokens=max_tokens,
        temperature=default.temperature if temperature is None else temperature,
        top_k=default.top_k if top_k is None else top_k,
        top_p=default.top_p if top_p is None else top_p,
        min_p=default.min_p if min_p is None else min_p,
        repetition_penalty=default.repetition_penalty if penalty is None else penalty,
        seed=secrets.randbelow(2**31) if seed is None else seed,
        stop=_stop(fields),
    )


def _stop(fields: Fields) -> tuple[str, ...]:
    value = fields.take("stop")
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise fields.wrong_type("stop", "a string or a list of strings", value)
    if len(stops) > MOST_STOPS:
        raise fields.wrong("stop", f"can be {MOST_STOPS} strings at most, not {len(stops)}")
    for stop in stops:
        if not isinstance(stop, str):
            raise fields.wrong_type("stop", "a string or a list of strings", [stop])
        if not 0 < len(stop) <= LONGEST_STOP:
            raise fields.wrong("stop", f"must have 1 to {LONGEST_STOP} characters in each string")
    return tuple(stops)


def _prompts(fields: Fields) -> tuple[str | tuple[int, ...], ...]:
    value = fields.take("prompt")
    if value is None:
        raise fields.missing("prompt")
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise fields.wrong("prompt", "must be a text, a list of texts, ids, or a list of lists of ids")
    if all(isinstance(item, str) for item in value):
        return tuple(value)
    lists = value if all(isinstance(item, list) for item in value) else [value]
    for number, ids in enumerate(lists):
        if not ids or not all(isinstance(id, int) and not isinstance(id, bool) for id in ids):
            place = "prompt" if lists is not value else f"prompt[{number}]"
            raise RequestError(f"{place} must be a text, or a list of ids", param=place, code="invalid_type")
    return tuple(tuple(ids) for ids in lists)


# --- Conversations ---


def _messages(fields: Fields) -> tuple[dict[str, Any], ...]:
    messages = fields.items("messages")
    if messages is None:
        raise fields.missing("messages")
    if not messages:
        raise fields.wrong("messages", "is empty; there is nothing to answer")
    return tuple(_message(message, f"messages[{number}]") for number, message in enumerate(messages))


def _message(value: Any, where: str) -> dict[str, Any]:
    fields = Fields(value, where)
    role = fields.required_text("role")
    role = "system" if role == "developer" else role  # OpenAI's newer word for it
    if role not in ROLES:
        raise fields.wrong("role", f"is {role!r}, which is not one of {', '.join(ROLES)}")
    message: dict[str, Any] = {"role": role, "content": _content(fields)}
    for name in ("name", "reasoning_content", "tool_call_id"):
        text = fields.text(name)
        if text is not None:
            message[name] = text
    calls = fields.items("tool_calls")
    if calls:
        if role != "assistant":
            raise fields.wrong("tool_calls", f"cannot be in a message of role {role}: only an assistant calls tools")
        message["tool_calls"] = [_call(call, f"{where}.tool_calls[{place}]") for place, call in enumerate(calls)]
    for name in ("annotations", "refusal"):  # an answer that is handed back has them, and they say nothing
        fields.take(name)
    fields.require_empty()
    if message["content"] is None:
        if not (role == "assistant" and (calls or "reasoning_content" in message)):
            raise fields.missing("content")
        message["content"] = ""
    return message


def _content(fields: Fields) -> str | None:
    """The text of a message, of which there may be several parts."""
    value = fields.take("content")
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise fields.wrong_type("content", "a string or a list of parts", value)
    texts = []
    for number, part in enumerate(value):
        within = Fields(part, f"{fields.path('content')}[{number}]")
        kind = within.required_text("type")
        if kind != "text":
            raise within.wrong("type", f"is {kind!r}; the model reads text only", code="unsupported_value")
        texts.append(within.required_text("text"))
        within.require_empty()
    return "\n".join(texts)


def _call(value: Any, where: str) -> dict[str, Any]:
    fields = Fields(value, where)
    call = {"id": fields.text("id"), "type": fields.text("type") or "function"}
    if call["type"] != "function":
        raise fields.wrong("type", "must be function", code="unsupported_value")
    function = Fields(fields.take("function"), fields.path("function"))
    name, arguments = function.required_text("name"), function.text("arguments") or "{}"
    function.require_empty()
    fields.take("index")  # a piece of a stream has it
    fields.require_empty()
    return {**call, "function": {"name": name, "arguments": arguments}}


def _tools(fields: Fields) -> tuple[dict[str, Any], ...]:
    tools = fields.items("tools") or []
    for number, tool in enumerate(tools):
        within = Fields(tool, f"tools[{number}]")
        kind = within.required_text("type")
        if kind != "function":
            raise within.wrong("type", f"is {kind!r}; a tool is a function here", code="unsupported_value")
        function = Fields(within.take("function"), within.path("function"))
        function.required_text("name")
        function.text("description")
        parameters = function.take("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            raise function.wrong_type("parameters", "an object", parameters)
    return tuple(tools)
