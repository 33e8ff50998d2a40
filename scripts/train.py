"""Train a model: `python scripts/train.py` alone trains on the sample corpus; `--help` lists every option."""

import sys
from pathlib import Path

from minigpt_jax.cli import run_with
from minigpt_jax.dry_run import expected_cost
from minigpt_jax.files import require_writable, write_json
from minigpt_jax.run_directory import backend_of
from minigpt_jax.train_command import Request, read_command_line

EXIT_CODES = {"finished": 0, "interrupted": 130, "not finite": 1}


def main(request: Request) -> None:
    """Train, or say what training would take."""
    from minigpt_bridge.engines import choose_engine
    from minigpt_bridge.models import open_model
    from minigpt_jax.launch import launch

    config = request.command.train_config()
    if request.command.json is not None:
        require_writable(Path(request.command.json), option="--json")
    engine = choose_engine(backend_of(config, request.given))
    if request.command.dry_run:
        figures = expected_cost(
            config, accelerator=engine.accelerator, matmul_flops=engine.matmul_flops, open_model=open_model
        )
        for name, value in figures.items():
            print(f"{name:24} {value:,}" if isinstance(value, int) else f"{name:24} {value}")
        if request.command.json is not None:
            write_json(Path(request.command.json), figures)
        return
    result = launch(
        config, given=request.given, make_engine=engine.make, accelerator=engine.accelerator, open_model=open_model
    )
    sys.exit(EXIT_CODES[result.ending])


if __name__ == "__main__":
    run_with(main, lambda: read_command_line(sys.argv[1:]))
