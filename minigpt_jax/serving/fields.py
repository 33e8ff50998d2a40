"""Reading what a client sent, field by field. Framework-free.

What is wrong is named in OpenAI's form of an error, with the field in `param`. null is read as absent.
"""

import json
import math
from typing import Any

from minigpt_jax.data.record_forms import is_deep, is_text


class RequestError(Exception):
    """Why a request is not answered.

    Args:
        message: what is wrong, and how to mend it.
        param: the field, such as "messages[1].content".
        code: the kind of fault, for programs.
        status: of the HTTP answer.
        headers: of the HTTP answer.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.message, self.param, self.code, self.status, self.headers = message, param, code, status, headers

    @property
    def body(self) -> dict[str, Any]:
        """The error as OpenAI's server would write it."""
        kinds = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
        kind = kinds.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def parse_json(text: str) -> Any:
    """What JSON stands for, if all of it can be written as JSON and as UTF-8 again.

    Raises:
        ValueError: it is not JSON, has a number that is not finite or too long, half of a character, or is nested
            too deeply.
    """
    try:
        value = json.loads(text, parse_constant=_refused_number, parse_float=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if is_deep(value):
        raise ValueError("it is nested too deeply")
    if not is_text(value):
        raise ValueError("it has half of a \\ud83d\\ude00 pair, which is not a character")
    return value


class Fields:
    """The fields of one JSON object, each taken once.

    Args:
        value: the object.
        where: its place in the body; empty for the body itself.

    Raises:
        RequestError: it is no object.
    """

    def __init__(self, value: Any, where: str = ""):
        self._where = where
        if not isinstance(value, dict):
            raise RequestError(
                f"{where or 'the body'} must be a JSON object, not {kind_of(value)}",
                param=where or None,
                code="invalid_type",
            )
        self._values = {name: item for name, item in value.items() if item is not None}

    def path(self, name: str) -> str:
        """Where a field is in the body."""
        return f"{self._where}.{name}" if self._where else name

    def take(self, name: str) -> Any:
        """A field as it is; None where there is none."""
        return self._values.pop(name, None)

    def text(self, name: str) -> str | None:
        """A string."""
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong_type(name, "a string", value)
        return value

    def required_text(self, name: str) -> str:
        """A string that has to be there."""
        value = self.text(name)
        if value is None:
            raise self.missing(name)
        return value

    def flag(self, name: str) -> bool:
        """True or false; false where there is none."""
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong_type(name, "true or false", value)
        return bool(value)

    def integer(self, name: str, *, least: int, most: int) -> int | None:
        """A whole number, both bounds included."""
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong_type(name, "a whole number", value)
        if not least <= value <= most:
            raise self.wrong(name, f"must lie between {least} and {most}")
        return value

    def number(self, name: str, *, least: float, most: float, may_be_least: bool = True) -> float | None:
        """A number, the upper bound included, the lower one if it `may_be_least`."""
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong_type(name, "a number", value)
        if not least <= value <= most or (value == least and not may_be_least):
            low = f"at least {least:g}" if may_be_least else f"above {least:g}"
            raise self.wrong(name, f"must be {low} and at most {most:g}")
        return float(value)

    def items(self, name: str) -> list[Any] | None:
        """A list."""
        value = self.take(name)
        if value is not None and not isinstance(value, list):
            raise self.wrong_type(name, "a list", value)
        return value

    def require_empty(self) -> None:
        """Refuse a field that nobody took: a misspelled name would otherwise change nothing, silently."""
        for name in self._values:
            raise RequestError(
                f"{self.path(name)} is not a field that this server knows",
                param=self.path(name),
                code="unknown_parameter",
            )

    def missing(self, name: str) -> RequestError:
        """The error for a field that has to be there."""
        return RequestError(f"{self.path(name)} is missing", param=self.path(name), code="missing_required_parameter")

    def wrong_type(self, name: str, wanted: str, value: Any) -> RequestError:
        """The error for a field of another type."""
        return RequestError(
            f"{self.path(name)} must be {wanted}, not {kind_of(value)}", param=self.path(name), code="invalid_type"
        )

    def wrong(self, name: str, why: str, *, code: str = "invalid_value") -> RequestError:
        """The error for a value that cannot be."""
        return RequestError(f"{self.path(name)} {why}", param=self.path(name), code=code)


def kind_of(value: Any) -> str:
    """The type of a JSON value in words."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _refused_number(name: str) -> float:
    raise ValueError(f"{name} is not a number that JSON has")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:20]} is too large a number")
    return number
