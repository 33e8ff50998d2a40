"""The model with linear layers whose weights are 8-bit integers (minigpt_jax/quantization.py).

The integers become floats where they are multiplied. On a CPU, XLA would do that for a whole matrix before its product;
for the few rows of decoding it is done a block of inputs at a time, so that the floats stay in the cache. Its twin
is minigpt_torch/int8.py.

S positions  I inputs of a linear layer  O its outputs  V vocabulary  D hidden
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from minigpt_jax.attention import Kernel
from minigpt_jax.config import ModelConfig
from minigpt_jax.model import Transformer

FEW_ROWS = 32
"""Up to this many positions a product is made by blocks; with more of them making a matrix of floats costs little."""

BLOCK = 128
"""Inputs of one block: its floats take 0.26 MB for 512 outputs, 3.3 MB for a head of 6400."""


class Int8Linear(nnx.Module):
    """x @ (kernel * scale), in the dtype of x."""

    def __init__(self, linear: nnx.Linear):
        inputs, outputs = linear.kernel[...].shape
        self.kernel = nnx.Param(jnp.zeros((inputs, outputs), jnp.int8))
        self.scale = nnx.Param(jnp.ones(outputs))

    def __call__(self, x: jax.Array) -> jax.Array:  # [S, I] -> [S, O]
        kernel, scale = self.kernel[...], self.scale[...].astype(x.dtype)
        if x.shape[0] > FEW_ROWS or len(kernel) < BLOCK:
            return _at_once(x, kernel) * scale
        return jax.lax.platform_dependent(x, kernel, cpu=_by_blocks, default=_at_once) * scale


def _at_once(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return x @ kernel.astype(x.dtype)


def _by_blocks(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """The same, a block of inputs after the other."""
    count = kernel.shape[0] // BLOCK

    def add_block(number: jax.Array, total: jax.Array) -> jax.Array:
        inputs = jax.lax.dynamic_slice_in_dim(x, number * BLOCK, BLOCK, axis=1)
        return total + _at_once(inputs, jax.lax.dynamic_slice_in_dim(kernel, number * BLOCK, BLOCK))

    rest = _at_once(x[:, count * BLOCK :], kernel[count * BLOCK :])  # zeros where the blocks take all
    return jax.lax.fori_loop(0, count, add_block, rest)


class Int8Transformer(Transformer):
    """`Transformer` with 8-bit linear layers and a head of its own, which may be a copy of the embedding table."""

    lm_head: Any  # Int8Linear

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, kernel: Kernel, rngs: nnx.Rngs):
        super().__init__(replace(config, tie_word_embeddings=False), dtype=dtype, kernel=kernel, rngs=rngs)
        for room in (self, *(room for layer in self.layers for room in (layer.self_attn, layer.mlp))):
            for name, module in list(vars(room).items()):
                if isinstance(module, nnx.Linear):
                    setattr(room, name, Int8Linear(module))

    @property
    def head(self) -> jax.Array:
        """The output head as a [V, D] table of floats."""
        return (self.lm_head.kernel[...] * self.lm_head.scale[...]).T

    def logits(self, hidden: jax.Array) -> jax.Array:  # [S, D] -> [S, V]
        """Scores over the vocabulary, in at least float32."""
        return self.lm_head(hidden).astype(jnp.promote_types(hidden.dtype, jnp.float32))


def int8_graph(config: ModelConfig, *, dtype: jnp.dtype, kernel: Kernel) -> nnx.GraphDef[Transformer]:
    """The model's structure without parameters; merged with `int8_parameters` it is callable."""
    model = nnx.eval_shape(lambda: Int8Transformer(config, dtype=dtype, kernel=kernel, rngs=nnx.Rngs(0)))
    return nnx.split(model)[0]
