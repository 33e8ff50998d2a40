"""The engine of either framework by its name, and checkpoints that a run takes along when it changes engines."""

import shutil
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from minigpt_bridge.models import float64_stays, read_orbax_tree
from minigpt_jax.config import Backend, ModelConfig, TrainConfig
from minigpt_jax.errors import missing_extra
from minigpt_jax.formats.checkpoints import TREES, SafetensorsStore, holds_safetensors
from minigpt_jax.launch import EngineFactory


class EngineChoice(NamedTuple):
    """An engine and the machine it found."""

    make: EngineFactory
    accelerator: str | None
    """The platform when it is not a CPU: "gpu", "tpu", "mps"."""
    matmul_flops: Callable[[Any], float]
    """dtype name -> FLOPs per second of a large matrix product, measured."""


def choose_engine(backend: Backend) -> EngineChoice:
    """The engine of `backend`.

    Raises:
        UserError: PyTorch is not installed.
    """
    module: Any
    if backend == "jax":
        from minigpt_jax import engine as module

        engine = module.JaxEngine
    else:
        try:
            from minigpt_torch import engine as module
        except ModuleNotFoundError as error:
            raise missing_extra("--backend torch", "torch") from error
        engine = module.TorchEngine

    def make(
        model: ModelConfig,
        train: TrainConfig,
        *,
        total_updates: int,
        checkpoints: Path,
        teacher: ModelConfig | None = None,
    ) -> Any:
        made = engine(model, train, total_updates=total_updates, checkpoints=checkpoints, teacher=teacher)
        if train.resume:
            take_over(checkpoints, backend)
        return made

    return EngineChoice(make, module.accelerator(), module.matmul_flops)


def take_over(checkpoints: Path, backend: Backend) -> None:
    """Rewrite a run's checkpoints in the format of `backend`'s engine, when the other engine wrote them.

    Everything is written beside the old directory first, which is then replaced; a crash loses neither.

    Raises:
        UserError: a checkpoint is damaged, or one cannot be written.
    """
    replaced = checkpoints.with_name(f"{checkpoints.name}.old")
    if replaced.exists():  # a crash came between the last three lines
        if checkpoints.exists():
            shutil.rmtree(replaced)
        else:
            replaced.rename(checkpoints)
    source = SafetensorsStore(checkpoints, keep=sys.maxsize)
    if not source.steps or holds_safetensors(checkpoints) == (backend == "torch"):
        return
    rewritten = checkpoints.with_name(f"{checkpoints.name}.{backend}")
    shutil.rmtree(rewritten, ignore_errors=True)
    if backend == "torch":
        _write_safetensors(checkpoints, rewritten)
    else:
        _write_orbax(source, rewritten)
    checkpoints.rename(replaced)
    rewritten.rename(checkpoints)
    shutil.rmtree(replaced)


def _write_safetensors(checkpoints: Path, rewritten: Path) -> None:
    from minigpt_jax.checkpoint import CheckpointStore

    target = SafetensorsStore(rewritten, keep=sys.maxsize)
    with closing(CheckpointStore(checkpoints, keep=1, read_only=True)) as source:
        for step in source.steps:
            trees = {name: read_orbax_tree(source, step, name) for name in TREES}
            target.save(step, trees, progress=source.progress(step), val_loss=source.val_loss(step))


def _write_orbax(source: SafetensorsStore, rewritten: Path) -> None:
    import jax

    from minigpt_jax.checkpoint import CheckpointStore

    # In 64 bits float64 stays float64; `closing` waits for the last save.
    with float64_stays(), closing(CheckpointStore(rewritten, keep=sys.maxsize)) as target:
        for step in source.steps:
            trees = {name: jax.tree.map(jax.numpy.asarray, source.load(step, name)) for name in TREES}
            target.save(step, trees, progress=source.progress(step), val_loss=source.val_loss(step))
