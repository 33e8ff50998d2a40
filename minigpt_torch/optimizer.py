"""From summed gradients to a parameter update, by PyTorch's own parts: clip_grad_norm_ and AdamW.

Its twin, minigpt_jax/optimizer.py, follows the formulas of these two. Weight decay acts on matrices, the embedding
among them, or on everything; the learning rate is set before each update from the one schedule formula, which counts
updates.
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn

from minigpt_jax.config import TrainConfig
from minigpt_jax.schedule import learning_rate_at


def make_optimizer(parameters: Iterable[Tensor], config: TrainConfig) -> torch.optim.AdamW:
    """AdamW with the rates of `config`; its learning rate is set by `set_learning_rate`."""
    everything = list(parameters)
    groups = [
        {"params": [parameter for parameter in everything if parameter.ndim >= 2], "weight_decay": config.weight_decay},
        {
            "params": [parameter for parameter in everything if parameter.ndim < 2],
            "weight_decay": config.weight_decay if config.decay == "all" else 0.0,
        },
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=(config.beta1, config.beta2), eps=config.adam_eps)


def learning_rate(updates: int, config: TrainConfig, *, total_updates: int) -> float:
    """The schedule's rate for the update that follows `updates` finished ones."""
    return float(learning_rate_at(np.float64(updates), config, total_updates=total_updates, numpy=np))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every group this rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip_by_global_norm(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale the gradients by min(1, max_norm / (norm + 1e-6)); 0 switches it off. Returns the norm before clipping."""
    everything = list(parameters)
    if max_norm > 0:
        return nn.utils.clip_grad_norm_(everything, max_norm)
    return nn.utils.get_total_norm([parameter.grad for parameter in everything if parameter.grad is not None])
