"""Hugging Face model directories: what stock LlamaForCausalLM and Qwen3ForCausalLM of transformers 5 load.

Framework-free, and without transformers. A directory holds config.json, generation_config.json, model.safetensors
(or several shards with an index, on reading), tokenizer.json and tokenizer_config.json with the chat template.

Without q/k norm a model is a Llama, with it a Qwen3. Both of these multiply by a norm's weight after the cast; whether
ours does it before (which differs only under bfloat16) travels in a field of its own that they ignore.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (from then on NumPy knows bfloat16, which safetensors asks it for)
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from minigpt_jax.config import ModelConfig
from minigpt_jax.config_json import from_json
from minigpt_jax.errors import UserError
from minigpt_jax.files import read_json_object, replace_file
from minigpt_jax.formats.names import Tensors
from minigpt_jax.tokenizer import Tokenizer

_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
    "rms_norm_eps": "rms_norm_eps",
    "tie_word_embeddings": "tie_word_embeddings",
}
"""Our field and Hugging Face's."""

_BEFORE_CAST = "norm_weight_before_cast"
_MODEL_TYPES = {"llama": False, "qwen3": True}
"""Type and whether it has q/k norm."""

_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "num_key_value_heads": None, "head_dim": None},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
}
"""What transformers takes where a config.json is silent, by model type; None is worked out from the other sizes, which
have to be there."""

_REFUSED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "hidden_act": (None, "silu"),
    "use_sliding_window": (None, False),
    "num_experts": (None, 0),
    "quantization_config": (None,),
}
"""Fields that change the function, with the values under which it is ours."""


def is_hugging_face_config(fields: Mapping[str, Any]) -> bool:
    """Whether a config.json is one of transformers'."""
    return "model_type" in fields


def config_to_hugging_face(config: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of config.json.

    Raises:
        UserError: transformers has no model of this shape.
    """
    if not config.qk_norm and config.hidden_size % config.num_heads:
        raise UserError(
            f"transformers' Llama takes no hidden_size ({config.hidden_size}) that is not a multiple of the number of "
            f"heads ({config.num_heads}); choose another format"
        )
    return {
        "architectures": ["Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLM"],
        "model_type": "qwen3" if config.qk_norm else "llama",
        **{theirs: getattr(config, ours) for ours, theirs in _FIELDS.items()},
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        # transformers 5 reads rope_parameters, earlier versions and other programs rope_theta.
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rope_theta": config.rope_theta,
        _BEFORE_CAST: config.norm_weight_before_cast,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
        "use_cache": True,
    }


def config_from_hugging_face(fields: Mapping[str, Any], *, where: str) -> ModelConfig:
    """The shape that a config.json of transformers describes.

    Raises:
        UserError: another kind of model, or an option that changes the function.
    """
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in _MODEL_TYPES:
        known = " and ".join(_MODEL_TYPES)
        raise UserError(f"{where}: model_type {model_type!r} is not supported; {known} are")
    for name, allowed in _REFUSED.items():
        if fields.get(name) not in allowed:
            raise UserError(f"{where}: {name} {fields[name]!r} is not supported; this model has {allowed[-1]!r}")
    ours: dict[str, Any] = {"qk_norm": _MODEL_TYPES[model_type]}
    given = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, **_DEFAULTS[model_type], **fields}
    if given["num_key_value_heads"] is None:
        given["num_key_value_heads"] = given.get("num_attention_heads")
    if given["head_dim"] is None and model_type == "llama":
        given["head_dim"] = 0  # ModelConfig's word for the same
    for field, theirs in _FIELDS.items():
        if theirs not in given:
            raise UserError(f"{where}: it has no {theirs}")
        ours[field] = given[theirs]
    ours["rope_theta"] = _rope_theta(fields, where=where)
    ours[_BEFORE_CAST] = fields.get(_BEFORE_CAST, False)
    return from_json(ModelConfig, ours, where=where)


def _rope_theta(fields: Mapping[str, Any], *, where: str) -> float:
    theta = fields.get("rope_theta")
    # The newer and the older name; either changes the function.
    for name in ("rope_parameters", "rope_scaling"):
        rope = fields.get(name) or {}
        if not isinstance(rope, dict):
            raise UserError(f"{where}: {name} must be an object, got {rope!r}")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise UserError(f"{where}: rope type {kind!r} is not supported; 'default' is")
        theta = rope.get("rope_theta", theta)
    theta = 10000.0 if theta is None else theta
    if fields.get("rope_theta", theta) != theta:
        raise UserError(f"{where}: rope_theta is {fields['rope_theta']} in one place and {theta} in another")
    return theta


def read_hugging_face_tensors(directory: Path) -> Tensors:
    """All tensors of model.safetensors, or of the shards that its index names.

    Raises:
        UserError: a file is missing or damaged.
    """
    index = directory / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.exists():
        names = sorted(set(read_json_object(index).get("weight_map", {}).values()))
    tensors: Tensors = {}
    for name in names:
        tensors |= read_safetensors(directory / name)
    return tensors


def read_safetensors(path: Path) -> Tensors:
    """All tensors of one file; bfloat16, which NumPy lacks, in the dtype of ml_dtypes.

    Raises:
        UserError: it is missing or damaged.
    """
    try:
        return dict(load_file(path))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise UserError(f"{path} is not a safetensors file ({error})") from error
    except (AttributeError, KeyError, TypeError) as error:  # of NumPy, which has no such dtype
        raise UserError(f"{path} holds a dtype that NumPy lacks ({error}); convert it to float32 first") from error


def write_safetensors(path: Path, tensors: Tensors) -> None:
    """Write one file; `format` tells transformers that the layout is PyTorch's.

    Raises:
        OSError, SafetensorError: the disk refuses.
    """
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors lets nobody but the owner read it


def write_hugging_face(directory: Path, config: ModelConfig, tensors: Tensors, tokenizer: Tokenizer) -> None:
    """Fill an empty directory with everything that transformers needs.

    Raises:
        UserError: transformers has no model of this shape.
        OSError, SafetensorError: the disk refuses.
    """
    fields = config_to_hugging_face(config, tokenizer)
    dtypes = {str(tensor.dtype) for tensor in tensors.values()}
    generation = {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
        "do_sample": False,
        "max_length": config.max_position_embeddings,
    }
    _write(directory / "config.json", {**fields, "dtype": dtypes.pop()})
    _write(directory / "generation_config.json", generation)
    write_safetensors(directory / "model.safetensors", tensors)
    tokenizer.save(directory)


def _write(path: Path, fields: Mapping[str, Any]) -> None:
    replace_file(path, (json.dumps(fields, indent=2) + "\n").encode())
