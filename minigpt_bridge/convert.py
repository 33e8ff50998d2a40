"""From one model format to another, and the proof that nothing changed on the way.

What is written is read back by a reader that shares no code with the writer (transformers for its directories,
torch.load and safetensors' own torch reader for weight files, JAX for a run), and its logits are compared with those
of the source before the result gets its name. A failed check leaves nothing behind.

B batch  T time  V vocabulary
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from minigpt_bridge.models import open_model
from minigpt_jax.config import ModelConfig, TrainConfig, preset_name
from minigpt_jax.errors import UserError
from minigpt_jax.formats.checkpoints import SafetensorsStore
from minigpt_jax.formats.hugging_face import write_hugging_face, write_safetensors
from minigpt_jax.formats.model_files import Model, config_beside, tokenizer_beside, write_beside
from minigpt_jax.formats.names import Parameters, Tensors, to_outside
from minigpt_jax.model import model_graph
from minigpt_jax.progress import Progress
from minigpt_jax.run_directory import RunDirectory
from minigpt_torch.pth import write_pth
from minigpt_torch.weights import as_tree, make_model, own_name

Target = Literal["torch", "safetensors", "hf", "run"]
FileDType = Literal["float32", "float16"]

LARGEST_DIFFERENCE = 2e-6
"""Of the logits, relative to the largest: what float32 rounding explains."""

SUFFIXES = {"torch": ".pth", "safetensors": ".safetensors"}


@dataclass(frozen=True)
class Converted:
    """What was written."""

    path: Path
    reader: str
    """Who read it back."""
    logit_difference: float
    """Largest difference of the logits read back from those of the source in the file's precision, over the largest
    logit."""
    rounding: float
    """Largest difference that the file's precision itself makes to the source's logits; 0 for float32."""


def convert(source: str | Path, target: str | Path, *, to: Target, dtype: FileDType = "float32") -> Converted:
    """Write the model at `source` to `target` and check it.

    Args:
        source: a model in any format that `open_model` reads.
        target: a new file (torch, safetensors) or directory (hf, run).
        to: the format.
        dtype: of the weights in the file; a run holds float32.

    Raises:
        UserError: something is in the way, the tokenizer is missing where the format carries one, or the check failed.
    """
    model, path = open_model(source), Path(target)
    _refuse(path, to, dtype)
    parameters = model.read_parameters()
    rounded = _rounded(parameters, dtype)
    unfinished = path.with_name(f".unfinished-{path.name}")
    _remove(unfinished)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        reader, read_back = _WRITERS[to](unfinished, model, rounded, dtype)
        tokens = _probe(model.config)
        expected = jax_logits(model.config, rounded, tokens)
        difference = _difference(read_back(tokens), expected)
        if not difference <= LARGEST_DIFFERENCE:
            raise UserError(f"{reader} read {path} back with logits that differ by {difference:.1e}; nothing was kept")
        rounding = 0.0
        if dtype != "float32":
            rounding = _difference(expected, jax_logits(model.config, parameters, tokens))
        for part in _parts(unfinished):
            part.rename(path.with_name(part.name.removeprefix(".unfinished-")))
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        _remove(unfinished)
    return Converted(path, reader, difference, rounding)


def _refuse(path: Path, to: Target, dtype: FileDType) -> None:
    if to in SUFFIXES and path.suffix != SUFFIXES[to]:
        raise UserError(f"--to {to} writes a {SUFFIXES[to]} file; {path} is named otherwise")
    if to not in SUFFIXES and path.suffix in (*SUFFIXES.values(), ".pt", ".bin"):
        raise UserError(f"--to {to} writes a directory; {path} is named like a file")
    if to == "run" and dtype != "float32":
        raise UserError("a run directory holds float32; leave --dtype out")
    for part in (path, config_beside(path), tokenizer_beside(path)) if to in SUFFIXES else (path,):
        if part.exists():
            raise UserError(f"{part} exists already; choose another name, or remove it")


def _parts(path: Path) -> list[Path]:
    """What was written for `path`: itself, and what stands beside a weight file; the weights come last."""
    return [part for part in (tokenizer_beside(path), config_beside(path), path) if part.exists()]


def _remove(path: Path) -> None:
    for part in _parts(path):
        if part.is_dir():
            shutil.rmtree(part)
        else:
            part.unlink()


# --- Write, and read back by somebody else ---

Logits = Callable[[np.ndarray], np.ndarray]
"""Token ids [B, T] -> logits [B, T, V]."""
Written = tuple[str, Logits]


def _write_torch(path: Path, model: Model, parameters: Parameters, dtype: FileDType) -> Written:
    config = model.config
    write_pth(path, to_outside(parameters, config), dtype=dtype, tied=config.tie_word_embeddings)
    write_beside(path, config, model.tokenizer)
    state = torch.load(path, map_location="cpu", weights_only=True)
    return "torch.load", _twin(config, state)


def _write_safetensors(path: Path, model: Model, parameters: Parameters, dtype: FileDType) -> Written:
    from safetensors.torch import load_file

    write_safetensors(path, _cast(to_outside(parameters, model.config), dtype))
    write_beside(path, model.config, model.tokenizer)
    return "safetensors.torch", _twin(model.config, load_file(path))


def _write_hugging_face(path: Path, model: Model, parameters: Parameters, dtype: FileDType) -> Written:
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise UserError("--to hf is checked by transformers: pip install -e '.[hf]'") from error
    tokenizer = model.require_tokenizer()
    transformers.utils.logging.disable_progress_bar()
    path.mkdir()
    write_hugging_face(path, model.config, _cast(to_outside(parameters, model.config), dtype), tokenizer)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    _same_tokens(path, model)

    def logits(tokens: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            scores: np.ndarray = theirs(torch.from_numpy(tokens)).logits.numpy()
        return scores

    return f"transformers {transformers.__version__} ({type(theirs).__name__})", logits


def _same_tokens(path: Path, model: Model) -> None:
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(path), model.require_tokenizer()
    for text in ("Hello, world! 12 + 30 = 42\n", "\u4f60\u597d\uff0c\u4e16\u754c\uff01", "a\U0001f600b  c"):
        if theirs.encode(text, add_special_tokens=False) != ours.encode(text):
            raise UserError(f"transformers reads the tokenizer of {path} otherwise: {text!r}; nothing was kept")


def _write_run(path: Path, model: Model, parameters: Parameters, dtype: FileDType) -> Written:
    train = TrainConfig(model=preset_name(model.config), learning_rate=1e-3, warmup_steps=0, backend="torch")
    run = RunDirectory(path)
    run.create(model.config, train, model.require_tokenizer())
    SafetensorsStore(run.checkpoints, keep=1).save(
        0,
        {"parameters": parameters, "optimizer": _fresh_optimizer(parameters)},
        progress=Progress(data="converted").to_json(),
        val_loss=None,
    )
    run.link_best(0)
    read_back = open_model(path)
    return "JAX", lambda tokens: jax_logits(read_back.config, read_back.read_parameters(), tokens)


def _fresh_optimizer(parameters: Parameters) -> dict[str, Any]:
    def zeros(tree: Any) -> Any:
        return {k: zeros(v) for k, v in tree.items()} if isinstance(tree, dict) else np.zeros_like(tree)

    scalars = {"token_sum": 0.0, "grad_norm": 0.0, "learning_rate_scale": 1.0}
    return {
        **{name: zeros(parameters) for name in ("first_moment", "second_moment", "gradient_sums")},
        **{name: np.float32(value) for name, value in scalars.items()},
        **{name: np.int32(0) for name in ("micro_steps", "updates")},
    }


_WRITERS: dict[Target, Callable[[Path, Model, Parameters, FileDType], Written]] = {
    "torch": _write_torch,
    "safetensors": _write_safetensors,
    "hf": _write_hugging_face,
    "run": _write_run,
}


# --- Logits ---


def jax_logits(config: ModelConfig, parameters: Parameters, tokens: np.ndarray) -> np.ndarray:
    """The JAX model's logits [B, T, V] in float32."""
    on_device = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), parameters)
    return np.asarray(_compiled_logits(config)(on_device, jnp.asarray(tokens, jnp.int32)))


@cache
def _compiled_logits(config: ModelConfig) -> Callable[[Any, jax.Array], jax.Array]:
    graph = model_graph(config, dtype=jnp.dtype("float32"), kernel="blocked")

    def logits(tree: Any, tokens: jax.Array) -> jax.Array:
        model = nnx.merge(graph, tree)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        hidden = model(tokens, segment_ids=jnp.ones_like(tokens), positions=positions)
        return model.logits(hidden).reshape(*tokens.shape, -1)

    return jax.jit(logits)


def _twin(config: ModelConfig, state: dict[str, torch.Tensor]) -> Logits:
    """The PyTorch twin's logits with these weights."""
    own = {own_name(name): tensor.float() for name, tensor in state.items()}
    if config.tie_word_embeddings:
        own.pop("lm_head.weight", None)
    model = make_model(config, as_tree(own, config), dtype=torch.float32)

    @torch.no_grad()
    def logits(tokens: np.ndarray) -> np.ndarray:
        ids = torch.from_numpy(tokens)
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        hidden = model(ids, segment_ids=torch.ones_like(ids), positions=positions)
        scores: np.ndarray = model.logits(hidden).numpy()
        return scores.reshape(*tokens.shape, -1)

    return logits


def _probe(config: ModelConfig) -> np.ndarray:
    """Token ids that every model can be asked about: the same for one vocabulary."""
    time = min(64, config.max_position_embeddings)
    return np.random.default_rng(0).integers(0, config.vocab_size, (2, time), dtype=np.int64)


def _difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(ours - theirs).max() / max(1.0, np.abs(theirs).max()))


def _rounded(parameters: Parameters, dtype: FileDType) -> Parameters:
    """The parameters as float32 numbers that the file's dtype can hold."""
    return {
        key: _rounded(value, dtype) if isinstance(value, dict) else value.astype(dtype).astype(np.float32)
        for key, value in parameters.items()
    }


def _cast(tensors: Tensors, dtype: FileDType) -> Tensors:
    return {name: tensor.astype(dtype) for name, tensor in tensors.items()}
