"""The weights of linear layers as 8-bit integers, for reading fewer bytes at each token. Framework-free.

Each output of a layer has a scale of its own: its largest weight becomes 127 or -127 (absmax, symmetric, as in
Dettmers et al., 2022, but of the weights alone: activations, norms and the embedding table stay as they are). A tied
head is the table as well; here it becomes a layer beside it. minigpt_jax/int8.py and minigpt_torch/int8.py compute with
these numbers.

I inputs of a linear layer  O its outputs
"""

import numpy as np
from numpy.typing import NDArray

from minigpt_jax.formats.names import Parameters

LARGEST = 127
"""The range is symmetric: -128 is not used."""


def int8_kernel(kernel: NDArray[np.floating]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Integers [I, O] and scales [O], whose product is at most half a scale from each weight of `kernel` [I, O]."""
    largest = np.abs(kernel).max(axis=0)
    scale = np.where(largest > 0, largest, 1).astype(np.float32) / np.float32(LARGEST)
    return np.rint(kernel / scale).clip(-LARGEST, LARGEST).astype(np.int8), scale


def int8_parameters(parameters: Parameters) -> Parameters:
    """The tree with `kernel` int8 [I, O] and `scale` float32 [O] in the place of each kernel, and a head of its own.

    Args:
        parameters: float arrays, in the layout of minigpt_jax/initialization.py.
    """
    untied = {"lm_head": {"kernel": parameters["embed_tokens"]["embedding"].T}}
    return {name: _quantized(branch) for name, branch in {**untied, **parameters}.items()}


def _quantized(branch: Parameters) -> Parameters:
    if "kernel" in branch:
        kernel, scale = int8_kernel(branch["kernel"])
        return {"kernel": kernel, "scale": scale}
    return {name: _quantized(below) if isinstance(below, dict) else below for name, below in branch.items()}
