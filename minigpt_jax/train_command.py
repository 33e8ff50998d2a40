"""The command line of scripts/train.py: options, beneath them a config file and a recipe, and MiniMind's names.

Framework-free.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minigpt_jax.cli import parse
from minigpt_jax.config import Stage, TrainConfig
from minigpt_jax.config_json import from_json
from minigpt_jax.errors import UserError
from minigpt_jax.files import read_json_object
from minigpt_jax.recipes import RecipeName, recipe_fields
from minigpt_jax.run_directory import existing_run_directory

MINIMIND_NAMES = {"--data-path": "--data", "--num-hidden-layers": "--num-layers"}
"""MiniMind's names of options that take the same value here."""

LENGTHS = {"steps", "epochs"}
"""Options of which one replaces the other where it stands higher."""


@dataclass(frozen=True)
class TrainCommand(TrainConfig):
    """Train a model. What is not given is chosen to fit the machine and the data, and said."""

    config: str | None = None
    """A JSON file with any of these options by name (underscores); the command line overrides it."""
    recipe: RecipeName = "default"
    """A set of options from elsewhere, beneath --config and the command line; docs/recipes.md has every value.
    default: none, what fits the machine and the data. minimind: as the released MiniMind of late 2025 was trained,
    its schedule from 1.1 times the rate among it. writeup-a: a write-up's 1000 updates of 4 x 4 rows with decay 0.01.
    writeup-b: rate 6e-4, decay 0.1, Xavier weights, adapters of rank 8. writeup-c: 8 padded rows, a checkpoint and a
    validation every 50 updates."""
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
    """The command line, on top of --config's file and, beneath that, --recipe's values.

    Raises:
        UserError: an unknown option, or a value that cannot be.
        SystemExit: with code 0, after --help was printed.
    """
    arguments = list(_own_names(arguments))
    typed = [argument[2:].replace("-", "_") for argument in arguments if argument.startswith("--")]
    for name in ("data", "val_data", "mix_data", "lora_targets"):
        if typed.count(name) > 1:
            raise UserError(f"--{name.replace('_', '-')} is there twice; write everything after one of them")
    given = set(typed)
    given |= {name.removeprefix("no_") for name in given}
    command = parse(TrainCommand, arguments)
    beneath, stage = _beneath(command, given)
    if beneath:
        where = command.config or f"--recipe {command.recipe}"
        base = dataclasses.asdict(from_json(TrainConfig, {**beneath, "stage": stage}, where=where))
        if given & LENGTHS:
            base |= dict.fromkeys(LENGTHS)
        command = parse(TrainCommand, arguments, default=TrainCommand(**base))
        given |= set(beneath)
    for name in ("data", "val_data", "mix_data"):
        if name in given and not getattr(command, name):
            raise UserError(f"--{name.replace('_', '-')} names no file")
    if "initializer" in typed and command.init_from is not None:
        raise UserError(
            "--initializer draws a model's first weights, and --init-from brings some; leave one of them out"
        )
    if command.json is not None and not command.dry_run:
        raise UserError("--json writes the figures of --dry-run; add --dry-run, or leave it out")
    return Request(command, frozenset(given & {field.name for field in dataclasses.fields(TrainConfig)}))


def _beneath(command: TrainCommand, given: set[str]) -> tuple[dict[str, Any], Stage]:
    """What the config file and, beneath it, the recipe set, and the stage of the run."""
    fields = {} if command.config is None else read_json_object(Path(command.config))
    stage = command.stage if "stage" in given else fields.get("stage", command.stage)
    if command.recipe == "default":
        return fields, stage
    if command.resume and "stage" not in given | set(fields):
        # The run knows its stage, so nobody has to name it again.
        _, stored = existing_run_directory(command.out).read_config()
        stage = stored.stage
    stage = from_json(TrainConfig, {"stage": stage}, where=command.config or "--stage").stage
    recipe = recipe_fields(command.recipe, stage)
    if set(fields) & LENGTHS:
        recipe = {name: value for name, value in recipe.items() if name not in LENGTHS}
    return {**recipe, **fields}, stage


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
