"""What a stage minimizes: a sum over a micro-batch, and the number of terms that it is divided by.

Pretraining and sft sum the next-token loss over supervised tokens; lora does the same for a frozen model with
adapters; dpo sums over pairs; distill over supervised tokens again, with a teacher that is not differentiated. Names
are those of its twin, minigpt_jax/objective.py; a model here holds its parameters, and dropout is given its masks.

B batch  T time  S = B*T positions  P = B/2 pairs  D hidden
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minigpt_jax.config import TrainConfig
from minigpt_torch.distillation import distillation_loss
from minigpt_torch.lora import layer_adapters
from minigpt_torch.loss import next_token_loss
from minigpt_torch.model import Transformer
from minigpt_torch.preference import answer_log_probabilities, preference_loss
from minigpt_torch.weights import as_tensor


class BatchTensors(NamedTuple):
    """One micro-batch on the device: five [B, T] tensors, as minigpt_jax/data/batching.py makes them."""

    tokens: Tensor
    targets: Tensor
    loss_weights: Tensor
    segment_ids: Tensor
    positions: Tensor
    reference: Tensor | None = None
    """[B] log-probability of each row's answer under the reference, in dpo where it was computed before."""


def batch_tensors(arrays: Sequence[Any], *, device: str | torch.device = "cpu") -> BatchTensors:
    """The fields of `BatchTensors`, given as NumPy arrays, with memory of their own; ids become int64 for look-ups."""

    def tensor(array: np.ndarray) -> Tensor:
        return as_tensor(array if array.dtype.kind == "f" else array.astype(np.int64), device)

    of_batch, reference = arrays[:5], arrays[5] if len(arrays) > 5 else None
    tokens, targets, loss_weights, segment_ids, positions = map(tensor, of_batch)
    known = None if reference is None else tensor(reference)
    return BatchTensors(tokens, targets, loss_weights, segment_ids, positions, known)


class LossSums(NamedTuple):
    """What a micro-batch says; scalars."""

    loss: Tensor
    """In nats, summed over supervised tokens, or over pairs in dpo; the only one that is differentiated."""
    terms: Tensor
    """How many of them there are, as a float."""
    figures: dict[str, Tensor]
    """What else the stage reports, summed over the same; names are those of metrics.jsonl."""


@dataclass
class Models:
    """The models of a stage."""

    model: Transformer
    """What answers; in lora its parameters are frozen."""
    adapters: dict[Any, Any] | None = None
    """In lora, what is trained: the tree of minigpt_torch/lora.py's `adapter_tensors`."""
    frozen: Transformer | None = None
    """In distill the teacher, in dpo the reference where its log-probabilities were not computed before."""


class DropoutMasks(NamedTuple):
    """What one forward pass keeps: bool [S, ...] for each place of the model and of the adapters."""

    model: Sequence[Tensor] | None = None
    adapters: Sequence[Tensor] | None = None


NO_MASKS = DropoutMasks()


def objective(models: Models, batch: BatchTensors, config: TrainConfig, masks: DropoutMasks = NO_MASKS) -> LossSums:
    """The objective of the stage of `config`; without masks nothing is dropped."""
    if config.stage == "dpo":
        return _preference(models, batch, config, masks)
    if config.stage == "distill":
        return _distillation(models, batch, config, masks)
    return _tokens(models, batch, config, masks)


def summed_loss(
    model: Transformer,
    batch: BatchTensors,
    *,
    dropout_rate: float = 0.0,
    dropout_masks: Sequence[Tensor] | None = None,
    adapters: Any = None,
    sparse: bool = False,
) -> Tensor:
    """The loss of a micro-batch summed over its supervised tokens, in nats; `sparse` as in `next_token_loss`."""
    hidden = _hidden(model, batch, dropout_rate, dropout_masks, adapters)
    targets, loss_weights = batch.targets.reshape(-1), batch.loss_weights.reshape(-1)
    return next_token_loss(hidden, model.head, targets, loss_weights, sparse=sparse)


def _tokens(models: Models, batch: BatchTensors, config: TrainConfig, masks: DropoutMasks) -> LossSums:
    adapters = None
    if models.adapters is not None:
        adapters = layer_adapters(models.adapters, config.lora, dropout_masks=masks.adapters)
    loss = summed_loss(
        models.model,
        batch,
        dropout_rate=config.dropout,
        dropout_masks=masks.model,
        adapters=adapters,
        sparse=config.has_unlearned_tokens,
    )
    return LossSums(loss, batch.loss_weights.sum(), {})


def _preference(models: Models, batch: BatchTensors, config: TrainConfig, masks: DropoutMasks) -> LossSums:
    policy = log_probabilities(models.model, batch, dropout_rate=config.dropout, dropout_masks=masks.model)
    chosen, rejected = policy.chunk(2)
    reference = batch.reference
    if reference is None:
        assert models.frozen is not None
        with torch.no_grad():
            reference = log_probabilities(models.frozen, batch)
    reference_chosen, reference_rejected = reference.to(chosen.dtype).chunk(2)
    result = preference_loss(
        chosen,
        rejected,
        reference_chosen,
        reference_rejected,
        beta=config.dpo_beta,
        label_smoothing=config.label_smoothing,
    )
    # A batch that is not full has empty rows at the end of either half.
    is_pair = (batch.loss_weights.chunk(2)[0] > 0).any(dim=1).to(chosen.dtype)
    figures = {
        "reward_accuracy": result.accuracies,
        "reward_margin": result.margins,
        "chosen_reward": result.chosen_rewards,
        "rejected_reward": result.rejected_rewards,
    }
    sums = {name: (is_pair * values).sum() for name, values in figures.items()}
    return LossSums((is_pair * result.loss).sum(), is_pair.sum(), sums)


def log_probabilities(
    model: Transformer,
    batch: BatchTensors,
    *,
    dropout_rate: float = 0.0,
    dropout_masks: Sequence[Tensor] | None = None,
) -> Tensor:  # [B]
    """Log-probability of each row's answer under the model, in nats."""
    hidden = _hidden(model, batch, dropout_rate, dropout_masks)
    targets, loss_weights = batch.targets.reshape(-1), batch.loss_weights.reshape(-1)
    return answer_log_probabilities(hidden, model.head, targets, loss_weights, rows=batch.tokens.shape[0])


def _distillation(models: Models, batch: BatchTensors, config: TrainConfig, masks: DropoutMasks) -> LossSums:
    assert models.frozen is not None
    hidden = _hidden(models.model, batch, config.dropout, masks.model)
    with torch.no_grad():
        teacher_hidden = _hidden(models.frozen, batch, 0.0, None)
    result = distillation_loss(
        hidden,
        models.model.head,
        teacher_hidden,
        models.frozen.head.detach(),
        batch.targets.reshape(-1),
        batch.loss_weights.reshape(-1),
        alpha=config.distill_alpha,
        temperature=config.distill_temperature,
    )
    figures = {"cross_entropy": result.cross_entropy, "divergence": result.divergence}
    return LossSums(result.loss, batch.loss_weights.sum(), figures)


def _hidden(
    model: Transformer,
    batch: BatchTensors,
    dropout_rate: float,
    dropout_masks: Sequence[Tensor] | None,
    adapters: Any = None,
) -> Tensor:
    """Last hidden states [S, D]."""
    hidden: Tensor = model(
        batch.tokens,
        segment_ids=batch.segment_ids,
        positions=batch.positions,
        dropout_rate=dropout_rate,
        dropout_masks=dropout_masks,
        adapters=adapters,
    )
    return hidden
