"""Low-rank adapters beside the linear layers of a model (Hu et al., 2021): x W + scale * (dropout(x) A) B.

Adapters are a tree of their own, as minigpt_jax/initialization.py draws it: what is differentiated in their training,
while the model's parameters stay. Its twin is minigpt_torch/lora.py.

S positions  I inputs of a linear layer  O its outputs  R rank
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from minigpt_jax.adapter_tree import adapter_shapes
from minigpt_jax.config import ModelConfig
from minigpt_jax.dropout import dropout, keep_mask
from minigpt_jax.lora_config import LoraConfig


class LowRank(NamedTuple):
    """The adapter of one linear layer, in one forward pass."""

    a: jax.Array  # [I, R]
    b: jax.Array  # [R, O]
    scale: float
    dropout_rate: float
    dropout_key: jax.Array | None

    def __call__(self, x: jax.Array) -> jax.Array:  # [S, I] -> [S, O]
        """What the adapter adds, in the dtype of `x`."""
        # Dropout acts on the adapter's input alone: the base sees all of x.
        low = dropout(x, rate=self.dropout_rate, key=self.dropout_key) @ self.a.astype(x.dtype)  # [S, R]
        return low @ self.b.astype(x.dtype) * self.scale


LayerAdapters = Mapping[str, LowRank]
"""The adapters of one block, by the name of their linear layer."""

NO_ADAPTERS: LayerAdapters = MappingProxyType({})


def adapted(linear: Callable[[jax.Array], jax.Array], x: jax.Array, adapter: LowRank | None) -> jax.Array:
    """A linear layer with its adapter, where it has one. x [S, I] -> [S, O]."""
    return linear(x) if adapter is None else linear(x) + adapter(x)


def layer_adapters(tree: Any, lora: LoraConfig, *, dropout_key: jax.Array | None = None) -> list[LayerAdapters]:
    """What the model takes as `adapters`, one entry a block.

    Args:
        tree: nested dicts of `lora_a` [I, R] and `lora_b` [R, O]; may be traced.
        lora: that of the tree.
        dropout_key: of one forward pass; without it nothing is dropped.
    """
    numbers = range(len(tree["layers"]))
    count = len(numbers) * len(lora.targets)
    keys = iter([None] * count if dropout_key is None else jax.random.split(dropout_key, count))

    def low_rank(pair: Mapping[str, jax.Array]) -> LowRank:
        return LowRank(pair["lora_a"], pair["lora_b"], lora.scale, lora.dropout, next(keys))

    adapters: list[LayerAdapters] = []
    for number in numbers:
        pairs = {target: pair for room in tree["layers"][number].values() for target, pair in room.items()}
        adapters.append({target: low_rank(pairs[target]) for target in lora.targets})
    return adapters


def adapter_masks(
    model: ModelConfig, lora: LoraConfig, *, num_positions: int, dropout_key: jax.Array
) -> list[jax.Array]:
    """What each adapter keeps of its input under `dropout_key`: bool [S, I], block by block in order of the targets."""
    inputs = [shape[0] for path, shape in adapter_shapes(model, lora).items() if path.endswith("lora_a")]
    keys = jax.random.split(dropout_key, len(inputs))
    return [
        keep_mask(key, rate=lora.dropout, shape=(num_positions, size)) for key, size in zip(keys, inputs, strict=True)
    ]
