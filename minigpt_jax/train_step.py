"""One micro-batch of training as a compiled, donated step; and the evaluation step.

The state is plain data: parameters as a dict, the MultiSteps state, and the factor that a rollback lowers. The number
of finished updates is `opt_state.gradient_step`.

B batch  T time  S = B*T positions
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from minigpt_jax.config import TrainConfig
from minigpt_jax.model import Transformer
from minigpt_jax.objective import BatchArrays, LossSums, make_objective
from minigpt_jax.optimizer import accumulate, augmented, flush, make_optimizer, make_schedule

Tree = Any


class TrainState(NamedTuple):
    """Everything that training changes."""

    parameters: Tree
    """What is trained: the model's parameters, or its adapters."""
    opt_state: optax.MultiStepsState
    learning_rate_scale: jax.Array


class StepMetrics(NamedTuple):
    """What one micro-batch reports; scalars on the device until somebody reads them."""

    loss_sum: jax.Array
    loss_terms: jax.Array
    supervised_tokens: jax.Array
    figures: dict[str, jax.Array]
    skipped: jax.Array
    updates: jax.Array
    grad_norm: jax.Array
    learning_rate: jax.Array


TrainStep = Callable[..., tuple[TrainState, StepMetrics]]
FlushStep = Callable[[TrainState], tuple[TrainState, jax.Array]]
EvalStep = Callable[..., LossSums]


def init_state(parameters: Tree, config: TrainConfig, *, total_updates: int) -> TrainState:
    """The state before the first step; moments and accumulators take the parameters' dtype (float32 or float64)."""
    dtype = jax.tree.leaves(parameters)[0].dtype
    optimizer = make_optimizer(config, total_updates=total_updates)
    window = accumulate(optimizer, accumulation_steps=config.accumulation_steps, dtype=dtype)
    return TrainState(parameters, window.init(augmented(parameters)), jnp.ones((), dtype))


def make_train_step(
    graph: nnx.GraphDef[Transformer],
    config: TrainConfig,
    *,
    total_updates: int,
    teacher: nnx.GraphDef[Transformer] | None = None,
) -> TrainStep:
    """The compiled step: (state, micro-batch, dropout key, frozen parameters or None) -> (state, metrics).

    The state is donated. What is frozen is the base in lora, the teacher in distill, and in dpo the reference where its
    log-probabilities are not in the batch.
    """
    objective = make_objective(graph, config, teacher=teacher)
    drops = config.dropout > 0 or (config.stage == "lora" and config.lora.dropout > 0)
    optimizer = make_optimizer(config, total_updates=total_updates)
    schedule = make_schedule(config, total_updates=total_updates)

    def step(
        state: TrainState, batch: BatchArrays, dropout_key: jax.Array, frozen: Tree = None
    ) -> tuple[TrainState, StepMetrics]:
        def loss_of(trained: Tree) -> tuple[jax.Array, LossSums]:
            sums = objective(trained, frozen, batch, dropout_key if drops else None)
            return sums.loss, sums

        (loss_sum, sums), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.parameters)
        # A loss that is not finite must reject the micro-batch even where every gradient is finite.
        tokens = jnp.where(jnp.isfinite(loss_sum), sums.terms, jnp.nan)
        window = accumulate(optimizer, accumulation_steps=config.accumulation_steps, dtype=loss_sum.dtype)
        before = state.opt_state
        updates, opt_state = window.update(augmented(gradients, tokens), before, augmented(state.parameters))
        new_state = _apply(state, updates["parameters"], opt_state)
        after = new_state.opt_state
        skipped = (after.mini_step == before.mini_step) & (after.gradient_step == before.gradient_step)
        metrics = StepMetrics(
            loss_sum=loss_sum,
            loss_terms=sums.terms,
            supervised_tokens=jnp.sum(batch.loss_weights),
            figures=sums.figures,
            skipped=skipped,
            updates=after.gradient_step,
            grad_norm=optax.tree.get(after.inner_opt_state, "grad_norm"),
            learning_rate=schedule(before.gradient_step) * state.learning_rate_scale,
        )
        return new_state, metrics

    return jax.jit(step, donate_argnums=0)


def make_flush_step(config: TrainConfig, *, total_updates: int) -> FlushStep:
    """The compiled update from a window that the data ended early, and its gradient's norm; the state is donated."""
    optimizer = make_optimizer(config, total_updates=total_updates)

    def step(state: TrainState) -> tuple[TrainState, jax.Array]:
        tree = augmented(state.parameters)
        updates, opt_state = flush(optimizer, tree, state.opt_state, dtype=tree["tokens"].dtype)
        return _apply(state, updates["parameters"], opt_state), optax.tree.get(opt_state.inner_opt_state, "grad_norm")

    return jax.jit(step, donate_argnums=0)


def make_eval_step(
    graph: nnx.GraphDef[Transformer], config: TrainConfig, *, teacher: nnx.GraphDef[Transformer] | None = None
) -> EvalStep:
    """Compiled (trained parameters, batch, frozen parameters or None) -> sums, without dropout."""
    objective = make_objective(graph, config, teacher=teacher)

    def step(trained: Tree, batch: BatchArrays, frozen: Tree = None) -> LossSums:
        return objective(trained, frozen, batch, None)

    return jax.jit(step)


def _apply(state: TrainState, updates: Tree, opt_state: optax.MultiStepsState) -> TrainState:
    """The state after an update; all of the old state when the update would leave a parameter not finite.

    Parameters move only when a window ended: adding a zero would turn -0.0 into 0.0.
    """
    moved = opt_state.gradient_step != state.opt_state.gradient_step
    sums = jax.tree.map(lambda old, update: old + state.learning_rate_scale * update, state.parameters, updates)
    finite = jnp.isfinite(optax.tree.norm(sums))

    def choose(accept: jax.Array, old: Tree, new: Tree) -> Tree:
        return jax.tree.map(lambda before, after: jnp.where(accept, after, before), old, new)

    parameters = choose(moved & finite, state.parameters, sums)
    return TrainState(parameters, choose(finite, state.opt_state, opt_state), state.learning_rate_scale)
