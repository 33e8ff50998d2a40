"""One micro-batch of training, and the evaluation step, in eager PyTorch.

The gradients of summed losses are added up over a window beside their terms (supervised tokens, or pairs in dpo);
the update divides the one by the other. What optax.MultiSteps does for the twin, minigpt_jax/train_step.py, stands
here in plain sight.

B batch  T time  S = B*T positions  D hidden
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minigpt_jax.config import ModelConfig, TrainConfig
from minigpt_jax.formats.names import flatten
from minigpt_torch.lora import draw_adapter_masks
from minigpt_torch.model import Transformer
from minigpt_torch.objective import NO_MASKS, BatchTensors, DropoutMasks, LossSums, Models, objective
from minigpt_torch.optimizer import clip_by_global_norm, learning_rate, make_optimizers, set_learning_rate


@dataclass
class TrainState:
    """Everything that training changes, and the models beside it."""

    models: Models
    trained: dict[str, Tensor]
    """What is trained, by name: the model's parameters, or its adapters."""
    optimizers: list[torch.optim.Optimizer]
    """Each parameter is in one of them."""
    sums: dict[str, Tensor]
    """Summed gradients of the unfinished window, by the same names."""
    tokens: float = 0.0
    """Supervised tokens, or pairs, of the unfinished window."""
    micro_steps: int = 0
    """Micro-batches in the unfinished window."""
    updates: int = 0
    """Finished updates."""
    grad_norm: float = 0.0
    """Global norm of the last finished update's gradient, before clipping."""
    learning_rate_scale: float = 1.0
    """Lowered by a rollback."""

    @property
    def model(self) -> Transformer:
        """The model that answers."""
        return self.models.model

    def optimizer_of(self, parameter: Tensor) -> torch.optim.Optimizer:
        """The one that updates `parameter`."""
        owners = (each for each in self.optimizers for group in each.param_groups for own in group["params"]
                  if own is parameter)  # fmt: skip
        return next(owners)


class StepMetrics(NamedTuple):
    """What one micro-batch reports."""

    loss_sum: float
    loss_terms: float
    supervised_tokens: float
    figures: dict[str, float]
    skipped: bool
    updates: int
    grad_norm: float
    learning_rate: float


def init_state(
    model: Transformer,
    config: TrainConfig,
    *,
    adapters: dict[Any, Any] | None = None,
    frozen: Transformer | None = None,
) -> TrainState:
    """The state before the first step; moments and sums take the dtype of what is trained (float32 or float64).

    Args:
        model: what answers.
        config: of the run.
        adapters: in lora, what is trained beside the model, as minigpt_torch/lora.py's `adapter_tensors` makes it.
        frozen: in distill the teacher, in dpo the reference where its log-probabilities are not in the batches.
    """
    for other in (frozen, model if adapters is not None else None):
        if other is not None:
            other.requires_grad_(False)
    trained: dict[str, Tensor] = dict(model.named_parameters()) if adapters is None else flatten(adapters)
    sums = {name: torch.zeros_like(parameter) for name, parameter in trained.items()}
    models = Models(model, adapters, frozen)
    return TrainState(models, trained, make_optimizers(trained, config), sums)


def draw_dropout_masks(
    model: ModelConfig, config: TrainConfig, *, num_positions: int, generator: torch.Generator
) -> DropoutMasks:
    """What one forward pass keeps.

    Of the model: attention and feed-forward of each layer, then the embedding, bool [S, D]; of adapters in lora as
    `draw_adapter_masks` orders them.
    """
    shape = (num_positions, model.hidden_size)
    places = range(2 * model.num_layers + 1 if config.dropout else 0)
    of_model = [torch.rand(shape, generator=generator, device=generator.device) >= config.dropout for _ in places]
    if config.stage != "lora" or config.lora.dropout == 0:
        return DropoutMasks(of_model or None)
    of_adapters = draw_adapter_masks(model, config.lora, num_positions=num_positions, generator=generator)
    return DropoutMasks(of_model or None, of_adapters)


def train_step(
    state: TrainState,
    batch: BatchTensors,
    config: TrainConfig,
    *,
    total_updates: int,
    dropout_masks: DropoutMasks = NO_MASKS,
) -> StepMetrics:
    """Add one micro-batch to the window, and update the model when the window is full.

    A micro-batch whose loss or gradient is not finite, or that has no term, changes nothing and does not
    count towards the window; neither does one whose update would leave a parameter not finite.
    """
    loss_sums = objective(state.models, batch, config, dropout_masks)
    gradients = torch.autograd.grad(loss_sums.loss, list(state.trained.values()))
    loss, terms = loss_sums.loss.item(), loss_sums.terms.item()
    rate = learning_rate(state.updates, config, total_updates=total_updates) * state.learning_rate_scale
    norm = nn.utils.get_total_norm(gradients)
    accepted = terms > 0 and math.isfinite(loss) and math.isfinite(norm.item())
    if accepted:
        # New sums instead of adding in place: an update that is rejected leaves the old ones.
        sums = {name: state.sums[name] + gradient for name, gradient in zip(state.trained, gradients, strict=True)}
        if state.micro_steps + 1 < config.accumulation_steps:
            state.sums, state.tokens = sums, state.tokens + terms
            state.micro_steps += 1
        else:
            accepted = _update(state, sums, state.tokens + terms, config, rate=rate)
    return StepMetrics(
        loss_sum=loss,
        loss_terms=terms,
        supervised_tokens=batch.loss_weights.sum().item(),
        figures={name: value.item() for name, value in loss_sums.figures.items()},
        skipped=not accepted,
        updates=state.updates,
        grad_norm=state.grad_norm,
        learning_rate=rate,
    )


def flush(state: TrainState, config: TrainConfig, *, total_updates: int) -> float | None:
    """Make an update from a window that the data ended early; returns its gradient's norm before clipping.

    None, and nothing changed, when the update would leave a parameter not finite.
    """
    rate = learning_rate(state.updates, config, total_updates=total_updates) * state.learning_rate_scale
    return state.grad_norm if _update(state, state.sums, state.tokens, config, rate=rate) else None


@torch.no_grad()
def evaluate(state: TrainState, batch: BatchTensors, config: TrainConfig) -> LossSums:
    """The objective's sums, without dropout."""
    return objective(state.models, batch, config)


def _update(state: TrainState, sums: dict[str, Tensor], tokens: float, config: TrainConfig, *, rate: float) -> bool:
    """One update by the mean gradient over `tokens`; False, with everything as before, when it is not finite."""
    parameters = state.trained
    for name, parameter in parameters.items():
        parameter.grad = sums[name] / max(tokens, 1)
    norm = clip_by_global_norm(parameters.values(), config.grad_clip)
    before = [parameter.detach().clone() for parameter in parameters.values()]
    owners = [state.optimizer_of(parameter) for parameter in parameters.values()]
    slots = [
        {key: value.clone() for key, value in owner.state[parameter].items()}
        for owner, parameter in zip(owners, parameters.values(), strict=True)
    ]
    set_learning_rate(state.optimizers, rate)
    for optimizer in state.optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if not all(bool(torch.isfinite(parameter).all()) for parameter in parameters.values()):
        with torch.no_grad():
            for owner, parameter, old, slot in zip(owners, parameters.values(), before, slots, strict=True):
                parameter.copy_(old)
                owner.state[parameter] = slot
        return False
    state.sums = {name: torch.zeros_like(total) for name, total in sums.items()}
    state.tokens, state.micro_steps = 0.0, 0
    state.updates += 1
    state.grad_norm = float(norm)
    return True
