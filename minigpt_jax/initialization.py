"""The first weights of a model, and of adapters, drawn once in NumPy so that every framework starts from the same.

Framework-free. The tree has the names and the layout of minigpt_jax/model.py: a linear layer's `kernel` is
[in, out], the embedding table is [V, D].

D hidden  F ffn  V vocabulary  N query heads  K kv heads  H head size
"""

import math
import zlib
from typing import Any

import numpy as np

from minigpt_jax.adapter_tree import adapter_shapes
from minigpt_jax.config import Initializer, ModelConfig
from minigpt_jax.formats.names import unflatten
from minigpt_jax.lora_config import LoraConfig

Parameters = dict[str, Any]

EMBEDDING_SCALE = 6.4
"""The embedding's standard deviation is this over the width: 0.05 at 128, 0.0125 at 512. The table is the head as well,
so at the start a token's logit for itself is width times deviation: this number, at every width, and no sure guess."""

RESIDUAL_SCALE = 0.1
"""Scale of what a block writes at the start. The table is tied to the head, so it is small; branches of unit scale
would drown the token in the residual stream. Both scales were chosen by validation loss; docs/results.md."""


def initial_parameters(
    config: ModelConfig, *, initializer: Initializer, seed: int, dtype: str = "float32"
) -> Parameters:
    """Draw every parameter of the model. Norm weights are 1.

    `scaled_normal`: kernels from N(0, 1 / fan_in); the two that write to the residual stream (o_proj, down_proj)
    are multiplied by RESIDUAL_SCALE / sqrt(2 * num_layers) (the root: Radford et al., 2019). `xavier`: kernels from
    U(-a, a), a = sqrt(6 / (fan_in + fan_out)) (Glorot and Bengio, 2010). The embedding is
    N(0, (EMBEDDING_SCALE / D)^2) under both. Each tensor has a stream of its own, from the seed and its name.

    Args:
        config: the model's shape.
        initializer: one of the two rules.
        seed: any integer from 0.
        dtype: float32 or float64; the draws are made in float64 and cast once.

    Returns:
        Nested dicts of arrays; the blocks of `layers` are keyed by their number.
    """

    def normal(name: str, shape: tuple[int, ...], std: float) -> np.ndarray:
        return (_generator(seed, name).standard_normal(shape) * std).astype(dtype)

    def kernel(name: str, fan_in: int, fan_out: int, *, residual: bool = False) -> dict[str, np.ndarray]:
        if initializer == "xavier":
            limit = math.sqrt(6 / (fan_in + fan_out))
            return {"kernel": _generator(seed, name).uniform(-limit, limit, (fan_in, fan_out)).astype(dtype)}
        std = fan_in**-0.5 / (math.sqrt(2 * config.num_layers) / RESIDUAL_SCALE if residual else 1.0)
        return {"kernel": normal(name, (fan_in, fan_out), std)}

    def norm(size: int) -> dict[str, np.ndarray]:
        return {"weight": np.ones(size, dtype)}

    hidden, ffn = config.hidden_size, config.intermediate_size
    query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def block(number: int) -> Parameters:
        attention: Parameters = {
            "q_proj": kernel(f"layers.{number}.self_attn.q_proj", hidden, query_size),
            "k_proj": kernel(f"layers.{number}.self_attn.k_proj", hidden, kv_size),
            "v_proj": kernel(f"layers.{number}.self_attn.v_proj", hidden, kv_size),
            "o_proj": kernel(f"layers.{number}.self_attn.o_proj", query_size, hidden, residual=True),
        }
        if config.qk_norm:
            attention |= {"q_norm": norm(config.head_dim), "k_norm": norm(config.head_dim)}
        return {
            "input_layernorm": norm(hidden),
            "self_attn": attention,
            "post_attention_layernorm": norm(hidden),
            "mlp": {
                "gate_proj": kernel(f"layers.{number}.mlp.gate_proj", hidden, ffn),
                "up_proj": kernel(f"layers.{number}.mlp.up_proj", hidden, ffn),
                "down_proj": kernel(f"layers.{number}.mlp.down_proj", ffn, hidden, residual=True),
            },
        }

    parameters: Parameters = {
        "embed_tokens": {"embedding": normal("embed_tokens", (config.vocab_size, hidden), EMBEDDING_SCALE / hidden)},
        "layers": {number: block(number) for number in range(config.num_layers)},
        "norm": norm(hidden),
    }
    if not config.tie_word_embeddings:
        parameters["lm_head"] = kernel("lm_head", hidden, config.vocab_size)
    return parameters


def initial_adapters(model: ModelConfig, lora: LoraConfig, *, seed: int, dtype: str = "float32") -> Parameters:
    """Draw the first adapters: A from U(-1 / sqrt(in), 1 / sqrt(in)), as PEFT does, and B = 0, so nothing changes yet.

    Each A has a stream of its own, from the seed and its path.

    Args:
        model: the shape of the base.
        lora: which matrices get an adapter, and its rank.
        seed: any integer from 0.
        dtype: float32 or float64; the draws are made in float64 and cast once.

    Returns:
        Nested dicts of `lora_a` [in, rank] and `lora_b` [rank, out].

    Raises:
        UserError: the rank is larger than a side of a targeted kernel.
    """

    def draw(path: str, shape: tuple[int, int]) -> np.ndarray:
        if path.endswith("lora_b"):
            return np.zeros(shape, dtype)
        limit = shape[0] ** -0.5
        return _generator(seed, path).uniform(-limit, limit, shape).astype(dtype)

    return unflatten({path: draw(path, shape) for path, shape in adapter_shapes(model, lora).items()})


def _generator(seed: int, name: str) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(name.encode())])
