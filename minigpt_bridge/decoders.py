"""A model in any format, made ready to generate in either framework."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minigpt_bridge.models import open_adapter, open_model
from minigpt_jax.config import Backend, ModelConfig
from minigpt_jax.errors import UserError, missing_extra
from minigpt_jax.formats.adapters import Adapter
from minigpt_jax.formats.names import Parameters, digest
from minigpt_jax.generation import Decoder
from minigpt_jax.tokenizer import Tokenizer


@dataclass(frozen=True)
class Ready:
    """A model that can generate."""

    decoder: Decoder
    config: ModelConfig
    tokenizer: Tokenizer
    note: str | None
    """What was taken for granted about model and adapter and a person should know."""


def open_decoder(
    source: str, *, backend: Backend = "jax", dtype: str = "float32", adapters: Sequence[str] = ()
) -> Ready:  # fmt: skip
    """The model at `source`.

    Args:
        source: a model in any format that `open_model` reads.
        backend: the framework that computes.
        dtype: of the computation: float32, bfloat16 or float64.
        adapters: one that `open_adapter` reads, applied beside the weights, or none.

    Raises:
        UserError: the model or the adapter cannot be read, or they do not fit; the model has no tokenizer.
    """
    model = open_model(source)
    tokenizer = model.require_tokenizer()
    if tokenizer.vocab_size > model.config.vocab_size:
        raise UserError(
            f"the tokenizer of {source} has {tokenizer.vocab_size} entries, its model only {model.config.vocab_size}"
        )
    if len(adapters) > 1:
        raise UserError("one adapter at a time is applied; merge several with scripts/convert.py --merge-lora")
    adapter = open_adapter(adapters[0]) if adapters else None
    if adapter is not None:
        adapter.require_fit(model.config)
    make = _jax_decoder if backend == "jax" else _torch_decoder
    parameters, notes = model.read_parameters(), [] if model.note is None else [model.note]
    if adapter is not None and adapter.base_digest not in (None, digest(parameters)):
        notes.append(f"{adapter.where} was trained on {adapter.base}, whose weights are not those of {source}")
    decoder = make(model.config, parameters, dtype, adapter)
    return Ready(decoder, model.config, tokenizer, "\n".join(notes) or None)


def _jax_decoder(config: ModelConfig, parameters: Parameters, dtype: str, adapter: Adapter | None) -> Decoder:
    import jax
    import jax.numpy as jnp

    from minigpt_jax.engine import configure_jax
    from minigpt_jax.generate import JaxDecoder

    configure_jax(dtype)

    def placed(tree: Parameters) -> Parameters:
        # On the device once, and not at every call.
        placed: Parameters = jax.tree.map(lambda leaf: jnp.asarray(leaf, np.promote_types(dtype, np.float32)), tree)
        return placed

    lora, tree = (None, None) if adapter is None else (adapter.lora, placed(adapter.tree))
    return JaxDecoder(config, placed(parameters), dtype=jnp.dtype(dtype), adapters=tree, lora=lora)


def _torch_decoder(config: ModelConfig, parameters: Parameters, dtype: str, adapter: Adapter | None) -> Decoder:
    try:
        import torch
    except ModuleNotFoundError as error:
        raise missing_extra("--backend torch", "torch") from error
    from minigpt_jax.formats.names import map_leaves
    from minigpt_torch.engine import find_device
    from minigpt_torch.generate import TorchDecoder
    from minigpt_torch.lora import layer_adapters
    from minigpt_torch.weights import as_tensor, make_model

    device, high = find_device(), np.float64 if dtype == "float64" else np.float32
    own = map_leaves(lambda leaf: leaf.astype(high), parameters)
    model = make_model(config, own, dtype=getattr(torch, dtype), kernel="reference", device=device)
    if adapter is None:
        return TorchDecoder(model)
    tree = map_leaves(lambda leaf: as_tensor(leaf.astype(high), device), adapter.tree)
    return TorchDecoder(model, adapters=layer_adapters(tree, adapter.lora))
