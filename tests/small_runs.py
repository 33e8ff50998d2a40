"""Runs small enough for a test: a one-block model of width 32 on a few short documents."""

import contextlib
import hashlib
import io
import json
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minigpt_bridge.engines import choose_engine
from minigpt_bridge.models import open_model, read_tree
from minigpt_jax.config import TrainConfig
from minigpt_jax.data.batching import Batch
from minigpt_jax.engine import JaxEngine
from minigpt_jax.formats.names import flatten
from minigpt_jax.launch import Result, launch
from minigpt_jax.trainer import StepReport

MakeEngine = Callable[..., Any]

TIMES = {
    "tokens_per_second", "supervised_tokens_per_second", "model_flops_utilization", "wall_seconds",
    "device_memory_bytes",
}  # fmt: skip
"""Metrics that measure the machine, not the run."""


def write_documents(path: Path, count: int = 60) -> Path:
    """`count` documents of unlike length."""
    generator = np.random.default_rng(7)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "big", "dogs", "run", "past", "old", "red", "houses"]
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            text = f"{number}: " + " ".join(generator.choice(words, generator.integers(3, 40)))
            file.write(json.dumps({"text": text}) + "\n")
    return path


def small_config(directory: Path, **changes: Any) -> TrainConfig:
    """A run of a few seconds."""
    data = directory / "data.jsonl"
    if not data.exists():
        write_documents(data)
    values: dict[str, Any] = {
        "model": "tiny",
        "hidden_size": 32,
        "num_layers": 1,
        "data": (str(data),),
        "out": str(directory / "run"),
        "batch_size": 2,
        "max_seq_len": 32,
        "learning_rate": 3e-3,
        "save_interval": 2,
        "eval_interval": 2,
        "log_interval": 1,
    }
    if "epochs" not in changes:
        values["steps"] = 6
    return TrainConfig(**(values | changes))


def train(config: TrainConfig, make_engine: MakeEngine | None = None, *, stop_at: int | None = None) -> Result:
    """`launch`, with every field that differs from its default taken as given, and the backend.

    Args:
        config: the run.
        make_engine: in place of the engine that `config` names.
        stop_at: the micro-batch during which somebody presses Ctrl-C.
    """
    given = {field.name for field in fields(config) if getattr(config, field.name) != field.default} | {"backend"}
    make_engine = make_engine or choose_engine(config.backend).make

    def interrupted(*arguments: Any, **options: Any) -> Any:
        engine = make_engine(*arguments, **options)
        step = engine.train_step

        def train_step(batch: Batch) -> Any:
            if batch.index == stop_at:
                signal.raise_signal(signal.SIGINT)
            return step(batch)

        engine.train_step = train_step
        return engine

    return launch(config, given=given, make_engine=interrupted, accelerator=None, open_model=open_model)


def as_typed(script: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """What a script does with these arguments, in this process: loading everything anew would take seconds."""
    before, sys.argv = sys.argv, [str(script), *arguments]
    out, err, code = io.StringIO(), io.StringIO(), 0
    try:
        with contextlib.chdir(cwd), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ending:
        code = int(ending.code or 0)
    finally:
        sys.argv = before
    return subprocess.CompletedProcess([str(script), *arguments], code, out.getvalue(), err.getvalue())


def saved_arrays(run: Path, step: int) -> dict[str, NDArray[Any]]:
    """Every array of checkpoint `step`, of either engine, by its path."""
    return {
        f"{name}.{path}": np.asarray(leaf)
        for name in ("parameters", "optimizer")
        for path, leaf in flatten(read_tree(run / "checkpoints", step, name)).items()
    }


def state_digest(run: Path, step: int) -> str:
    """SHA-256 of every array of checkpoint `step`, names and dtypes included."""
    digest = hashlib.sha256()
    for path, array in sorted(saved_arrays(run, step).items()):
        digest.update(f"{path}{array.dtype}{array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def timeless_metrics(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what measures the machine."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{name: value for name, value in json.loads(line).items() if name not in TIMES} for line in lines]


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    """The events of one kind."""
    lines = (run / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for line in lines if (event := json.loads(line))["kind"] == kind]


def poisoned(is_bad: Callable[[int], bool]) -> Callable[..., JaxEngine]:
    """An engine whose loss overflows for the micro-batches whose number `is_bad`."""

    class Poisoned(JaxEngine):
        def train_step(self, batch: Batch) -> Any:
            if is_bad(batch.index):
                batch = replace(batch, loss_weights=batch.loss_weights * np.float32(1e36))
            return super().train_step(batch)

    return Poisoned


def failing(error: Exception, *, after: int, engine: Any = JaxEngine) -> Callable[..., JaxEngine]:
    """An engine that raises `error` when the numbers of more than `after` micro-batches are read."""

    class Failing(engine):
        reads = 0

        def read(self, handles: Any) -> list[StepReport]:
            self.reads += len(handles)
            if self.reads > after:
                raise error
            return super().read(handles)

    return Failing
