"""Low-rank adapters as data: their sizes, and the sum of a base and its adapters.

Framework-free. Adapters are a tree like the parameters', with `lora_a` [in, rank] and `lora_b` [rank, out] in the place
of a `kernel` [in, out]. How a model computes with them is minigpt_jax/lora.py.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from minigpt_jax.config import ModelConfig
from minigpt_jax.errors import UserError
from minigpt_jax.formats.names import Parameters, flatten, table, unflatten
from minigpt_jax.lora_config import TARGETS, LoraConfig


def adapted_modules(num_layers: int, targets: Sequence[str]) -> Iterator[str]:
    """Each adapted linear layer, as in layers.0.self_attn.q_proj: block by block, in the order of `targets`."""
    for number in range(num_layers):
        for target in targets:
            yield f"layers.{number}.{TARGETS[target]}.{target}"


def adapter_shapes(model: ModelConfig, lora: LoraConfig) -> dict[str, tuple[int, int]]:
    """The shape of every array of the adapters by its path with dots, A before B, in the order of `adapted_modules`.

    Raises:
        UserError: the rank is larger than a side of a targeted kernel.
    """
    kernels = {entry.path: entry.shape for entry in table(model)}
    shapes: dict[str, tuple[int, int]] = {}
    for module in adapted_modules(model.num_layers, lora.targets):
        fan_in, fan_out = kernels[f"{module}.kernel"]
        if lora.rank > min(fan_in, fan_out):
            raise UserError(f"rank {lora.rank} is larger than a side of {module}, which is {fan_in} x {fan_out}")
        shapes |= {f"{module}.lora_a": (fan_in, lora.rank), f"{module}.lora_b": (lora.rank, fan_out)}
    return shapes


def adapter_count(model: ModelConfig, lora: LoraConfig) -> int:
    """Number of trained parameters.

    Raises:
        UserError: the rank is larger than a side of a targeted kernel.
    """
    return sum(fan_in * fan_out for fan_in, fan_out in adapter_shapes(model, lora).values())


def merge(parameters: Parameters, adapters: Parameters, lora: LoraConfig) -> Parameters:
    """The parameters with each targeted kernel W replaced by W + scale * A B.

    Args:
        parameters: a tree of a model; it is left as it is, and shares the other arrays with the result.
        adapters: a tree of the shapes of `adapter_shapes`.
        lora: that of the adapters.

    Returns:
        A new tree. Product and sum are made in at least float32 and cast once, to the kernel's dtype. Merging another
        adapter into it adds that one's update.
    """
    leaves, low_rank = flatten(parameters), flatten(adapters)
    for module in adapted_modules(len(parameters["layers"]), lora.targets):
        kernel, a, b = leaves[f"{module}.kernel"], low_rank[f"{module}.lora_a"], low_rank[f"{module}.lora_b"]
        high = np.result_type(np.float32, kernel.dtype, a.dtype, b.dtype)
        update = lora.scale * (a.astype(high) @ b.astype(high))
        leaves[f"{module}.kernel"] = (kernel.astype(high) + update).astype(kernel.dtype)
    return unflatten(leaves)
