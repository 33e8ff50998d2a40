"""Low-rank adapters as files: PEFT's directories, and MiniMind's LoRA state dicts.

Framework-free. PEFT's directory (adapter_config.json and adapter_model.safetensors) says rank, alpha and targets; what
in it would change the function and is not known here is refused. MiniMind's file is tensors alone and its forward pass
has no factor, so it is read with alpha = rank, and written with the factor inside B. Both have A as [rank, in] and B as
[out, rank], the transposes of the tree's.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from minigpt_jax.adapter_tree import adapted_modules, adapter_shapes
from minigpt_jax.config import ModelConfig
from minigpt_jax.errors import UserError
from minigpt_jax.files import read_json_object, replace_file
from minigpt_jax.formats.hugging_face import read_safetensors
from minigpt_jax.formats.names import (
    Parameters,
    Tensors,
    flatten,
    map_leaves,
    require_fit,
    require_sound,
    unflatten,
    unwrapped,
)
from minigpt_jax.lora_config import TARGETS, LoraConfig

PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_PEFT_NAME = "base_model.model.model.{module}.lora_{part}.weight"
_MINIMIND_NAME = "{module}.lora.{part}.weight"

_SILENT = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0, "use_rslora": False}
"""What PEFT takes where an adapter_config.json is silent."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none", None),
    # The others move the base's own weights.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva", None),
}
"""Fields with the values under which an adapter is what minigpt_jax/lora.py computes."""

_WITHOUT_EFFECT = {
    "auto_mapping",
    "base_model_name_or_path",
    "eva_config",
    "inference_mode",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "target_modules",
    *_SILENT,
}
"""Fields that are read elsewhere, or that change nothing on their own. Every other one has to be empty."""


@dataclass(frozen=True)
class Adapter:
    """An adapter that was read, at least float32."""

    where: str
    """The file or directory, named in errors."""
    lora: LoraConfig
    tree: Parameters
    """Nested dicts of `lora_a` [in, rank] and `lora_b` [rank, out]."""
    base: str | None = None
    """The model that it was trained on, as its file calls it."""
    base_digest: str | None = None
    """SHA-256 over the weights that it was trained on (minigpt_jax/formats/names.py, `digest`), where it is known."""

    def require_fit(self, model: ModelConfig) -> None:
        """Refuse a model that this is no adapter of.

        Raises:
            UserError: one line with everything that is missing, unexpected or of another shape.
        """
        try:
            shapes = adapter_shapes(model, self.lora)
        except UserError as error:
            raise UserError(f"{self.where} does not fit the model: {error}") from error
        require_fit(flatten(self.tree), shapes, where=self.where, what="the model")


# --- PEFT ---


def read_peft(directory: Path) -> Adapter:
    """The adapter in a PEFT directory.

    Under rank-stabilised LoRA the factor is alpha / sqrt(r), which a larger alpha stands for here.

    Raises:
        UserError: a file is missing or damaged; another kind of adapter, or an option that changes the function;
            tensors that are not exactly those that the config announces.
    """
    where = str(directory / PEFT_CONFIG)
    fields = read_json_object(directory / PEFT_CONFIG)
    for name, value in fields.items():
        if name in _NEUTRAL and value not in _NEUTRAL[name]:
            raise UserError(f"{where}: {name} {value!r} is not supported; {_NEUTRAL[name][0]!r} is")
        if name not in _NEUTRAL and name not in _WITHOUT_EFFECT and value not in (None, False, "", [], {}):
            raise UserError(f"{where}: {name} {value!r} is not supported; adapters here have none")
    if "peft_type" not in fields:
        raise UserError(f"{where}: it has no peft_type, so it is no LoRA adapter")
    base = fields.get("base_model_name_or_path") or None
    if not isinstance(base, str | None):
        raise UserError(f"{where}: base_model_name_or_path must be a string, got {base!r}")
    lora = _lora_config(_SILENT | fields, where=where)
    weights = directory / PEFT_WEIGHTS
    tree = _tree(read_safetensors(weights), _PEFT_NAME, lora.targets, rank=lora.rank, where=str(weights))
    return Adapter(str(directory), lora, tree, base)


def _lora_config(fields: Mapping[str, Any], *, where: str) -> LoraConfig:
    if not isinstance(fields["use_rslora"], bool):
        raise UserError(f"{where}: use_rslora must be true or false, got {fields['use_rslora']!r}")
    for name in ("r", "lora_alpha", "lora_dropout"):
        if type(fields[name]) not in ((int,) if name == "r" else (int, float)):
            raise UserError(
                f"{where}: {name} must be {'an integer' if name == 'r' else 'a number'}, got {fields[name]!r}"
            )
    targets = fields.get("target_modules")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise UserError(f"{where}: target_modules must be a list of names ({', '.join(TARGETS)}), got {targets!r}")
    try:
        stabilised = math.sqrt(max(fields["r"], 0)) if fields["use_rslora"] else 1.0
        alpha = float(fields["lora_alpha"] * stabilised)
        return LoraConfig(fields["r"], alpha, fields["lora_dropout"], tuple(targets))
    except OverflowError as error:
        raise UserError(f"{where}: r or lora_alpha is beyond any float") from error
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def write_peft(directory: Path, adapter: Adapter) -> None:
    """Write an adapter into an existing directory as PEFT does; dtypes stay.

    Raises:
        OSError: the disk refuses.
    """
    lora = adapter.lora
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": list(lora.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    # The config comes last: a directory without it is no adapter.
    replace_file(directory / PEFT_WEIGHTS, save(_outside(adapter.tree, _PEFT_NAME), metadata={"format": "pt"}))
    replace_file(directory / PEFT_CONFIG, (json.dumps(fields, indent=2) + "\n").encode())


# --- MiniMind ---


def from_minimind(tensors: Mapping[str, np.ndarray], *, where: str) -> Adapter:
    """The adapter in a state dict that MiniMind's save_lora wrote, by its names.

    Raises:
        UserError: it holds no adapter, something else besides, or not one of the same rank in every block.
    """
    found = {name.removeprefix("model."): tensor for name, tensor in unwrapped(tensors, where=where).items()}
    targets = [target for target in TARGETS if any(f".{target}.lora." in name for name in found)]
    if not targets:
        example = _MINIMIND_NAME.format(module="layers.0.self_attn.q_proj", part="A")
        raise UserError(f"{where} holds no adapter: it has no tensor that is named like {example}")
    first = next((tensor for name, tensor in found.items() if name.endswith(".lora.A.weight")), None)
    if first is None or first.ndim != 2:
        raise UserError(f"{where} is no whole adapter: a lora.A.weight of shape [rank, in] is missing")
    rank = first.shape[0]
    # Its forward pass is B(A(x)), without a factor.
    lora = LoraConfig(rank=rank, alpha=float(rank), dropout=0.0, targets=tuple(targets))
    return Adapter(where, lora, _tree(found, _MINIMIND_NAME, targets, rank=rank, where=where))


def to_minimind(adapter: Adapter) -> Tensors:
    """The arrays of a MiniMind LoRA file by their names; the factor alpha / rank is inside B, and dtypes stay.

    Raises:
        UserError: MiniMind gives adapters to square linear layers alone, and would leave out some of these unseen.
    """
    leaves = flatten(adapter.tree)
    for module in (path.removesuffix(".lora_a") for path in leaves if path.endswith(".lora_a")):
        fan_in, fan_out = leaves[f"{module}.lora_a"].shape[0], leaves[f"{module}.lora_b"].shape[1]
        if fan_in != fan_out:
            raise UserError(
                f"{adapter.where}: MiniMind has adapters for square layers alone, and {module} is {fan_in} x "
                f"{fan_out}; write peft, or merge it with --merge-lora"
            )
    return _outside(without_factor(adapter).tree, _MINIMIND_NAME)


def without_factor(adapter: Adapter) -> Adapter:
    """The same update as MiniMind's file can hold it: the factor inside B, and no dropout."""
    leaves = flatten(adapter.tree)
    leaves |= {
        path: leaf * np.asarray(adapter.lora.scale, leaf.dtype)
        for path, leaf in leaves.items()
        if path.endswith(".lora_b")
    }
    lora = replace(adapter.lora, alpha=float(adapter.lora.rank), dropout=0.0)
    return replace(adapter, lora=lora, tree=unflatten(leaves))


# --- Between tree and outside ---


def _outside(tree: Parameters, naming: str) -> Tensors:
    leaves = flatten(tree)
    return {_outside_name(path, naming): np.ascontiguousarray(leaf.T) for path, leaf in leaves.items()}


def _outside_name(path: str, naming: str) -> str:
    module, _, leaf = path.rpartition(".")
    return naming.format(module=module, part=leaf.removeprefix("lora_").upper())


def _tree(tensors: Tensors, naming: str, targets: Sequence[str], *, rank: int, where: str) -> Parameters:
    """The tree from arrays by outside names: every target in every block, of one rank and of one size in all blocks."""
    require_sound(tensors, where=where)
    for name, tensor in tensors.items():
        if tensor.ndim != 2:
            raise UserError(f"{where}: {name} is {list(tensor.shape)}, not a matrix")
    num_layers = len({number for name in tensors for number in re.findall(r"\blayers\.(\d+)\.", name)})
    names = {
        f"{module}.{leaf}": _outside_name(f"{module}.{leaf}", naming)
        for module in adapted_modules(num_layers, targets)
        for leaf in ("lora_a", "lora_b")
    }
    sizes: dict[str, int] = {}
    shapes: dict[str, tuple[int, int]] = {}
    for path, name in names.items():
        is_a, kind = path.endswith("lora_a"), path.split(".", 2)[2]
        if name in tensors:
            sizes.setdefault(kind, tensors[name].shape[1 if is_a else 0])
        size = sizes.get(kind, 0)
        shapes[name] = (rank, size) if is_a else (size, rank)
    require_fit(tensors, shapes, where=where, what=f"an adapter of rank {rank} for {', '.join(targets)} in every block")
    return map_leaves(_at_least_float32, unflatten({path: tensors[name].T for path, name in names.items()}))


def _at_least_float32(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array, np.float64 if array.dtype == np.float64 else np.float32)
