"""Checkpoints of a run: asynchronous, atomic, the newest few and the best kept. The only file that knows orbax.

A checkpoint is out/<run>/checkpoints/<step>/ with two trees, `parameters` and `optimizer`, and the loop's progress as
JSON. orbax writes into a temporary directory and renames it, so a checkpoint that exists is whole.
"""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from minigpt_jax.errors import UserError

Tree = Any


class CheckpointStore:
    """The checkpoints directory of one run.

    Args:
        directory: created when it is missing.
        keep: newest checkpoints to keep; the one with the lowest validation loss is kept besides.
        read_only: leave alone what another process may be writing there.
    """

    def __init__(self, directory: Path, *, keep: int, read_only: bool = False):
        from orbax.checkpoint import v1 as ocp

        logging.getLogger("absl").setLevel(logging.ERROR)
        policies = ocp.training.preservation_policies
        best = policies.BestN(
            # The policy keeps the last of a sorted list; reverse puts the lowest loss there.
            get_metric_fn=lambda metrics: metrics["val_loss"],
            reverse=True,
            n=1,
            keep_checkpoints_without_metrics=False,
        )
        self._checkpointer = ocp.training.Checkpointer(
            directory.absolute(),
            preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(keep), best]),
            cleanup_tmp_directories=not read_only,
        )

    @property
    def steps(self) -> list[int]:
        """Steps of the finished checkpoints, ascending."""
        return [checkpoint.step for checkpoint in self._checkpointer.checkpoints]

    @property
    def best_step(self) -> int | None:
        """The finished checkpoint with the lowest validation loss; None when none was validated."""
        scored = [
            (checkpoint.metrics["val_loss"], checkpoint.step)
            for checkpoint in self._checkpointer.checkpoints
            if checkpoint.metrics
        ]
        return min(scored)[1] if scored else None

    def save(self, step: int, trees: dict[str, Tree], *, progress: dict[str, Any], val_loss: float | None) -> None:
        """Start saving; an earlier save is waited for first. The trees are copied before this returns.

        Raises:
            UserError: this save, or the one before it, could not be written.
        """
        metrics = None if val_loss is None else {"val_loss": val_loss}
        with _writing_errors(self._checkpointer.directory):
            self._checkpointer.wait()
            if step in self.steps:
                return
            self._checkpointer.save_checkpointables_async(
                step, jax.tree.map(_safe_from_donation, trees), force=True, metrics=metrics, custom_metadata=progress
            )

    @property
    def is_saving(self) -> bool:
        """Whether a save is in progress."""
        return bool(self._checkpointer.is_saving_in_progress())

    def wait(self) -> None:
        """Return when no save is in progress.

        Raises:
            UserError: the save could not be written.
        """
        with _writing_errors(self._checkpointer.directory):
            self._checkpointer.wait()

    def load(self, step: int, name: str, abstract: Tree | None) -> Tree:
        """The tree called `name` of checkpoint `step`, in the shapes, dtypes and placement of `abstract`.

        Without `abstract` the tree comes as it was saved, its tuples and numbered keys as plain dicts.

        Raises:
            UserError: the checkpoint does not hold such a tree.
        """
        path = f"{self._checkpointer.directory}/{step}"
        try:
            return self._checkpointer.load(step, abstract, checkpointable_name=name)
        except (ValueError, KeyError, OSError) as error:
            older = [other for other in self.steps if other < step]
            remedy = f"delete it to continue from step {older[-1]}" if older else "there is no older one"
            raise UserError(
                f"checkpoint {path} is damaged or of another model; {remedy} ({_first_cause(error)})"
            ) from error

    def progress(self, step: int) -> dict[str, Any]:
        """The loop's progress that was saved with checkpoint `step`."""
        metadata = self._checkpointer.checkpointables_metadata(step).custom_metadata
        assert isinstance(metadata, dict)
        return metadata

    def val_loss(self, step: int) -> float | None:
        """The validation loss at `step`; None where it was not measured."""
        (metrics,) = [checkpoint.metrics for checkpoint in self._checkpointer.checkpoints if checkpoint.step == step]
        return metrics["val_loss"] if metrics else None

    def close(self) -> None:
        """Wait for a save in progress and free the background threads.

        Raises:
            UserError: the save could not be written.
        """
        with _writing_errors(self._checkpointer.directory):
            self._checkpointer.close()


@contextlib.contextmanager
def _writing_errors(directory: Any) -> Iterator[None]:
    """Turn an operating-system error, however deep orbax wrapped it, into one line."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        if cause is None and "NO_SPACE" not in str(error) and "No space left" not in str(error):
            raise
        reason = getattr(cause, "strerror", None) or _first_cause(error)
        raise UserError(f"cannot write a checkpoint to {directory}: {reason}") from error


def _first_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:300]


def _safe_from_donation(leaf: jax.Array) -> jax.Array:
    """A leaf that the next step cannot overwrite while the background save still reads it.

    On a CPU the host copy that orbax takes shares memory with the device array.
    """
    return jnp.copy(leaf) if all(device.platform == "cpu" for device in leaf.devices()) else leaf


def abstract_like(tree: Tree) -> Tree:
    """Shapes, dtypes and placement of `tree`, without its values: the target of a load."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree)
