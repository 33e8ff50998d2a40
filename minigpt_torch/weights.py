"""A model's tensors from and to NumPy, by the names of minigpt_jax/formats/names.py."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from minigpt_jax.config import ModelConfig
from minigpt_jax.formats.names import Parameters, from_outside, to_outside
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
    """The tree from one tensor for each parameter (gradients, moments), by the model's own names."""
    arrays = {outside_name(name): as_array(tensor) for name, tensor in tensors.items()}
    return from_outside(arrays, config, where="the model")


def as_own(tree: Parameters, config: ModelConfig, *, device: str | torch.device) -> dict[str, Tensor]:
    """One tensor for each parameter, by the model's own names, from a tree of arrays."""
    return {own_name(name): as_tensor(array, device) for name, array in to_outside(tree, config).items()}


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
