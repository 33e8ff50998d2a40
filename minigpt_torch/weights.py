"""A model's tensors from and to NumPy, by the names of minigpt_jax/formats/names.py."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from minigpt_jax.config import ModelConfig
from minigpt_jax.formats.names import Entry, Parameters, flatten, table, unflatten
from minigpt_torch.attention import Kernel
from minigpt_torch.model import Transformer


def make_model(
    config: ModelConfig,
    parameters: Parameters,
    *,
    dtype: torch.dtype,
    kernel: Kernel = "reference",
    device: str | torch.device = "cpu",
) -> Transformer:
    """A model that holds these parameters, in their own dtype, and computes in `dtype`."""
    with torch.device("meta"):
        model = Transformer(config, dtype=dtype, kernel=kernel)
    # Assigned, not copied: a float64 array makes a float64 parameter.
    model.load_state_dict(as_own(parameters, config, device=device), assign=True)
    return model.requires_grad_()


def parameters_of(model: Transformer) -> Parameters:
    """The model's parameters as a tree of arrays, in the layout of minigpt_jax/initialization.py."""
    return as_tree(dict(model.named_parameters()), model.config)


def as_tree(tensors: Mapping[str, Tensor], config: ModelConfig) -> Parameters:
    """The tree from a tensor for each parameter, or for some (gradients, moments), by the model's own names."""
    arrays = {outside_name(name): as_array(tensor) for name, tensor in tensors.items()}
    entries = [entry for entry in table(config) if entry.name in arrays]
    assert len(entries) == len(arrays), "a name that the table has not"
    return unflatten({entry.path: _turned(arrays[entry.name], entry) for entry in entries})


def as_own(tree: Parameters, config: ModelConfig, *, device: str | torch.device) -> dict[str, Tensor]:
    """A tensor for each array of a tree, which may be of some parameters alone, by the model's own names."""
    leaves = flatten(tree)
    return {
        own_name(entry.name): as_tensor(_turned(leaves[entry.path], entry), device)
        for entry in table(config)
        if entry.path in leaves
    }


def _turned(array: np.ndarray, entry: Entry) -> np.ndarray:
    """From one layout to the other: a kernel is [in, out] in the tree, [out, in] in a tensor."""
    return np.ascontiguousarray(array.T if entry.is_kernel else array)


def own_name(name: str) -> str:
    """A tensor's name inside `Transformer`: the outside name without the wrapper that ours does not have."""
    return name.removeprefix("model.")


def outside_name(name: str) -> str:
    """The outside name of a tensor inside `Transformer`."""
    return name if name.startswith("lm_head.") else f"model.{name}"


def as_tensor(array: np.ndarray, device: str | torch.device) -> Tensor:
    """A tensor with memory of its own."""
    return torch.from_numpy(np.array(array)).to(device)


def as_array(tensor: Tensor) -> np.ndarray:
    """An array with memory of its own; bfloat16, which NumPy lacks, as float32."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy().copy()
