"""From one model format to another, and the proof that nothing changed on the way.

What is written is read back, and its logits are compared with those of the source before the result gets its name. The
reader is another program where there is one: transformers for its directories, torch.load and safetensors' own torch
reader for weight files, whose tensors go into the PyTorch twin as they are, past the table that wrote them. A run is
read back by this package's own reader. A failure leaves nothing behind, not even a directory above the target.

Adapters are merged on the way, or written as adapters in another format; these are read back bit for bit.

B batch  T time  V vocabulary
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np
import torch
from safetensors import SafetensorError

from minigpt_bridge.bounds import BOUNDS, relative_error
from minigpt_bridge.logits import Logits, jax_logits, probe, twin_logits
from minigpt_bridge.models import open_adapter, open_model
from minigpt_jax.adapter_tree import merge
from minigpt_jax.config import ModelConfig, TrainConfig
from minigpt_jax.defaults import resolve
from minigpt_jax.errors import UserError, missing_extra
from minigpt_jax.formats import AdapterFormat, FileDType, Format
from minigpt_jax.formats.adapters import Adapter, to_minimind, without_factor, write_peft
from minigpt_jax.formats.checkpoints import SafetensorsStore
from minigpt_jax.formats.hugging_face import write_hugging_face, write_safetensors
from minigpt_jax.formats.model_files import Model, config_beside, tokenizer_beside, write_beside
from minigpt_jax.formats.names import Parameters, Tensors, digest, flatten, map_leaves, to_outside
from minigpt_jax.progress import CONVERTED, Progress
from minigpt_jax.run_directory import RunDirectory
from minigpt_torch.engine import trees_of
from minigpt_torch.pth import write_pth
from minigpt_torch.train_step import init_state
from minigpt_torch.weights import make_model

SUFFIXES = {"torch": ".pth", "safetensors": ".safetensors"}


class Merged(NamedTuple):
    """An adapter that is part of the weights now."""

    adapter: str
    logit_difference: float
    """Relative error of the merged model's logits against those of base and adapter, both computed in float64."""
    other_base: str | None
    """The model that it was trained on, where that is known to have other weights than this one."""


@dataclass(frozen=True)
class Converted:
    """What was written."""

    path: Path
    reader: str
    """Who read it back."""
    logit_difference: float
    """Relative error (minigpt_bridge/bounds.py) of the logits read back against those of the source in the file's
    precision."""
    rounding: float | None
    """Relative error that the file's precision itself makes in the source's logits; None where the file holds every
    weight exactly."""
    note: str | None
    """What was taken for granted about the source."""
    merged: tuple[Merged, ...]
    """In the order of the adapters."""


def convert(
    source: str | Path,
    target: str | Path,
    *,
    to: Format,
    dtype: FileDType = "float32",
    merge_lora: Sequence[str | Path] = (),
) -> Converted:
    """Write the model at `source` to `target` and check it.

    Args:
        source: a model in any format that `open_model` reads.
        target: a new file (torch, safetensors) or directory (hf, run).
        to: the format.
        dtype: of the weights in the file; a run holds float32.
        merge_lora: adapters that `open_adapter` reads, merged one after the other before anything is written.

    Raises:
        UserError: the source or an adapter cannot be read, or they do not fit; the source has weights beyond `dtype` or
            computes no finite logits; the target exists or is named unlike its format; a run in float16; no tokenizer
            for a format that carries one; no transformers for hf, or a shape that it does not have; the disk refuses;
            the check failed.
    """
    model, path = open_model(source), Path(target)
    try:
        _refuse(model.path, path, to, dtype)
        parameters, tokens = model.read_parameters(), probe(model.config)
        adapters = [open_adapter(adapter) for adapter in merge_lora]
        _require_distinct(adapters)
        base_digest = digest(parameters) if adapters else ""
        merged: list[Merged] = []
        for adapter in adapters:
            parameters, difference = _merge(model.config, parameters, adapter, tokens)
            is_foreign = adapter.base_digest not in (None, base_digest)
            merged.append(Merged(adapter.where, difference, adapter.base if is_foreign else None))
        rounded = _rounded(parameters, dtype, where=model.path)
        expected = jax_logits(model.config, rounded, tokens)
        if not np.isfinite(expected).all():
            raise UserError(f"{source} computes logits that are not finite: its weights are damaged or have diverged")
        rounding = _rounding(model.config, parameters, rounded, tokens)
        with _whole_or_nothing(path) as unfinished:
            reader, read_back = _write(to, unfinished, model, rounded, dtype)
            difference = relative_error(read_back(tokens), expected)
            if difference > BOUNDS["float32"].sub_module:
                raise UserError(
                    f"{reader} read {path} back with logits that differ by {difference:.1e}; nothing was kept"
                )
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error
    return Converted(path, reader, difference, rounding, model.note, tuple(merged))


def _require_distinct(adapters: Sequence[Adapter]) -> None:
    for number, adapter in enumerate(adapters):
        for earlier in adapters[:number]:
            if adapter.lora.scale == earlier.lora.scale and _same(adapter.tree, earlier.tree):
                raise UserError(f"{adapter.where} and {earlier.where} are the same adapter; merge it once")


def _merge(
    config: ModelConfig, parameters: Parameters, adapter: Adapter, tokens: np.ndarray
) -> tuple[Parameters, float]:  # fmt: skip
    adapter.require_fit(config)
    merged = merge(parameters, adapter.tree, adapter.lora)
    # In float64, so that only the merged weights are rounded.
    ours = jax_logits(config, merged, tokens, dtype="float64")
    theirs = jax_logits(config, parameters, tokens, dtype="float64", adapter=adapter)
    difference = relative_error(ours, theirs)
    if difference > BOUNDS["float32"].sub_module and np.isfinite(theirs).all():
        raise UserError(
            f"{adapter.where} merged gives logits that differ by {difference:.1e} from those of base and adapter; "
            "nothing was kept"
        )
    return merged, difference


def convert_adapter(
    source: str | Path,
    target: str | Path,
    *,
    to: Format | AdapterFormat,
    dtype: FileDType = "float32",
    merge_lora: Sequence[str | Path] = (),
) -> Path:
    """Write the adapter at `source` to `target` in float32, and read it back bit for bit.

    Args:
        source: an adapter in any format that `open_adapter` reads.
        target: a new directory (peft) or file (torch).
        to: the format; peft or torch.
        dtype: float32.
        merge_lora: nothing; an adapter is merged into a model.

    Raises:
        UserError: the source cannot be read, or cannot be written so; the target exists or is named unlike its format;
            the disk refuses; the check failed.
    """
    adapter, path = open_adapter(source), Path(target)
    if to not in get_args(AdapterFormat):
        raise UserError(
            f"{source} is an adapter: write it as peft or torch, or merge it into a model with --merge-lora"
        )
    if dtype != "float32" or merge_lora:
        raise UserError("an adapter is written in float32 and as it is; leave --dtype and --merge-lora out")
    try:
        _refuse(Path(source), path, to, dtype)
        adapter = replace(adapter, tree=map_leaves(lambda leaf: leaf.astype(np.float32), adapter.tree))
        with _whole_or_nothing(path) as unfinished:
            if to == "peft":
                unfinished.mkdir()
                write_peft(unfinished, adapter)
            else:
                adapter = without_factor(adapter)
                _save_pth(unfinished, to_minimind(adapter), dtype, tied=False)
            read_back = open_adapter(unfinished)
            if read_back.lora != adapter.lora or not _same(read_back.tree, adapter.tree):
                raise UserError(f"{path} was read back as another adapter; nothing was kept")
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error
    return path


def _same(ours: Parameters, theirs: Parameters) -> bool:
    first, second = flatten(ours), flatten(theirs)
    return first.keys() == second.keys() and all(np.array_equal(leaf, second[path]) for path, leaf in first.items())


def _refuse(source: Path, path: Path, to: Format | AdapterFormat, dtype: FileDType) -> None:
    if source.is_dir() and path.resolve().is_relative_to(source.resolve()):
        raise UserError(f"{path} is inside the model that is converted; choose another place")
    if to in SUFFIXES and path.suffix != SUFFIXES[to]:
        raise UserError(f"--to {to} writes a {SUFFIXES[to]} file; {path} is named otherwise")
    if to not in SUFFIXES and path.suffix in (*SUFFIXES.values(), ".pt", ".bin"):
        raise UserError(f"--to {to} writes a directory; {path} is named like a file")
    if to == "run" and dtype != "float32":
        raise UserError("a run directory holds float32; leave --dtype out")
    for part in (path, config_beside(path), tokenizer_beside(path)) if to in SUFFIXES else (path,):
        if part.exists():
            raise UserError(f"{part} exists already; choose another name, or remove it")


@contextmanager
def _whole_or_nothing(path: Path) -> Iterator[Path]:
    """Where to write what becomes `path` at the end; after an error everything is as it was."""
    unfinished = path.with_name(f".unfinished-{path.name}")
    new_directories = [parent for parent in path.parents if not parent.exists()]
    try:
        _remove(unfinished)
        path.parent.mkdir(parents=True, exist_ok=True)
        yield unfinished
        for part in _parts(unfinished):
            part.rename(path.with_name(part.name.removeprefix(".unfinished-")))
    except BaseException:  # an interrupt too
        _remove(unfinished)
        for directory in new_directories:
            with suppress(OSError):
                directory.rmdir()
        raise


def _parts(path: Path) -> list[Path]:
    """What was written for `path`: itself, and what stands beside a weight file; the weights come last."""
    return [part for part in (tokenizer_beside(path), config_beside(path), path) if part.exists()]


def _remove(path: Path) -> None:
    for part in _parts(path):
        if part.is_dir():
            shutil.rmtree(part)
        else:
            part.unlink()


# --- Write, and read back ---

Written = tuple[str, Logits]
"""Who read it back, and what came of it."""


def _write(to: Format, path: Path, model: Model, parameters: Parameters, dtype: FileDType) -> Written:
    match to:
        case "torch":
            return _write_torch(path, model, parameters, dtype)
        case "safetensors":
            return _write_safetensors(path, model, parameters, dtype)
        case "hf":
            return _write_hugging_face(path, model, parameters, dtype)
        case "run":
            return _write_run(path, model, parameters)


def _write_torch(path: Path, model: Model, parameters: Parameters, dtype: FileDType) -> Written:
    config = model.config
    _save_pth(path, to_outside(parameters, config), dtype, tied=config.tie_word_embeddings)
    write_beside(path, config, model.tokenizer)
    return "torch.load", twin_logits(config, torch.load(path, map_location="cpu", weights_only=True))


def _save_pth(path: Path, tensors: Tensors, dtype: FileDType, *, tied: bool) -> None:
    try:
        write_pth(path, tensors, dtype=dtype, tied=tied)
    except RuntimeError as error:  # of torch.save, whatever the disk says
        raise OSError(f"torch.save failed; is the disk full? ({str(error).splitlines()[0]})") from error


def _write_safetensors(path: Path, model: Model, parameters: Parameters, dtype: FileDType) -> Written:
    from safetensors.torch import load_file

    write_safetensors(path, _outside(model.config, parameters, dtype))
    write_beside(path, model.config, model.tokenizer)
    return "safetensors.torch", twin_logits(model.config, load_file(path))


def _write_hugging_face(path: Path, model: Model, parameters: Parameters, dtype: FileDType) -> Written:
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise missing_extra("--to hf, which transformers checks,", "hf") from error
    tokenizer = model.require_tokenizer()
    transformers.utils.logging.disable_progress_bar()
    path.mkdir()
    write_hugging_face(path, model.config, _outside(model.config, parameters, dtype), tokenizer)
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
            raise UserError(f"transformers reads the tokenizer of {model.path} otherwise: {text!r}; nothing was kept")


def _write_run(path: Path, model: Model, parameters: Parameters) -> Written:
    # What a run that starts from this model would choose; it has made no update.
    train = resolve(TrainConfig(backend="torch"), accelerator=None, source=model.config)
    run = RunDirectory(path)
    run.create(model.config, train, model.require_tokenizer())
    state = init_state(make_model(model.config, parameters, dtype=torch.float32), train)
    progress = Progress(data=CONVERTED, model="").to_json()
    SafetensorsStore(run.checkpoints, keep=1).save(0, trees_of(state), progress=progress, val_loss=None)
    run.link_best(0)
    read_back = open_model(path)
    return "minigpt's own reader", lambda tokens: jax_logits(read_back.config, read_back.read_parameters(), tokens)


# --- Precision ---


def _rounded(parameters: Parameters, dtype: FileDType, *, where: Path) -> Parameters:
    """The parameters as float32 numbers that the file's dtype can hold."""
    with np.errstate(over="ignore"):
        rounded = map_leaves(lambda leaf: leaf.astype(dtype).astype(np.float32), parameters)
    for name, leaf in flatten(rounded).items():
        if np.isinf(leaf).any():
            largest = f"{np.finfo(dtype).max:g}"
            remedy = "; leave --dtype out" if dtype == "float16" else ""
            raise UserError(f"{where}: {name} has values beyond {dtype}, which ends at {largest}{remedy}")
    return rounded


def _rounding(config: ModelConfig, exact: Parameters, rounded: Parameters, tokens: np.ndarray) -> float | None:
    held = flatten(rounded)
    if all(np.array_equal(leaf, held[name], equal_nan=True) for name, leaf in flatten(exact).items()):
        return None
    # In float64, so that only the weights are rounded.
    ours, theirs = (jax_logits(config, tree, tokens, dtype="float64") for tree in (rounded, exact))
    return relative_error(ours, theirs)


def _outside(config: ModelConfig, parameters: Parameters, dtype: FileDType) -> Tensors:
    return map_leaves(lambda array: array.astype(dtype), to_outside(parameters, config))
