"""Configurations from and to JSON, with every field checked by its annotation. Framework-free."""

import dataclasses
from typing import Any, TypeVar, get_args

from minigpt_jax.config import ModelConfig, TrainConfig
from minigpt_jax.errors import UserError

Config = TypeVar("Config", ModelConfig, TrainConfig)


def to_json(config: ModelConfig | TrainConfig) -> dict[str, Any]:
    """All fields of `config`, ready for `json.dumps`."""
    return dataclasses.asdict(config)


def from_json(kind: type[Config], fields: dict[str, Any], *, where: str) -> Config:
    """A config of `kind` from JSON fields.

    Args:
        kind: ModelConfig or TrainConfig.
        fields: as `to_json` gives them; missing ones take their defaults.
        where: the file, named in errors.

    Raises:
        UserError: an unknown field, a value of the wrong type or choice, or one that cannot work.
    """
    known = {f.name: f for f in dataclasses.fields(kind)}
    unknown = sorted(set(fields) - set(known))
    _require(not unknown, f"{where}: unknown field {', '.join(unknown)}; known are {', '.join(known)}")
    values = {name: _checked(name, known[name].type, value, where=where) for name, value in fields.items()}
    try:
        return kind(**values)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _checked(name: str, annotation: Any, value: Any, *, where: str) -> Any:
    """`value` when it fits the field's annotation (`int | None`, `Literal[...]`, `tuple[str, ...]`, ...)."""
    options = get_args(annotation)
    if annotation == tuple[str, ...]:
        _require(
            isinstance(value, list | tuple) and all(isinstance(item, str) for item in value),
            f"{where}: {name} must be a list of strings, got {value!r}",
        )
        return tuple(value)
    kinds = [option for option in options if isinstance(option, type)] or [annotation]
    choices = [option for option in options if isinstance(option, str)]
    for option in options:
        choices += [choice for choice in get_args(option) if isinstance(choice, str)]
    if choices:
        allowed = choices + ([None] if type(None) in options else [])
        _require(value in allowed, f"{where}: {name} must be one of {', '.join(choices)}, got {value!r}")
        return value
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise UserError(f"{where}: {name} is beyond any float") from None
    fits = any(type(value) is kind for kind in kinds)
    expected = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
    _require(fits, f"{where}: {name} must be {expected}, got {value!r}")
    return value


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)
