"""One micro-batch of training on the PyTorch side, from JAX's own state, and what of it differs from JAX.

The package's train_step runs once for each micro-batch, on one model and one optimizer for the whole search, as in a
run. Before it everything that training changes is set to JAX's values; before the optimizer's own step the clipped
gradients are, so that AdamW is measured on JAX's input.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from minigpt_bridge.bounds import relative_error
from minigpt_bridge.finder import update_suspects as suspects
from minigpt_bridge.finder.divergence import UNKNOWN, UPDATE, Divergence
from minigpt_bridge.finder.recording import Advanced
from minigpt_bridge.finder.update_suspects import Arrays, UpdateCase, difference
from minigpt_jax.config import ModelConfig, TrainConfig
from minigpt_jax.formats.names import flatten
from minigpt_torch import objective as objectives
from minigpt_torch import train_step as steps
from minigpt_torch.engine import take_optimizer, trees_of
from minigpt_torch.weights import as_own, as_tree

Trees = dict[str, Any]

_PACKAGE: Any = steps
"""The same module, for the functions that it imports: as it knows them, somebody may have replaced them."""


class _Seen(NamedTuple):
    """What the optimizer was given when it stepped; empty where it did not."""

    clipped: dict[str, torch.Tensor]
    rates: list[float]


def force_state(state: steps.TrainState, trees: Trees) -> None:
    """Give the PyTorch state JAX's parameters, moments, sums and counters; parameters that JAX lacks stay."""
    own = as_own(trees["parameters"], state.model.config, device="cpu")
    with torch.no_grad():
        for name, parameter in state.model.named_parameters():
            if name in own:
                parameter.copy_(own[name])
    take_optimizer(state, trees["optimizer"])


def compare_update(
    state: steps.TrainState,
    batch: objectives.BatchTensors,
    train: TrainConfig,
    *,
    total_updates: int,
    before: Trees,
    after: Trees,
    advanced: Advanced,
) -> Divergence | None:
    """Train PyTorch on one micro-batch and name the first thing that differs from JAX.

    Args:
        state: holds JAX's values (`force_state`); it is changed as training changes it.
        batch: the micro-batch.
        train: of the run, in float64 without dropout.
        total_updates: length of the schedule.
        before: JAX's two trees before the micro-batch, NumPy.
        after: JAX's two trees after it.
        advanced: what JAX computed in between, NumPy.
    """
    config = state.model.config
    seen = _Seen({}, [])
    hook = _force_gradients(state, as_own(advanced.clipped, config, device="cpu"), seen)
    metrics = steps.train_step(state, batch, train, total_updates=total_updates)
    hook.remove()
    gradients, mean, clipped = (flatten(tree) for tree in (advanced.gradients, advanced.mean, advanced.clipped))
    rate = float(advanced.metrics.learning_rate)
    case = UpdateCase(train, total_updates, before, after, trees_of(state), rate, gradients, mean, clipped)
    is_update = int(after["optimizer"]["updates"]) > case.updates
    found = _compare_counters(case)
    if found is None and is_update:
        rates = [metrics.learning_rate, *seen.rates]
        found = _compare_rate(case, rates) or _compare_gradient(case, seen.clipped, config) or _compare_slots(case)
    return found or _compare_window(case)


def _force_gradients(state: steps.TrainState, own: dict[str, torch.Tensor], seen: _Seen) -> Any:
    """Note what the optimizer is given when it steps, and give it JAX's gradients instead; removed by `.remove()`."""

    def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for name, parameter in state.model.named_parameters():
            if parameter.grad is not None and name in own:
                seen.clipped[name] = parameter.grad.clone()
                parameter.grad.copy_(own[name])
        seen.rates.extend(group["lr"] for group in optimizer.param_groups)

    (optimizer,) = state.optimizers  # AdamW: what the search is for
    return optimizer.register_step_pre_hook(hook)


# --- The parts of an update, in their order ---


def _compare_counters(case: UpdateCase) -> Divergence | None:
    ours, theirs = (
        np.array([int(trees["optimizer"][name]) for name in ("updates", "micro_steps")])
        for trees in (case.after, case.theirs)
    )
    error = relative_error(ours, theirs)
    if error <= UPDATE:
        return None
    cause = UNKNOWN
    if ours[0] != theirs[0]:
        cause = "an update is made before the window is full" if theirs[0] > ours[0] else "a full window is not used"
    return _divergence(case, "accumulation", error, cause)


def _compare_rate(case: UpdateCase, theirs: list[float]) -> Divergence | None:
    error = max(relative_error(case.rate, rate) for rate in theirs)
    if error <= UPDATE:
        return None
    scale = float(case.before["optimizer"]["learning_rate_scale"])

    def rate_of(count: int) -> float:
        return scale * _PACKAGE.learning_rate(count, case.train, total_updates=case.total_updates)

    return _divergence(case, "learning_rate", error, suspects.rate_cause(case, theirs[-1], rate_of))


def _compare_gradient(case: UpdateCase, clipped: dict[str, torch.Tensor], config: ModelConfig) -> Divergence | None:
    """The mean gradient and its clipping: together as they ran, and apart where that differs."""
    norm = float(case.theirs["optimizer"]["grad_norm"])
    right = float(case.after["optimizer"]["grad_norm"])
    seen = flatten(as_tree(clipped, config)) if clipped else case.clipped
    error = max(relative_error(right, norm), difference(case.clipped, seen))
    if error <= UPDATE:
        return None
    alone, parts = _clip(case.mean, case.train.grad_clip)
    apart = max(relative_error(right, alone), difference(case.clipped, parts))
    if apart > UPDATE:
        layer = _only_layer(case.clipped, parts)
        return _divergence(case, "clip", apart, suspects.clip_cause(case, alone, parts), layer)
    return _divergence(case, "mean_gradient", error, suspects.mean_cause(case, norm), _only_layer(case.clipped, seen))


def _clip(gradients: Arrays, max_norm: float) -> tuple[float, Arrays]:
    """The norm and the clipped gradients that PyTorch's function makes of these."""
    parameters = {
        name: nn.Parameter(torch.zeros(array.shape, dtype=torch.float64)) for name, array in gradients.items()
    }
    for name, parameter in parameters.items():
        parameter.grad = torch.from_numpy(np.array(gradients[name]))
    norm = float(_PACKAGE.clip_by_global_norm(parameters.values(), max_norm))
    return norm, {
        name: np.zeros(0) if parameter.grad is None else parameter.grad.numpy()
        for name, parameter in parameters.items()
    }


def _compare_slots(case: UpdateCase) -> Divergence | None:
    for name in ("first_moment", "second_moment", "parameters"):
        ours, theirs = case.slot("after", name), case.slot("theirs", name)
        error = difference(ours, theirs)
        if error <= UPDATE:
            continue
        layer = _only_layer(ours, theirs)
        if name != "parameters":
            return _divergence(case, name, error, suspects.moment_cause(case, name), layer)
        decay = suspects.decay_cause(case)
        if decay is not None:
            return _divergence(case, "weight_decay", error, decay, layer)
        return _divergence(case, "parameter_update", error, suspects.parameter_cause(case), layer)
    return None


def _compare_window(case: UpdateCase) -> Divergence | None:
    """What is left in the window; nothing, after an update."""
    ours, theirs = case.slot("after", "gradient_sums"), case.slot("theirs", "gradient_sums")
    tokens = [trees["optimizer"]["token_sum"] for trees in (case.after, case.theirs)]
    error = max(difference(ours, theirs), relative_error(*tokens))
    if error <= UPDATE:
        return None
    return _divergence(case, "accumulation", error, suspects.accumulation_cause(case), _only_layer(ours, theirs))


def _divergence(case: UpdateCase, operation: str, error: float, cause: str, layer: int | None = None) -> Divergence:
    return Divergence(case.updates + 1, "update", layer, operation, error, UPDATE, cause)


def _only_layer(ours: Arrays, theirs: Arrays) -> int | None:
    """The block whose parameters alone are over the bound."""
    wrong = {
        path.split(".")[1] if path.startswith("layers.") else None
        for path, array in ours.items()
        if relative_error(array, theirs.get(path, np.zeros(0))) > UPDATE
    }
    only = wrong.pop() if len(wrong) == 1 else None
    return None if only is None else int(only)
