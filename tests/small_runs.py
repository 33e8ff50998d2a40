"""Runs small enough for a test: a one-block model of width 32 on a few short documents."""

import hashlib
import json
import signal
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from minigpt_bridge.models import open_model
from minigpt_jax.checkpoint import CheckpointStore
from minigpt_jax.config import TrainConfig
from minigpt_jax.data.batching import Batch
from minigpt_jax.engine import JaxEngine
from minigpt_jax.launch import Result, launch
from minigpt_jax.trainer import StepReport

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
    fields: dict[str, Any] = {
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
        fields["steps"] = 6
    return TrainConfig(**(fields | changes))


def train(config: TrainConfig, make_engine: Callable[..., Any] = JaxEngine) -> Result:
    """`launch`, with every field that differs from its default taken as given."""
    default = TrainConfig()
    given = {name for name in vars(default) if getattr(config, name) != getattr(default, name)}
    return launch(config, given=given, make_engine=make_engine, accelerator=None, open_model=open_model)


def state_digest(run: Path, step: int) -> str:
    """SHA-256 of every array of checkpoint `step`, names and dtypes included."""
    digest = hashlib.sha256()
    for name, tree in saved_trees(run, step).items():
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        for path, leaf in sorted(leaves, key=lambda item: jax.tree_util.keystr(item[0])):
            array = np.asarray(leaf)
            digest.update(f"{name}{jax.tree_util.keystr(path)}{array.dtype}{array.shape}".encode())
            digest.update(array.tobytes())
    return digest.hexdigest()


def saved_trees(run: Path, step: int) -> dict[str, Any]:
    """Everything that checkpoint `step` holds."""
    store = CheckpointStore(run / "checkpoints", keep=100)
    with warnings.catch_warnings(action="ignore"):  # orbax would rather be told the placement
        trees = {name: store.load(step, name, None) for name in ("parameters", "optimizer")}
    store.close()
    return trees


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


def interrupted_at(micro_batch: int) -> Callable[..., JaxEngine]:
    """An engine during whose `micro_batch` somebody presses Ctrl-C."""

    class Interrupted(JaxEngine):
        def train_step(self, batch: Batch) -> Any:
            if batch.index == micro_batch:
                signal.raise_signal(signal.SIGINT)
            return super().train_step(batch)

    return Interrupted


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
