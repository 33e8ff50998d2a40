"""A model in any format, made ready to generate, or to say how likely a text is, in either framework."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike

from minigpt_bridge.models import open_adapter, open_model
from minigpt_jax.config import Backend, ModelConfig
from minigpt_jax.errors import UserError, missing_extra
from minigpt_jax.formats.adapters import Adapter
from minigpt_jax.formats.names import Parameters, digest, map_leaves
from minigpt_jax.generation import Decoder
from minigpt_jax.quantization import int8_parameters
from minigpt_jax.scoring import Scorer
from minigpt_jax.tokenizer import Tokenizer

if TYPE_CHECKING:
    from minigpt_torch.attention import Kernel
    from minigpt_torch.lora import LayerAdapters
    from minigpt_torch.model import Transformer


@dataclass(frozen=True)
class Ready:
    """A model that can generate."""

    decoder: Decoder
    config: ModelConfig
    tokenizer: Tokenizer
    note: str | None
    """What was taken for granted about model and adapter and a person should know."""


@dataclass(frozen=True)
class ReadyScorer:
    """A model that can say how likely a text is."""

    scorer: Scorer
    config: ModelConfig
    tokenizer: Tokenizer
    note: str | None
    """As in `Ready`."""


def open_decoder(
    source: str,
    *,
    backend: Backend = "jax",
    dtype: str = "float32",
    int8: bool = False,
    adapter: str | None = None,
) -> Ready:
    """The model at `source`.

    Args:
        source: a model in any format that `open_model` reads.
        backend: the framework that computes.
        dtype: of the computation: float32, bfloat16 or float64.
        int8: hold the weights of linear layers as 8-bit integers.
        adapter: one that `open_adapter` reads, applied beside the weights.

    Raises:
        UserError: the model or the adapter cannot be read, or they do not fit; the model has no tokenizer.
    """
    opened = _named_ids_only(_open(source, adapter, int8))
    make = _jax_decoder if backend == "jax" else _torch_decoder
    return Ready(make(opened, dtype), opened.config, opened.tokenizer, opened.note)


def open_scorer(
    source: str,
    *,
    backend: Backend = "jax",
    dtype: str = "float32",
    int8: bool = False,
    adapter: str | None = None,
) -> ReadyScorer:
    """The model at `source`; arguments and errors as for `open_decoder`."""
    opened = _open(source, adapter, int8)
    make = _jax_scorer if backend == "jax" else _torch_scorer
    return ReadyScorer(make(opened, dtype), opened.config, opened.tokenizer, opened.note)


@dataclass(frozen=True)
class _Opened:
    """A model and what goes with it, before a framework takes it."""

    config: ModelConfig
    parameters: Parameters
    """Those of minigpt_jax/quantization.py when `int8`."""
    int8: bool
    adapter: Adapter | None
    tokenizer: Tokenizer
    note: str | None


def _open(source: str, adapter_source: str | None, int8: bool) -> _Opened:
    model = open_model(source)
    tokenizer = model.require_tokenizer()
    if tokenizer.vocab_size > model.config.vocab_size:
        raise UserError(
            f"the tokenizer of {source} has {tokenizer.vocab_size} entries, its model only {model.config.vocab_size}"
        )
    adapter = None if adapter_source is None else open_adapter(adapter_source)
    if adapter is not None:
        adapter.require_fit(model.config)
    parameters, notes = model.read_parameters(), [] if model.note is None else [model.note]
    if adapter is not None and adapter.base_digest not in (None, digest(parameters)):
        notes.append(f"{adapter.where} was trained on {adapter.base}, whose weights are not those of {source}")
    if int8:
        parameters = int8_parameters(parameters)
    return _Opened(model.config, parameters, int8, adapter, tokenizer, "\n".join(notes) or None)


def _named_ids_only(opened: _Opened) -> _Opened:
    """The model without the ids beyond its tokenizer, with which some vocabularies are padded: none can be written."""
    size = opened.tokenizer.vocab_size
    if size == opened.config.vocab_size:
        return opened
    parameters = dict(opened.parameters)
    parameters["embed_tokens"] = map_leaves(lambda leaf: leaf[:size], parameters["embed_tokens"])
    if "lm_head" in parameters:
        parameters["lm_head"] = map_leaves(lambda leaf: leaf[..., :size], parameters["lm_head"])
    return replace(opened, config=replace(opened.config, vocab_size=size), parameters=parameters)


def _floats_as(dtype: DTypeLike, tree: Parameters) -> Parameters:
    """The tree with its floats in `dtype`; integers stay."""
    return map_leaves(lambda leaf: leaf if leaf.dtype == np.int8 else leaf.astype(dtype), tree)


# --- JAX ---


def _jax_decoder(opened: _Opened, dtype: str) -> Decoder:
    from minigpt_jax.generate import JaxDecoder

    parameters, options = _on_jax_device(opened, dtype)
    return JaxDecoder(opened.config, parameters, **options)


def _jax_scorer(opened: _Opened, dtype: str) -> Scorer:
    from minigpt_jax.evaluate import JaxScorer

    parameters, options = _on_jax_device(opened, dtype)
    return JaxScorer(opened.config, parameters, **options)


def _on_jax_device(opened: _Opened, dtype: str) -> tuple[Any, dict[str, Any]]:
    """The parameters, and the options that a decoder and a scorer share."""
    import jax.numpy as jnp

    from minigpt_jax.engine import configure_jax

    configure_jax(dtype)

    def placed(tree: Parameters) -> Any:
        # On the device once, and not at every call.
        return map_leaves(jnp.asarray, _floats_as(np.promote_types(dtype, np.float32), tree))

    adapter = opened.adapter
    lora, tree = (None, None) if adapter is None else (adapter.lora, placed(adapter.tree))
    options = {"dtype": jnp.dtype(dtype), "int8": opened.int8, "adapters": tree, "lora": lora}
    return placed(opened.parameters), options


# --- PyTorch ---


def _torch_decoder(opened: _Opened, dtype: str) -> Decoder:
    model, adapters = _on_torch_device(opened, dtype, kernel="reference")
    from minigpt_torch.generate import TorchDecoder

    return TorchDecoder(model, adapters=adapters)


def _torch_scorer(opened: _Opened, dtype: str) -> Scorer:
    model, adapters = _on_torch_device(opened, dtype, kernel="fused")
    from minigpt_torch.evaluate import TorchScorer

    return TorchScorer(model, adapters=adapters)


def _on_torch_device(
    opened: _Opened, dtype: str, *, kernel: "Kernel"
) -> tuple["Transformer", "list[LayerAdapters] | None"]:  # fmt: skip
    try:
        import torch
    except ModuleNotFoundError as error:
        raise missing_extra("--backend torch", "torch") from error
    from minigpt_torch.engine import find_device
    from minigpt_torch.int8 import make_int8_model
    from minigpt_torch.lora import layer_adapters
    from minigpt_torch.weights import as_tensor, make_model

    device, high = find_device(), np.float64 if dtype == "float64" else np.float32
    make = make_int8_model if opened.int8 else make_model
    own = _floats_as(high, opened.parameters)
    model = make(opened.config, own, dtype=getattr(torch, dtype), kernel=kernel, device=device)
    adapter = opened.adapter
    if adapter is None:
        return model, None
    tree = map_leaves(lambda leaf: as_tensor(leaf, device), _floats_as(high, adapter.tree))
    return model, layer_adapters(tree, adapter.lora)
