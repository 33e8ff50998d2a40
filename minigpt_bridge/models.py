"""Open a model in any format, whichever framework it takes to read it."""

import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from minigpt_jax.errors import missing_extra
from minigpt_jax.formats import model_files
from minigpt_jax.formats.checkpoints import SafetensorsStore, holds_safetensors
from minigpt_jax.formats.names import Parameters, Tensors, flatten, unflatten

if TYPE_CHECKING:
    from minigpt_jax.checkpoint import CheckpointStore


def open_model(source: str | Path) -> model_files.Model:
    """The model at `source`: a run directory, a Hugging Face directory, a .safetensors or a .pth file.

    Raises:
        UserError: nothing is there, or it contradicts itself; a .pth file without PyTorch.
    """
    return model_files.open_model(source, model_files.Readers(pth=_read_pth, checkpoint=_read_checkpoint))


def read_tree(checkpoints: Path, step: int, name: str) -> Parameters:
    """The tree `name` ("parameters" or "optimizer") of a checkpoint of either engine, as NumPy arrays.

    Raises:
        UserError: the checkpoint is damaged.
    """
    if holds_safetensors(checkpoints):
        return SafetensorsStore(checkpoints, keep=1).load(step, name)
    from minigpt_jax.checkpoint import CheckpointStore

    with closing(CheckpointStore(checkpoints, keep=1, read_only=True)) as store:
        return read_orbax_tree(store, step, name)


def read_orbax_tree(store: "CheckpointStore", step: int, name: str) -> Parameters:
    """The tree `name` of one of JAX's checkpoints, as NumPy arrays of the dtypes that were saved.

    Raises:
        UserError: the checkpoint is damaged.
    """
    with float64_stays(), warnings.catch_warnings():
        # orbax warns that the devices may be others than those that saved; the arrays go on to NumPy anyway.
        warnings.filterwarnings("ignore", message="Sharding info not provided")
        tree = store.load(step, name, None)
        return unflatten({path: np.asarray(leaf) for path, leaf in flatten(tree).items()})


@contextmanager
def float64_stays() -> Iterator[None]:
    """JAX with 64 bits in every thread; `jax.enable_x64` reaches only its own, and orbax reads and writes in others."""
    import jax

    before = bool(jax.config.read("jax_enable_x64"))
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


def _read_checkpoint(checkpoints: Path, step: int) -> Parameters:
    return read_tree(checkpoints, step, "parameters")


def _read_pth(path: Path) -> Tensors:
    try:
        from minigpt_torch.pth import read_pth
    except ModuleNotFoundError as error:
        raise missing_extra(f"reading {path}", "torch") from error
    return read_pth(path)
