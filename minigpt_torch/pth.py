"""MiniMind's weight files: a state dict written by torch.save, float16 or float32."""

from pathlib import Path
from typing import Literal

import numpy as np
import torch

from minigpt_jax.errors import UserError
from minigpt_jax.formats.names import Tensors, unwrapped
from minigpt_torch.weights import as_array

_WEIGHT_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def read_pth(path: Path) -> Tensors:
    """The tensors of a state dict by their outside names, as float32 (float64 stays).

    A training checkpoint that holds the state dict under `model` or `state_dict` is accepted; wrappers' prefixes are
    taken off.

    Raises:
        UserError: the file is missing, damaged, or holds something else.
    """
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except Exception as error:
        # A damaged pickle can fail in any way. torch's message is left out: it advises to run the code in the file.
        raise UserError(f"{path} is not a state dict that torch.save wrote: damaged, or more than tensors") from error
    for key in ("model", "state_dict"):
        if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
            loaded = loaded[key]
    if not isinstance(loaded, dict) or not loaded or not all(isinstance(t, torch.Tensor) for t in loaded.values()):
        raise UserError(f"{path} does not hold a state dict: a dict of tensors by name")
    for name, tensor in loaded.items():
        if tensor.dtype not in _WEIGHT_DTYPES or tensor.layout != torch.strided or tensor.device.type != "cpu":
            kind = f"{tensor.dtype}, {tensor.layout} on {tensor.device.type}"
            raise UserError(f"{path}: {name} is {kind}; weights are plain float tensors of 16, 32 or 64 bits")
    arrays = {str(name): as_array(tensor.resolve_neg()) for name, tensor in loaded.items()}
    floats = {name: array.astype(np.promote_types(array.dtype, np.float32)) for name, array in arrays.items()}
    return unwrapped(floats, where=str(path))


def write_pth(path: Path, tensors: Tensors, *, dtype: Literal["float16", "float32"], tied: bool) -> None:
    """Write a state dict as MiniMind does.

    Args:
        path: the file.
        tensors: by their outside names.
        dtype: of the file; MiniMind's own are float16.
        tied: write the embedding under the head's name as well (one tensor, shared), as MiniMind's loaders expect.
    """
    state = {name: torch.from_numpy(np.array(array)).to(getattr(torch, dtype)) for name, array in tensors.items()}
    if tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    torch.save(state, path)
