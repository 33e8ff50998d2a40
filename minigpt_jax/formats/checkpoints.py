"""Checkpoints as safetensors files: what the PyTorch engine writes, and what crosses between the frameworks.

Framework-free. A checkpoint is <directory>/<step>/ with `parameters.safetensors`, `optimizer.safetensors` and
`progress.json`. It is written under another name and renamed when it is whole, so a checkpoint that exists is whole;
what a killed save left is removed by the next one.

Both frameworks' checkpoints hold the same two trees, in the layout of minigpt_jax/initialization.py:

    parameters   the model's
    optimizer    first_moment, second_moment, gradient_sums: trees like `parameters`; token_sum, micro_steps, updates,
                 grad_norm, learning_rate_scale: scalars
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from minigpt_jax.errors import UserError
from minigpt_jax.files import read_json_object
from minigpt_jax.formats.names import flatten, require_fit, unflatten

TREES = ("parameters", "optimizer")


class SafetensorsStore:
    """The checkpoints directory of one run.

    Args:
        directory: created at the first save.
        keep: newest checkpoints to keep; the one with the lowest validation loss is kept besides.
    """

    def __init__(self, directory: Path, *, keep: int):
        self.directory, self.keep = directory, keep

    @property
    def steps(self) -> list[int]:
        """Steps of the finished checkpoints, ascending."""
        return sorted(int(path.name) for path in self.directory.glob("*") if path.name.isdigit())

    @property
    def best_step(self) -> int | None:
        """The checkpoint with the lowest validation loss; None when none was validated."""
        scored = [(loss, step) for step in self.steps if (loss := self.val_loss(step)) is not None]
        return min(scored)[1] if scored else None

    def save(self, step: int, trees: Mapping[str, Any], *, progress: Mapping[str, Any], val_loss: float | None) -> None:
        """Write one checkpoint, then remove those that are no longer kept. A step that exists is left as it is.

        Raises:
            UserError: it could not be written.
        """
        if step in self.steps:
            return
        unfinished = self.directory / f".{step}.{os.getpid()}.tmp"
        try:
            for abandoned in self.directory.glob(".*.tmp"):
                shutil.rmtree(abandoned)
            unfinished.mkdir(parents=True)
            for name in TREES:
                arrays = {path: np.asarray(leaf) for path, leaf in flatten(trees[name]).items()}
                save_file(arrays, unfinished / f"{name}.safetensors")
            fields = {"progress": dict(progress), "val_loss": val_loss}
            (unfinished / "progress.json").write_text(json.dumps(fields) + "\n", encoding="utf-8")
            for path in (*unfinished.iterdir(), unfinished):
                _flush_to_disk(path)
            unfinished.rename(self.directory / str(step))
        except (OSError, SafetensorError) as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"cannot write a checkpoint to {self.directory}: {reason}") from error
        kept = {*self.steps[-self.keep :], self.best_step}
        for old in self.steps:
            if old not in kept:
                shutil.rmtree(self.directory / str(old))

    def load(self, step: int, name: str, like: Mapping[Any, Any] | None = None) -> dict[Any, Any]:
        """The tree called `name` of checkpoint `step`.

        Args:
            step: of a finished checkpoint.
            name: one of `TREES`.
            like: a tree whose paths, shapes and dtypes it must have.

        Raises:
            UserError: the checkpoint is damaged, or unlike `like`.
        """
        try:
            leaves = load_file(self.directory / str(step) / f"{name}.safetensors")
        except (SafetensorError, OSError) as error:
            raise self._damaged(step, error) from error
        if like is not None:
            expected = {path: np.asarray(leaf) for path, leaf in flatten(like).items()}
            require_fit(leaves, {p: leaf.shape for p, leaf in expected.items()}, where=str(self.directory / str(step)))
            for path, leaf in expected.items():
                if leaves[path].dtype != leaf.dtype:
                    raise self._damaged(step, UserError(f"{path} is {leaves[path].dtype}, not {leaf.dtype}"))
        return unflatten(leaves)

    def progress(self, step: int) -> dict[str, Any]:
        """The loop's progress that was saved with checkpoint `step`."""
        progress = self._fields(step).get("progress")
        if not isinstance(progress, dict):
            raise self._damaged(step, UserError("its progress.json has no progress"))
        return progress

    def val_loss(self, step: int) -> float | None:
        """The validation loss at `step`; None where it was not measured."""
        loss = self._fields(step).get("val_loss")
        return None if loss is None else float(loss)

    def _fields(self, step: int) -> dict[str, Any]:
        try:
            return read_json_object(self.directory / str(step) / "progress.json")
        except UserError as error:
            raise self._damaged(step, error) from error

    def _damaged(self, step: int, error: Exception) -> UserError:
        older = [other for other in self.steps if other < step]
        remedy = f"delete it to continue from step {older[-1]}" if older else "there is no older one"
        return UserError(f"checkpoint {self.directory / str(step)} is damaged; {remedy} ({error})")


def holds_safetensors(checkpoints: Path) -> bool:
    """Whether `SafetensorsStore` wrote these checkpoints: one that is not whole must not pass for another format."""
    steps = SafetensorsStore(checkpoints, keep=1).steps
    return any((checkpoints / str(step) / "parameters.safetensors").exists() for step in steps)


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
