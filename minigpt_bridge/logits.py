"""The logits that a conversion is checked by: of either framework, on token ids that every model can be asked about.

B batch  T time  V vocabulary
"""

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from minigpt_jax.config import ModelConfig
from minigpt_jax.formats.adapters import Adapter
from minigpt_jax.formats.names import Parameters, map_leaves
from minigpt_jax.lora import layer_adapters
from minigpt_jax.lora_config import LoraConfig
from minigpt_jax.model import model_graph
from minigpt_torch.model import Transformer
from minigpt_torch.weights import own_name

Logits = Callable[[np.ndarray], np.ndarray]
"""Token ids [B, T] -> logits [B, T, V]."""


def jax_logits(
    config: ModelConfig,
    parameters: Parameters,
    tokens: np.ndarray,
    *,
    dtype: Literal["float32", "float64"] = "float32",
    adapter: Adapter | None = None,
) -> np.ndarray:
    """The JAX model's logits [B, T, V], with parameters, adapter and computation in `dtype`."""
    with jax.enable_x64(dtype == "float64"):
        lora, low_rank = (None, {}) if adapter is None else (adapter.lora, adapter.tree)
        base, adapters = (map_leaves(lambda leaf: jnp.asarray(leaf, dtype), tree) for tree in (parameters, low_rank))
        return np.asarray(_compiled_logits(config, dtype, lora)(base, adapters, jnp.asarray(tokens, jnp.int32)))


@cache
def _compiled_logits(
    config: ModelConfig, dtype: str, lora: LoraConfig | None
) -> Callable[[Any, Any, jax.Array], jax.Array]:
    graph = model_graph(config, dtype=jnp.dtype(dtype), kernel="blocked")

    def logits(tree: Any, adapters: Any, tokens: jax.Array) -> jax.Array:
        model = nnx.merge(graph, tree)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        low_rank = None if lora is None else layer_adapters(adapters, lora)
        hidden = model(tokens, segment_ids=jnp.ones_like(tokens), positions=positions, adapters=low_rank)
        return model.logits(hidden).reshape(*tokens.shape, -1)

    return jax.jit(logits)


def twin_logits(config: ModelConfig, state: dict[str, torch.Tensor]) -> Logits:
    """The PyTorch twin's logits with the tensors of a file, which are not touched but for the twin's shorter names."""
    own = {own_name(name): tensor.float() for name, tensor in state.items()}
    # A tied head that the file holds as well is read as one of its own, so that a wrong one would show.
    config = dataclasses.replace(config, tie_word_embeddings="lm_head.weight" not in own)
    with torch.device("meta"):
        model = Transformer(config, dtype=torch.float32, kernel="reference")
    model.load_state_dict(own, assign=True)

    @torch.no_grad()
    def logits(tokens: np.ndarray) -> np.ndarray:
        ids = torch.from_numpy(tokens)
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        hidden = model(ids, segment_ids=torch.ones_like(ids), positions=positions)
        scores: np.ndarray = model.logits(hidden).numpy()
        return scores.reshape(*tokens.shape, -1)

    return logits


def probe(config: ModelConfig) -> np.ndarray:
    """Token ids that every model can be asked about: the same for one vocabulary."""
    time = min(64, config.max_position_embeddings)
    return np.random.default_rng(0).integers(0, config.vocab_size, (2, time), dtype=np.int64)
