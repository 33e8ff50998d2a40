"""Train a model: `python scripts/train.py` alone trains on the sample corpus; `--help` lists every option."""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path

from minigpt_jax.cli import parse, run_with
from minigpt_jax.config import TrainConfig, from_json, read_json_object
from minigpt_jax.dry_run import expected_cost, write_json
from minigpt_jax.errors import UserError

# MiniMind's names of options that mean the same here.
MINIMIND_NAMES = {
    "--data-path": "--data",
    "--from-weight": "--init-from",
    "--num-hidden-layers": "--num-layers",
}


@dataclass(frozen=True)
class Command(TrainConfig):
    """Train a model. What is not given is chosen to fit the machine and the data, and said."""

    config: str | None = None
    """A JSON file with any of these options by name (underscores); the command line overrides it."""
    dry_run: bool = False
    """Print parameters, memory and time expected, and stop."""
    json: str | None = None
    """With --dry-run: write the figures to this file as well."""


@dataclass(frozen=True)
class Request:
    """What the person asked for, and which fields they really set."""

    command: Command
    given: frozenset[str]


def read_command_line(arguments: list[str]) -> Request:
    """The command line, on top of --config's file where one is named."""
    arguments = [_own_name(argument) for argument in arguments]
    given = {argument[2:].split("=")[0].replace("-", "_") for argument in arguments if argument.startswith("--")}
    given |= {name.removeprefix("no_") for name in given}
    command = parse(Command, arguments)
    for name in ("data", "val_data"):
        if name in given and not getattr(command, name):
            raise UserError(f"--{name.replace('_', '-')} names no file")
    if command.config is not None:
        fields = read_json_object(Path(command.config))
        base = from_json(TrainConfig, fields, where=command.config)
        command = parse(Command, arguments, default=Command(**dataclasses.asdict(base)))
        given |= set(fields)
    return Request(command, frozenset(given & {field.name for field in dataclasses.fields(TrainConfig)}))


def _own_name(argument: str) -> str:
    name, equals, value = argument.partition("=")
    dashed = name.replace("_", "-")
    return MINIMIND_NAMES.get(dashed, dashed) + equals + value if name.startswith("--") else argument


def main(request: Request) -> None:
    """Train, or say what training would take."""
    from minigpt_jax.engine import JaxEngine, accelerator, matmul_flops
    from minigpt_jax.launch import launch

    fields = {field.name: getattr(request.command, field.name) for field in dataclasses.fields(TrainConfig)}
    config = TrainConfig(**fields)
    if request.command.dry_run:
        figures = expected_cost(config, accelerator=accelerator(), matmul_flops=matmul_flops)
        for name, value in figures.items():
            print(f"{name:24} {value:,}" if isinstance(value, int | float) else f"{name:24} {value}")
        if request.command.json is not None:
            write_json(figures, Path(request.command.json))
        return
    result = launch(config, given=request.given, make_engine=JaxEngine, accelerator=accelerator())
    sys.exit({"finished": 0, "interrupted": 130, "not finite": 1}[result.ending])


if __name__ == "__main__":
    run_with(main, lambda: read_command_line(sys.argv[1:]))
