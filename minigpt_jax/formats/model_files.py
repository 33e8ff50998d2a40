"""A model wherever it lies: a run directory, a Hugging Face directory, a .safetensors or a .pth file.

Framework-free: whoever opens a .pth file or a run's checkpoint brings the function that reads it (`Readers`).
The shape comes from the file's own config. A bare weight file, as MiniMind's are, shows the shapes of its tensors
alone: what they do not show (number of heads, rope_theta, rms_norm_eps) is taken from the preset of equal shapes, and
`Model.note` says so. The tokenizer is found in or beside the model; there is none to fall back on, since two tokenizers
of one size give the same ids other meanings.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from minigpt_jax.config import PRESETS, ModelConfig, preset_name
from minigpt_jax.config_json import from_json, to_json
from minigpt_jax.errors import UserError
from minigpt_jax.files import read_json_object, replace_file
from minigpt_jax.formats.hugging_face import (
    config_from_hugging_face,
    is_hugging_face_config,
    read_hugging_face_tensors,
    read_safetensors,
)
from minigpt_jax.formats.names import (
    Parameters,
    Tensors,
    flatten,
    from_outside,
    is_tied,
    map_leaves,
    require_fit,
    require_sound,
    table,
    unwrapped,
)
from minigpt_jax.run_directory import RunDirectory
from minigpt_jax.tokenizer import Tokenizer, load_tokenizer


class Readers(NamedTuple):
    """What this room cannot read for itself."""

    pth: Callable[[Path], Tensors]
    """The tensors of a file that torch.save wrote."""
    checkpoint: Callable[[Path, int], Parameters]
    """(checkpoints directory, step) -> the parameters saved there, as nested NumPy arrays."""


@dataclass(frozen=True)
class Model:
    """A model that was found; its weights are read when they are asked for."""

    path: Path
    config: ModelConfig
    tokenizer: Tokenizer | None
    read_parameters: Callable[[], Parameters]
    """The parameters as nested arrays, in the layout of minigpt_jax/initialization.py, at least float32. UserError:
    they are missing, damaged, or not those of the config."""
    note: str | None = None
    """What was taken for granted and a person should know."""

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            UserError: there is none in or beside the model.
        """
        if self.tokenizer is None:
            place = self.path if self.path.is_dir() else tokenizer_beside(self.path)
            raise UserError(
                f"{self.path} has no tokenizer in it or beside it; put its tokenizer.json (and tokenizer_config.json) "
                f"into {place}/"
            )
        return self.tokenizer


def open_model(source: str | Path, readers: Readers) -> Model:
    """The model at `source`.

    Raises:
        UserError: there is nothing, or nothing that this can read; a config that contradicts itself; a bare weight file
            of no preset, or damaged. Other weights are looked at when they are read.
    """
    path = Path(source)
    try:
        is_directory, exists = path.is_dir(), path.exists()
    except OSError as error:  # a name that is too long, say
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    if is_directory:
        return _open_directory(path, readers)
    if not exists:
        raise UserError(f"there is no model at {path}")
    if path.suffix == ".safetensors":
        return _open_file(path, read_safetensors)
    if path.suffix in (".pth", ".pt", ".bin"):
        return _open_file(path, readers.pth)
    raise UserError(f"{path}: a model is a run directory, a Hugging Face directory, a .safetensors or a .pth file")


def _open_directory(path: Path, readers: Readers) -> Model:
    config_path = path / "config.json"
    if not config_path.exists():
        raise UserError(f"{path} holds no model: it has no config.json")
    fields = read_json_object(config_path)
    if is_hugging_face_config(fields):
        config = config_from_hugging_face(fields, where=str(config_path))

        def read() -> Parameters:
            return _checked(read_hugging_face_tensors(path), config, where=str(path))

        return _model(path, config, _tokenizer_in(path), read)
    run = RunDirectory(path)
    config, train = run.read_config()
    if train.stage == "lora":
        raise UserError(
            f"{path} holds adapters, not a model; make one of them and their base with scripts/convert.py "
            f"{train.init_from} MERGED --to run --merge-lora {path}"
        )

    def read_run() -> Parameters:
        step = run.best_checkpoint()
        tree = readers.checkpoint(run.checkpoints, step)
        shapes = {entry.path: entry.shape for entry in table(config)}
        require_fit(flatten(tree), shapes, where=str(run.checkpoints / str(step)))
        require_sound(flatten(tree), where=str(run.checkpoints / str(step)))
        return map_leaves(_at_least_float32, tree)

    return _model(path, config, run.read_tokenizer(), read_run)


def _open_file(path: Path, read_tensors: Callable[[Path], Tensors]) -> Model:
    config_path, beside = config_beside(path), tokenizer_beside(path)
    tensors: Tensors | None = None
    note: str | None = None
    if config_path.exists():
        config = from_json(ModelConfig, read_json_object(config_path), where=str(config_path))
    elif (path.parent / "config.json").exists():
        config_path = path.parent / "config.json"
        config = _config_of_directory(read_json_object(config_path), where=str(config_path))
    else:
        tensors = unwrapped(read_tensors(path), where=str(path))
        config = _config_of_preset(tensors, where=path)
        note = (
            f"{path} carries no config: its shapes are those of {preset_name(config)}, whose number of heads "
            f"({config.num_heads}), rope_theta ({config.rope_theta:g}) and rms_norm_eps ({config.rms_norm_eps:g}) are "
            f"taken; {config_path} can say otherwise"
        )

    def read() -> Parameters:
        found = read_tensors(path) if tensors is None else tensors
        return _checked(found, config, where=str(path))

    tokenizer = _tokenizer_in(beside) or _tokenizer_in(path.parent / "tokenizer") or _tokenizer_in(path.parent)
    return _model(path, config, tokenizer, read, note)


def _model(
    path: Path,
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    read: Callable[[], Parameters],
    note: str | None = None,
) -> Model:
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"{path}: its tokenizer has {tokenizer.vocab_size} entries but its vocabulary only {config.vocab_size}"
        )
    return Model(path, config, tokenizer, read, note)


def _checked(tensors: Tensors, config: ModelConfig, *, where: str) -> Parameters:
    tree = from_outside(tensors, config, where=where)
    require_sound(flatten(tree), where=where)
    return map_leaves(_at_least_float32, tree)


def _at_least_float32(array: np.ndarray) -> np.ndarray:
    return np.asarray(array, np.float64 if array.dtype == np.float64 else np.float32)


# --- Config and tokenizer of a bare weight file ---


def config_beside(path: Path) -> Path:
    """Where the shape of the weight file `path` is written: model.pth -> model.pth.json."""
    return path.with_name(f"{path.name}.json")


def tokenizer_beside(path: Path) -> Path:
    """The directory of a weight file's own tokenizer: model.pth -> model.pth.tokenizer/."""
    return path.with_name(f"{path.name}.tokenizer")


def write_beside(path: Path, config: ModelConfig, tokenizer: Tokenizer | None) -> None:
    """Write the shape and the tokenizer beside the weight file `path`."""
    replace_file(config_beside(path), (json.dumps(to_json(config), indent=2) + "\n").encode())
    if tokenizer is not None:
        tokenizer.save(tokenizer_beside(path))


def _tokenizer_in(directory: Path) -> Tokenizer | None:
    return load_tokenizer(directory) if (directory / "tokenizer.json").exists() else None


def _config_of_directory(fields: dict[str, Any], *, where: str) -> ModelConfig:
    if is_hugging_face_config(fields):
        return config_from_hugging_face(fields, where=where)
    section = fields.get("model", fields)
    return from_json(ModelConfig, section, where=where)


def _config_of_preset(tensors: Tensors, *, where: Path) -> ModelConfig:
    """The preset that has exactly these tensors."""
    found = {name: tensor.shape for name, tensor in tensors.items()}
    tied = is_tied(tensors)
    if tied:
        found.pop("lm_head.weight", None)
    for config in PRESETS.values():
        if tied == config.tie_word_embeddings and found == {e.name: e.outside_shape for e in table(config)}:
            return config
    raise UserError(
        f"{where} carries no config and has the tensors of no preset ({', '.join(PRESETS)}): write its shape (the "
        f'fields of ModelConfig) into {config_beside(where)}, for example {{"hidden_size": 512, "num_layers": 8}}'
    )
