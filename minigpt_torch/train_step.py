"""One micro-batch of training, and the evaluation step, in eager PyTorch.

The gradients of summed losses are added up over a window beside their supervised tokens; the update divides the one
by the other. What optax.MultiSteps does for the twin, minigpt_jax/train_step.py, stands here in plain sight.

B batch  T time  S = B*T positions  D hidden
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from minigpt_jax.config import ModelConfig, TrainConfig
from minigpt_torch.loss import next_token_loss
from minigpt_torch.model import Transformer
from minigpt_torch.optimizer import clip_by_global_norm, learning_rate, make_optimizer, set_learning_rate
from minigpt_torch.weights import as_tensor


class BatchTensors(NamedTuple):
    """One micro-batch on the device: five [B, T] tensors, as minigpt_jax/data/batching.py makes them."""

    tokens: Tensor
    targets: Tensor
    loss_weights: Tensor
    segment_ids: Tensor
    positions: Tensor


def batch_tensors(arrays: Iterable[Any], *, device: str | torch.device = "cpu") -> BatchTensors:
    """Five NumPy arrays [B, T] as tensors with memory of their own; ids become int64, as PyTorch's look-ups want."""
    return BatchTensors(
        *(as_tensor(array if array.dtype.kind == "f" else array.astype(np.int64), device) for array in arrays)
    )


@dataclass
class TrainState:
    """Everything that training changes."""

    model: Transformer
    optimizer: torch.optim.Optimizer
    sums: dict[str, Tensor]
    """Summed gradients of the unfinished window, by parameter name."""
    tokens: float = 0.0
    """Supervised tokens of the unfinished window."""
    micro_steps: int = 0
    """Micro-batches in the unfinished window."""
    updates: int = 0
    """Finished updates."""
    grad_norm: float = 0.0
    """Global norm of the last finished update's gradient, before clipping."""
    learning_rate_scale: float = 1.0
    """Lowered by a rollback."""


class StepMetrics(NamedTuple):
    """What one micro-batch reports."""

    loss_sum: float
    supervised_tokens: float
    skipped: bool
    updates: int
    grad_norm: float
    learning_rate: float


def init_state(model: Transformer, config: TrainConfig) -> TrainState:
    """The state before the first step; moments and sums take the parameters' dtype (float32 or float64)."""
    sums = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    return TrainState(model, make_optimizer(model.parameters(), config), sums)


def summed_loss(
    model: Transformer,
    batch: BatchTensors,
    *,
    dropout_rate: float = 0.0,
    dropout_masks: Sequence[Tensor] | None = None,
    sparse: bool = False,
) -> Tensor:
    """The loss of a micro-batch summed over its supervised tokens, in nats; `sparse` as in `next_token_loss`."""
    hidden = model(
        batch.tokens,
        segment_ids=batch.segment_ids,
        positions=batch.positions,
        dropout_rate=dropout_rate,
        dropout_masks=dropout_masks,
    )
    targets, loss_weights = batch.targets.reshape(-1), batch.loss_weights.reshape(-1)
    return next_token_loss(hidden, model.head, targets, loss_weights, sparse=sparse)


def draw_dropout_masks(
    model: ModelConfig, *, rate: float, num_positions: int, generator: torch.Generator
) -> list[Tensor]:
    """What each place of the model keeps: attention and feed-forward of each layer, then the embedding; bool [S, D]."""
    shape = (num_positions, model.hidden_size)
    device = generator.device
    return [
        torch.rand(shape, generator=generator, device=device) >= rate for _ in range(2 * model.num_layers + 1)
    ]  # fmt: skip


def train_step(
    state: TrainState,
    batch: BatchTensors,
    config: TrainConfig,
    *,
    total_updates: int,
    dropout_masks: Sequence[Tensor] | None = None,
) -> StepMetrics:
    """Add one micro-batch to the window, and update the model when the window is full.

    A micro-batch whose loss or gradient is not finite, or that has no supervised token, changes nothing and does not
    count towards the window; neither does one whose update would leave a parameter not finite.
    """
    parameters = dict(state.model.named_parameters())
    loss_sum = summed_loss(
        state.model,
        batch,
        dropout_rate=config.dropout,
        dropout_masks=dropout_masks,
        sparse=config.has_unlearned_tokens,
    )
    gradients = torch.autograd.grad(loss_sum, list(parameters.values()))
    supervised = batch.loss_weights.sum().item()
    rate = learning_rate(state.updates, config, total_updates=total_updates) * state.learning_rate_scale
    norm = nn.utils.get_total_norm(gradients)
    accepted = supervised > 0 and math.isfinite(loss_sum.item()) and math.isfinite(norm.item())
    if accepted:
        # New sums instead of adding in place: an update that is rejected leaves the old ones.
        sums = {name: state.sums[name] + gradient for name, gradient in zip(parameters, gradients, strict=True)}
        if state.micro_steps + 1 < config.accumulation_steps:
            state.sums, state.tokens = sums, state.tokens + supervised
            state.micro_steps += 1
        else:
            accepted = _update(state, sums, state.tokens + supervised, config, rate=rate)
    return StepMetrics(loss_sum.item(), supervised, not accepted, state.updates, state.grad_norm, rate)


def flush(state: TrainState, config: TrainConfig, *, total_updates: int) -> float | None:
    """Make an update from a window that the data ended early; returns its gradient's norm before clipping.

    None, and nothing changed, when the update would leave a parameter not finite.
    """
    rate = learning_rate(state.updates, config, total_updates=total_updates) * state.learning_rate_scale
    return state.grad_norm if _update(state, state.sums, state.tokens, config, rate=rate) else None


@torch.no_grad()
def evaluate(model: Transformer, batch: BatchTensors, config: TrainConfig) -> tuple[float, float]:
    """Summed loss in nats and number of supervised tokens."""
    return summed_loss(model, batch, sparse=config.has_unlearned_tokens).item(), batch.loss_weights.sum().item()


def _update(state: TrainState, sums: dict[str, Tensor], tokens: float, config: TrainConfig, *, rate: float) -> bool:
    """One update by the mean gradient over `tokens`; False, with everything as before, when it is not finite."""
    parameters = dict(state.model.named_parameters())
    for name, parameter in parameters.items():
        parameter.grad = sums[name] / max(tokens, 1)
    norm = clip_by_global_norm(parameters.values(), config.grad_clip)
    before = [parameter.detach().clone() for parameter in parameters.values()]
    slots = [
        {key: value.clone() for key, value in state.optimizer.state[parameter].items()}
        for parameter in parameters.values()
    ]
    set_learning_rate(state.optimizer, rate)
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)
    if not all(bool(torch.isfinite(parameter).all()) for parameter in parameters.values()):
        with torch.no_grad():
            for parameter, old, slot in zip(parameters.values(), before, slots, strict=True):
                parameter.copy_(old)
                state.optimizer.state[parameter] = slot
        return False
    state.sums = {name: torch.zeros_like(total) for name, total in sums.items()}
    state.tokens, state.micro_steps = 0.0, 0
    state.updates += 1
    state.grad_norm = float(norm)
    return True
