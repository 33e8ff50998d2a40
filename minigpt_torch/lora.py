"""Low-rank adapters beside the linear layers of a model (Hu et al., 2021): x W + scale * (dropout(x) A) B.

Adapters are a tree of their own, as minigpt_jax/initialization.py draws it: what is differentiated in their training,
while the model's parameters stay. Names and layout are those of its twin, minigpt_jax/lora.py; dropout is given its
masks.

S positions  I inputs of a linear layer  O its outputs  R rank
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minigpt_jax.adapter_tree import adapter_shapes
from minigpt_jax.config import ModelConfig
from minigpt_jax.formats.names import Parameters, map_leaves
from minigpt_jax.lora_config import LoraConfig
from minigpt_torch.dropout import dropout


class LowRank(NamedTuple):
    """The adapter of one linear layer, in one forward pass."""

    a: Tensor  # [I, R]
    b: Tensor  # [R, O]
    scale: float
    dropout_rate: float
    dropout_mask: Tensor | None  # bool [S, I]

    def __call__(self, x: Tensor) -> Tensor:  # [S, I] -> [S, O]
        """What the adapter adds, in the dtype of `x`."""
        # Dropout acts on the adapter's input alone: the base sees all of x.
        low = dropout(x, rate=self.dropout_rate, keep=self.dropout_mask) @ self.a.to(x.dtype)  # [S, R]
        return low @ self.b.to(x.dtype) * self.scale


LayerAdapters = Mapping[str, LowRank]
"""The adapters of one block, by the name of their linear layer."""

NO_ADAPTERS: LayerAdapters = MappingProxyType({})


def adapted(linear: Callable[[Tensor], Tensor], x: Tensor, adapter: LowRank | None) -> Tensor:
    """A linear layer with its adapter, where it has one. x [S, I] -> [S, O]."""
    return linear(x) if adapter is None else linear(x) + adapter(x)


def layer_adapters(
    tree: Any, lora: LoraConfig, *, dropout_masks: Sequence[Tensor] | None = None
) -> list[LayerAdapters]:  # fmt: skip
    """What the model takes as `adapters`, one entry a block.

    Args:
        tree: nested dicts of `lora_a` [I, R] and `lora_b` [R, O].
        lora: that of the tree.
        dropout_masks: of one forward pass, as `draw_adapter_masks` orders them; without them nothing is dropped.
    """
    numbers = range(len(tree["layers"]))
    count = len(numbers) * len(lora.targets)
    masks = iter([None] * count if dropout_masks is None else dropout_masks)

    def low_rank(pair: Mapping[str, Tensor]) -> LowRank:
        return LowRank(pair["lora_a"], pair["lora_b"], lora.scale, lora.dropout, next(masks))

    adapters: list[LayerAdapters] = []
    for number in numbers:
        pairs = {target: pair for room in tree["layers"][number].values() for target, pair in room.items()}
        adapters.append({target: low_rank(pairs[target]) for target in lora.targets})
    return adapters


def draw_adapter_masks(
    model: ModelConfig, lora: LoraConfig, *, num_positions: int, generator: torch.Generator
) -> list[Tensor]:
    """What each adapter keeps of its input: bool [S, I], block by block in order of the targets."""
    inputs = [shape[0] for path, shape in adapter_shapes(model, lora).items() if path.endswith("lora_a")]
    device = generator.device
    return [
        torch.rand((num_positions, size), generator=generator, device=device) >= lora.dropout for size in inputs
    ]  # fmt: skip


def adapter_tensors(tree: Parameters, *, device: str | torch.device = "cpu") -> dict[Any, Any]:
    """The tree with tensors that are trained in the place of NumPy arrays, each with memory of its own."""
    return map_leaves(lambda array: torch.tensor(array, device=device, requires_grad=True), tree)
