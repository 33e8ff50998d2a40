"""From summed gradients to a parameter update, by PyTorch's own parts: clip_grad_norm_ and AdamW; or by Muon.

Its twin, minigpt_jax/optimizer.py, follows the formulas of these two. Weight decay acts on matrices, the embedding
among them, or on everything; the learning rate is set before each update from the one schedule formula, which counts
updates.
"""

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from minigpt_jax.config import TrainConfig
from minigpt_jax.schedule import learning_rate_at
from minigpt_torch.muon import Muon


def make_optimizers(trained: Mapping[str, Tensor], config: TrainConfig) -> list[torch.optim.Optimizer]:
    """AdamW with the rates of `config`, or Muon for the matrices inside the blocks and AdamW for the rest.

    Each parameter is in one of them; their learning rate is set by `set_learning_rate`.

    Args:
        trained: what is trained, by name.
        config: of the run.
    """
    if config.optimizer == "adamw":
        return [_adamw(trained.values(), config)]
    of_muon = {name: tensor for name, tensor in trained.items() if name.startswith("layers.") and tensor.ndim == 2}
    rest = [tensor for name, tensor in trained.items() if name not in of_muon]
    muon = [Muon(of_muon.values(), weight_decay=config.weight_decay)] if of_muon else []
    return [*muon, _adamw(rest, config)] if rest else [*muon]


def _adamw(parameters: Iterable[Tensor], config: TrainConfig) -> torch.optim.AdamW:
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


def set_learning_rate(optimizers: Iterable[torch.optim.Optimizer], rate: float) -> None:
    """Give every group this rate."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate


def clip_by_global_norm(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale the gradients by min(1, max_norm / (norm + 1e-6)); 0 switches it off. Returns the norm before clipping."""
    everything = list(parameters)
    if max_norm > 0:
        return nn.utils.clip_grad_norm_(everything, max_norm)
    return nn.utils.get_total_norm([parameter.grad for parameter in everything if parameter.grad is not None])
