"""What a stage minimizes: a sum over a micro-batch, and the number of terms that it is divided by.

Pretraining and sft sum the next-token loss over supervised tokens; lora does the same for a frozen model with
adapters; dpo sums over pairs; distill over supervised tokens again, with a teacher that is not differentiated. What is
trained and what is frozen are two trees; only the first has a gradient.

B batch  T time  S = B*T positions  P = B/2 pairs  D hidden
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

from minigpt_jax.config import TrainConfig
from minigpt_jax.distillation import distillation_loss
from minigpt_jax.lora import layer_adapters
from minigpt_jax.loss import next_token_loss
from minigpt_jax.model import Transformer
from minigpt_jax.preference import answer_log_probabilities, preference_loss

Tree = Any
Graph: TypeAlias = nnx.GraphDef[Transformer]


class BatchArrays(NamedTuple):
    """One micro-batch on the device: five [B, T] arrays, as minigpt_jax/data/batching.py makes them."""

    tokens: jax.Array
    targets: jax.Array
    loss_weights: jax.Array
    segment_ids: jax.Array
    positions: jax.Array
    reference: jax.Array | None = None
    """[B] log-probability of each row's answer under the reference, in dpo where it was computed before."""


class LossSums(NamedTuple):
    """What a micro-batch says; scalars."""

    loss: jax.Array
    """In nats, summed over supervised tokens, or over pairs in dpo; the only one that is differentiated."""
    terms: jax.Array
    """How many of them there are, as a float."""
    figures: dict[str, jax.Array]
    """What else the stage reports, summed over the same; names are those of metrics.jsonl."""


Objective = Callable[[Tree, Tree, BatchArrays, jax.Array | None], LossSums]
"""(trained, frozen, batch, dropout key) -> sums. Without a key nothing is dropped."""


def make_objective(graph: Graph, config: TrainConfig, *, teacher: Graph | None = None) -> Objective:
    """The objective of the stage of `config`.

    Args:
        graph: the model's structure.
        config: stage, dropout and the stage's own options.
        teacher: in distill, the structure of the teacher.
    """
    if config.stage == "lora":
        return _adapter_objective(graph, config)
    if config.stage == "dpo":
        return _preference_objective(graph, config)
    if config.stage == "distill":
        assert teacher is not None
        return _distillation_objective(graph, config, teacher)
    return _token_objective(graph, config)


def summed_loss(
    graph: Graph,
    parameters: Tree,
    batch: BatchArrays,
    *,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    adapters: Any = None,
    sparse: bool = False,
) -> jax.Array:
    """The loss of a micro-batch summed over its supervised tokens, in nats; `sparse` as in `next_token_loss`."""
    hidden, head = _hidden(graph, parameters, batch, dropout_rate, dropout_key, adapters)
    return next_token_loss(hidden, head, batch.targets.reshape(-1), batch.loss_weights.reshape(-1), sparse=sparse)


def _token_objective(graph: Graph, config: TrainConfig) -> Objective:
    def objective(trained: Tree, frozen: Tree, batch: BatchArrays, dropout_key: jax.Array | None) -> LossSums:
        loss = summed_loss(
            graph,
            trained,
            batch,
            dropout_rate=config.dropout,
            dropout_key=dropout_key,
            sparse=config.has_unlearned_tokens,
        )
        return LossSums(loss, jnp.sum(batch.loss_weights), {})

    return objective


def _adapter_objective(graph: Graph, config: TrainConfig) -> Objective:
    def objective(trained: Tree, frozen: Tree, batch: BatchArrays, dropout_key: jax.Array | None) -> LossSums:
        # One key for each: the numbers that both draw would otherwise be the same ones.
        model_key, adapter_key = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        loss = summed_loss(
            graph,
            frozen,
            batch,
            dropout_rate=config.dropout,
            dropout_key=model_key,
            adapters=layer_adapters(trained, config.lora, dropout_key=adapter_key),
            sparse=True,
        )
        return LossSums(loss, jnp.sum(batch.loss_weights), {})

    return objective


def _preference_objective(graph: Graph, config: TrainConfig) -> Objective:
    def objective(trained: Tree, frozen: Tree, batch: BatchArrays, dropout_key: jax.Array | None) -> LossSums:
        chosen, rejected = jnp.split(
            log_probabilities(graph, trained, batch, dropout_rate=config.dropout, dropout_key=dropout_key), 2
        )
        reference = log_probabilities(graph, frozen, batch) if batch.reference is None else batch.reference
        reference_chosen, reference_rejected = jnp.split(reference.astype(chosen.dtype), 2)
        result = preference_loss(
            chosen,
            rejected,
            reference_chosen,
            reference_rejected,
            beta=config.dpo_beta,
            label_smoothing=config.label_smoothing,
        )
        # A batch that is not full has empty rows at the end of either half.
        is_pair = jnp.any(jnp.split(batch.loss_weights, 2)[0] > 0, axis=1).astype(chosen.dtype)
        figures = {
            "reward_accuracy": result.accuracies,
            "reward_margin": result.margins,
            "chosen_reward": result.chosen_rewards,
            "rejected_reward": result.rejected_rewards,
        }
        sums = {name: jnp.sum(is_pair * values) for name, values in figures.items()}
        return LossSums(jnp.sum(is_pair * result.loss), jnp.sum(is_pair), sums)

    return objective


def log_probabilities(
    graph: Graph,
    parameters: Tree,
    batch: BatchArrays,
    *,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
) -> jax.Array:  # [B]
    """Log-probability of each row's answer under the model, in nats."""
    hidden, head = _hidden(graph, parameters, batch, dropout_rate, dropout_key)
    targets, loss_weights = batch.targets.reshape(-1), batch.loss_weights.reshape(-1)
    return answer_log_probabilities(hidden, head, targets, loss_weights, rows=batch.tokens.shape[0])


def _distillation_objective(graph: Graph, config: TrainConfig, teacher: Graph) -> Objective:
    def objective(trained: Tree, frozen: Tree, batch: BatchArrays, dropout_key: jax.Array | None) -> LossSums:
        hidden, head = _hidden(graph, trained, batch, config.dropout, dropout_key)
        teacher_hidden, teacher_head = jax.lax.stop_gradient(_hidden(teacher, frozen, batch, 0.0, None))
        result = distillation_loss(
            hidden,
            head,
            teacher_hidden,
            teacher_head,
            batch.targets.reshape(-1),
            batch.loss_weights.reshape(-1),
            alpha=config.distill_alpha,
            temperature=config.distill_temperature,
        )
        figures = {"cross_entropy": result.cross_entropy, "divergence": result.divergence}
        return LossSums(result.loss, jnp.sum(batch.loss_weights), figures)

    return objective


def _hidden(
    graph: Graph,
    parameters: Tree,
    batch: BatchArrays,
    dropout_rate: float,
    dropout_key: jax.Array | None,
    adapters: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Last hidden states [S, D], and the head [V, D]."""
    model = nnx.merge(graph, parameters)
    hidden = model(
        batch.tokens,
        segment_ids=batch.segment_ids,
        positions=batch.positions,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        adapters=adapters,
    )
    return hidden, model.head
