"""Open a model or an adapter in any format, whichever framework it takes to read it."""

import os
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from minigpt_jax.errors import UserError, missing_extra
from minigpt_jax.files import read_json_object
from minigpt_jax.formats import model_files
from minigpt_jax.formats.adapters import PEFT_CONFIG, Adapter, from_minimind, read_peft
from minigpt_jax.formats.checkpoints import SafetensorsStore, holds_safetensors
from minigpt_jax.formats.names import Parameters, Tensors, flatten, require_sound, unflatten
from minigpt_jax.run_directory import RunDirectory

if TYPE_CHECKING:
    from minigpt_jax.checkpoint import CheckpointStore


def open_model(source: str | Path) -> model_files.Model:
    """The model at `source`: a run directory, a Hugging Face directory, a .safetensors or a .pth file.

    Raises:
        UserError: nothing is there, or it contradicts itself; a .pth file without PyTorch.
    """
    return model_files.open_model(source, model_files.Readers(pth=_read_pth, checkpoint=_read_checkpoint))


def open_adapter(source: str | Path) -> Adapter:
    """The adapter at `source`: a run of --stage lora (its best checkpoint), a PEFT directory, or MiniMind's .pth.

    Raises:
        UserError: nothing is there, or nothing that this can read; a .pth file without PyTorch.
    """
    path = Path(source)
    try:
        is_directory, exists = path.is_dir(), path.exists()
    except OSError as error:  # a name that is too long, say
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    if is_peft(path):
        return read_peft(path)
    if is_adapter_run(path):
        return _read_run(RunDirectory(path))
    if is_directory:
        raise UserError(f"{path} holds no adapter: it is no run of --stage lora and has no {PEFT_CONFIG}")
    if not exists:
        raise UserError(f"there is no adapter at {path}")
    if path.suffix in (".pth", ".pt", ".bin"):
        return from_minimind(_read_pth(path), where=str(path))
    raise UserError(f"{path}: an adapter is a run of --stage lora, a PEFT directory or a .pth file")


def is_adapter_run(path: Path) -> bool:
    """Whether this is the directory of a run of --stage lora."""
    if not os.path.exists(path / "config.json"):
        return False
    section = read_json_object(path / "config.json").get("train")
    return isinstance(section, dict) and section.get("stage") == "lora"


def _read_run(run: RunDirectory) -> Adapter:
    model, train = run.read_config()
    step = run.best_checkpoint()
    where = str(run.checkpoints / str(step))
    tree = read_tree(run.checkpoints, step, "parameters")
    require_sound(flatten(tree), where=where)
    base_digest = read_progress(run.checkpoints, step)["frozen"]
    adapter = Adapter(where, train.lora, tree, base=train.init_from, base_digest=base_digest)
    adapter.require_fit(model)
    return adapter


def is_adapter(path: Path) -> bool:
    """Whether this is a directory of adapters: a run of --stage lora, or PEFT's."""
    return is_peft(path) or is_adapter_run(path)


def is_peft(path: Path) -> bool:
    """Whether this is a directory with an adapter of PEFT in it."""
    return os.path.exists(path / PEFT_CONFIG)  # False for a name that is too long, where Path's own raises


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


def read_progress(checkpoints: Path, step: int) -> dict[str, Any]:
    """What the loop saved with a checkpoint of either engine."""
    if holds_safetensors(checkpoints):
        return SafetensorsStore(checkpoints, keep=1).progress(step)
    from minigpt_jax.checkpoint import CheckpointStore

    with closing(CheckpointStore(checkpoints, keep=1, read_only=True)) as store:
        return store.progress(step)


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
