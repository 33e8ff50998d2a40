"""The PyTorch side of the divergence finder, operation by operation on JAX's own inputs.

Teacher forcing: no operation sees another one's result, so an error does not propagate, and the first operation over
its bound is the faulty one.

B batch  T time
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from minigpt_bridge.finder.operations import Operation, Side
from minigpt_bridge.finder.recording import Recorded
from minigpt_torch import model as rooms
from minigpt_torch import objective
from minigpt_torch.objective import BatchTensors
from minigpt_torch.weights import as_array, as_tensor


class Replay(NamedTuple):
    """One operation that PyTorch has run on JAX's inputs."""

    operation: Operation
    part: nn.Module
    inputs: list[Tensor]
    output: Tensor


def torch_side(batch: BatchTensors) -> Side:
    """What operations may read of the PyTorch package."""
    return Side(torch, rooms, objective, {"dropout_rate": 0.0, "dropout_masks": (None, None)}, batch)


def replay(operation: Operation, part: nn.Module, side: Side, inputs: list[np.ndarray]) -> Replay | None:
    """Run one operation; None where the whole that it is a part of does not show it."""
    leaves = [as_tensor(array, "cpu").requires_grad_() for array in inputs]
    output = (operation.theirs or operation.call)(part, side, *leaves)
    return None if output is None else Replay(operation, part, leaves, output)


Compared = dict[str, tuple[np.ndarray, np.ndarray]]
"""(JAX's, PyTorch's) by name."""


def gradients(done: Replay, recorded: Recorded) -> Compared:
    """The gradient of one operation by each input and each parameter, pulled back from the same cotangent.

    Parameters go by their names in the part: all of the part's, also those that the operation should not read.
    """
    scope = done.operation.scope
    if scope is None and not done.inputs:
        return {}
    expected = dict(zip(done.operation.inputs, recorded.input_gradients, strict=True))
    expected |= own_layout(recorded.parameter_gradients, f"{scope}." if scope else "")
    leaves = dict(zip(done.operation.inputs, done.inputs, strict=True)) | dict(done.part.named_parameters())
    return compare(expected, pull_back(done.output, leaves, as_tensor(recorded.cotangent, "cpu")))


def pull_back(output: Tensor, leaves: dict[str, Tensor], cotangent: Tensor | None = None) -> dict[str, np.ndarray]:
    """The gradient by each leaf at which one arrives."""
    leaves = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    if not output.requires_grad:
        return {}
    arrived = torch.autograd.grad(output, list(leaves.values()), cotangent, allow_unused=True)
    return {
        name: as_array(gradient) for name, gradient in zip(leaves, arrived, strict=True) if gradient is not None
    }  # fmt: skip


def compare(expected: dict[str, np.ndarray], found: dict[str, np.ndarray]) -> Compared:
    """Both sides' gradients by name; 0 on the side that has none."""
    return {
        name: (expected.get(name, np.zeros_like(found.get(name))), found.get(name, np.zeros_like(expected.get(name))))
        for name in {**expected, **found}
    }


def own_layout(tree: dict[Any, Any], prefix: str = "") -> dict[str, np.ndarray]:
    """A part of JAX's parameter tree by PyTorch's names inside the same part, in its layout."""
    leaves: dict[str, np.ndarray] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            leaves |= own_layout(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}weight"] = value.T if key == "kernel" else value
    return leaves


@torch.no_grad()
def norm_in_bfloat16(norm: nn.Module, x: np.ndarray) -> np.ndarray:
    """A norm's output for float32 parameters and a bfloat16 input, as float32."""
    own = {name: parameter.float() for name, parameter in norm.named_parameters()}
    return as_array(torch.func.functional_call(norm, own, (torch.from_numpy(np.array(x)).bfloat16(),)))
