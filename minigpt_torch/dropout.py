"""Dropout, from a mask drawn outside."""

import torch
from torch import Tensor


def dropout(x: Tensor, *, rate: float, keep: Tensor | None) -> Tensor:
    """Zero each element where `keep` is False and scale the rest by 1 / (1 - rate); nothing without a mask."""
    if keep is None or rate == 0:
        return x
    return torch.where(keep, x / (1 - rate), 0).to(x.dtype)
