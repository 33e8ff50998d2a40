"""The command line of scripts/train.py: options, a config file beneath them, and MiniMind's names for them.

Framework-free.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from minigpt_jax.cli import parse
from minigpt_jax.config import TrainConfig, from_json, read_json_object
from minigpt_jax.errors import UserError

MINIMIND_NAMES = {"--data-path": "--data", "--num-hidden-layers": "--num-layers"}
"""MiniMind's names of options that take the same value here."""


@dataclass(frozen=True)
class TrainCommand(TrainConfig):
    """Train a model. What is not given is chosen to fit the machine and the data, and said."""

    config: str | None = None
    """A JSON file with any of these options by name (underscores); the command line overrides it."""
    dry_run: bool = False
    """Print parameters, memory and time expected, and stop."""
    json: str | None = None
    """With --dry-run: write the figures to this file as well."""

    def train_config(self) -> TrainConfig:
        """The part that describes the run."""
        return TrainConfig(**{field.name: getattr(self, field.name) for field in dataclasses.fields(TrainConfig)})


@dataclass(frozen=True)
class Request:
    """What the person asked for, and which fields of TrainConfig they really set."""

    command: TrainCommand
    given: frozenset[str]


def read_command_line(arguments: list[str]) -> Request:
    """The command line, on top of --config's file where one is named.

    Raises:
        UserError: an unknown option, or a value that cannot be.
        SystemExit: with code 0, after --help was printed.
    """
    arguments = list(_own_names(arguments))
    given = {argument[2:].split("=")[0].replace("-", "_") for argument in arguments if argument.startswith("--")}
    given |= {name.removeprefix("no_") for name in given}
    command = parse(TrainCommand, arguments)
    if command.config is not None:
        fields = read_json_object(Path(command.config))
        base = dataclasses.asdict(from_json(TrainConfig, fields, where=command.config))
        # One of the two lengths on the command line replaces the other one in the file.
        if given & {"steps", "epochs"}:
            base |= {"steps": None, "epochs": None}
        command = parse(TrainCommand, arguments, default=TrainCommand(**base))
        given |= set(fields)
    for name in ("data", "val_data"):
        if name in given and not getattr(command, name):
            raise UserError(f"--{name.replace('_', '-')} names no file")
    if command.json is not None and not command.dry_run:
        raise UserError("--json writes the figures of --dry-run; add --dry-run, or leave it out")
    return Request(command, frozenset(given & {field.name for field in dataclasses.fields(TrainConfig)}))


def _own_names(arguments: list[str]) -> Iterator[str]:
    """The arguments with MiniMind's options as ours; `--name=value` comes as two."""
    rest = iter([part for argument in arguments for part in _split(argument)])
    for argument in rest:
        if argument == "--use-wandb":
            yield from ("--tracker", "wandb")
        elif argument in ("--from-resume", "--use-moe"):
            value = next(rest, "")
            if value not in ("0", "1"):
                raise UserError(f"{argument} must be 0 or 1, got {value!r}")
            if argument == "--use-moe" and value == "1":
                raise UserError("--use-moe 1: this version has no mixture of experts; leave it out")
            if argument == "--from-resume" and value == "1":
                yield "--resume"
        elif argument == "--from-weight":
            value = next(rest, "")
            if value != "none":
                yield from ("--init-from", value)
        else:
            yield MINIMIND_NAMES.get(argument, argument)


def _split(argument: str) -> list[str]:
    if not argument.startswith("--"):
        return [argument]
    name, equals, value = argument.partition("=")
    return [name.replace("_", "-"), value] if equals else [name.replace("_", "-")]
