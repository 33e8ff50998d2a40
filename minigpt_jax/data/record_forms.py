"""What a line of a JSONL file has to be to be trained on: its JSON, and the form of each stage's records.

Framework-free. A null that stands for "nothing" (the content beside tool calls, an absent reasoning) becomes an empty
string or disappears, never the word None.
"""

import itertools
import json
import re
from typing import Any

DEEPEST = 100
"""Levels of lists and objects in each other that a record may have."""

_ROLES = ("system", "user", "assistant", "tool")
_SURROGATE_ESCAPE = re.compile(rb"\\ud[89a-f]", re.IGNORECASE)


class BadLineError(Exception):
    """A line that is not a valid record: `reason` is what it is counted under, `remedy` how to mend it."""

    def __init__(self, reason: str, remedy: str):
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy


def parse_line(line: bytes) -> dict[str, Any]:
    """The JSON object in `line`."""
    if not line.strip():
        raise BadLineError("empty line", "delete it")
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadLineError("not UTF-8", f"byte {error.start + 1} of the line; save the file as UTF-8") from error
    except RecursionError as error:
        raise BadLineError("nested too deeply", "flatten it") from error
    except ValueError as error:  # JSONDecodeError, and a number too long for an int
        if not line.endswith(b"\n"):
            raise BadLineError("cut last line", "the file ends inside a record; write it again") from error
        raise BadLineError("not JSON", f"{error}; write one JSON object a line") from error
    if is_deep(value):
        raise BadLineError("nested too deeply", f"more than {DEEPEST} levels; flatten it")
    if not isinstance(value, dict):
        raise BadLineError("not an object", f'it is {_kind(value)}; write an object such as {{"text": "..."}}')
    if _SURROGATE_ESCAPE.search(line) and not is_text(value):
        remedy = "half of a \\ud83d\\ude00 pair is not a character; write both halves or none"
        raise BadLineError("lone surrogate", remedy)
    return value


def is_deep(value: Any) -> bool:
    """Whether something in what JSON gave lies more than DEEPEST levels down, where a walk by recursion would fail."""
    level = [value]
    for _ in range(DEEPEST):
        level = [
            item
            for holder in level
            if isinstance(holder, dict | list)
            for item in (holder.values() if isinstance(holder, dict) else holder)
        ]
        if not level:
            return False
    return True


# --- Forms ---


def pretraining_text(value: dict[str, Any]) -> dict[str, Any]:
    """The record, when it is `{"text"}`; this and what follows raise BadLineError for another one."""
    if "text" not in value:
        raise BadLineError("no text field", f"found {_keys(value)}; name the field text, or choose another --stage")
    text = _string(value["text"], "text")
    if not text.strip():
        raise BadLineError("text is empty", "delete the line")
    return value


def conversation(value: dict[str, Any], key: str = "conversations") -> dict[str, Any]:
    """The record, when there are messages under `key` that end with an answer."""
    if key not in value:
        raise BadLineError(f"no {key} field", f"found {_keys(value)}; name the field {key}, or choose another --stage")
    messages = value[key]
    if not isinstance(messages, list):
        raise BadLineError(f"{key} is not a list", f"it is {_kind(messages)}; write a list of messages")
    if not messages:
        raise BadLineError(f"{key} is empty", "delete the line")
    value[key] = [_message(message) for message in messages]
    for number, message in enumerate(value[key]):
        if _parsed_list(message, "tools") and (number > 0 or message["role"] != "system"):
            raise BadLineError(
                "tools are not in the first system message", "put them there; elsewhere nobody reads them"
            )
    if value.get("tools"):
        raise BadLineError(f"tools are beside {key}", "put them into the first message, a system one")
    roles = [message["role"] for message in value[key]]
    turns = [role for role in roles if role != "system"]
    if not turns:
        raise BadLineError("only system messages", "add a user and an assistant message, or delete the line")
    if turns[0] != "user":
        raise BadLineError(f"{turns[0]} speaks first", "begin with a user message (a system message may precede it)")
    if roles[-1] != "assistant":
        raise BadLineError(f"ends with {roles[-1]}", "end with an assistant message: there is no answer to learn")
    return value


def pair(value: dict[str, Any]) -> dict[str, Any]:
    """The record, when it is two answers to one conversation."""
    value = conversation(conversation(value, "chosen"), "rejected")
    for ours, theirs in itertools.zip_longest(value["chosen"], value["rejected"]):
        if ours != theirs:
            if not (ours and theirs and ours["role"] == theirs["role"] == "assistant"):
                raise BadLineError(
                    "chosen and rejected differ before the answer",
                    "a pair is two answers to one conversation: up to an assistant message both must be the same",
                )
            break
    return value


def any_form(value: dict[str, Any]) -> dict[str, Any]:
    """The record, in whichever of the three forms its fields say."""
    if "conversations" in value:
        return conversation(value)
    if "chosen" in value:
        return pair(value)
    if "text" not in value:
        names = "text, conversations, or chosen and rejected"
        raise BadLineError("neither text nor conversation", f"found {_keys(value)}; name the field {names}")
    return pretraining_text(value)


def _message(value: Any) -> dict[str, Any]:
    """One message, with every null field read as absent (and a null content beside tool calls as empty)."""
    if not isinstance(value, dict):
        raise BadLineError("message is not an object", f'it is {_kind(value)}; write {{"role", "content"}}')
    message: dict[str, Any] = {
        key: item for key, item in value.items() if item is not None or key in ("role", "content")
    }
    role = message.get("role")
    if role not in _ROLES:
        raise BadLineError("unknown role", f"{role!r} is not one of {', '.join(_ROLES)}; rename it")
    calls = _parsed_list(message, "tool_calls")
    if calls and role != "assistant":
        raise BadLineError(f"{role} has tool_calls", "only an assistant calls tools; delete them")
    for call in calls:
        _require_call(call)
    if message.get("content") is None and calls:
        message["content"] = ""
    content = _string(message.get("content"), "content")
    reasoning = _string(message.get("reasoning_content", ""), "reasoning_content")
    # A system message may carry tools alone, and a tool may answer nothing.
    if role == "user" and not content.strip():
        raise BadLineError("user content is empty", "write the question, or delete the line")
    if role == "assistant" and not (content.strip() or reasoning.strip() or calls):
        raise BadLineError("assistant content is empty", "write the answer, or delete the line")
    if not all(isinstance(tool, dict) for tool in _parsed_list(message, "tools")):
        raise BadLineError("a tool is not an object", 'write its description, such as {"name", "parameters"}')
    return message


def _parsed_list(message: dict[str, Any], key: str) -> list[Any]:
    """The list in a field that may hold it as JSON in a string; empty where there is none."""
    value = message.get(key, [])
    if isinstance(value, str):
        try:
            value = (json.loads(value) if value.strip() else None) or []
        except RecursionError as error:
            raise BadLineError("nested too deeply", f"in {key}; flatten it") from error
        except ValueError as error:
            raise BadLineError(f"{key} is a string that is not JSON", f"{error}; write a list") from error
        if is_deep(value):
            raise BadLineError("nested too deeply", f"more than {DEEPEST} levels in {key}; flatten it")
        if _SURROGATE_ESCAPE.search(message[key].encode("utf-8")) and not is_text(value):
            raise BadLineError("lone surrogate", f"in {key}; write both halves of a character or none")
    if not isinstance(value, list):
        remedy = f"it is {_kind(value)}; write a list, or its JSON as a string"
        raise BadLineError(f"{key} is not a string or list", remedy)
    return value


def _require_call(call: Any) -> None:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadLineError("a tool call has no name", 'write {"name": "...", "arguments": {...}}')
    if not isinstance(function.get("arguments", {}), dict | str | None):
        raise BadLineError("the arguments of a tool call are no object", "write an object, or its JSON as a string")


def is_text(value: Any) -> bool:
    """Whether every string in it can be written as UTF-8."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _string(value: Any, name: str) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        raise BadLineError(f"{name} is null", f"write a string in {name}")
    raise BadLineError(f"{name} is not a string", f"it is {_kind(value)}; put it in quotes")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")


def _keys(value: dict[str, Any]) -> str:
    return ", ".join(sorted(value)[:5]) or "no field at all"
