"""From the gradients of summed losses to a parameter update.

Choices: `optax.MultiSteps` sums micro-gradients and, beside them, their terms (supervised tokens, or pairs in dpo);
the update divides the one by the other, so a window's gradient is the mean over its terms however it is cut into
micro-batches. Global-norm clipping and AdamW follow torch's formulas. The schedule counts updates, not micro-batches.

An "augmented" tree is {"parameters": tree, "tokens": scalar}: what MultiSteps accumulates.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from minigpt_jax.config import TrainConfig
from minigpt_jax.schedule import learning_rate_at

Tree = Any


def make_optimizer(config: TrainConfig, *, total_updates: int) -> optax.GradientTransformation:
    """The update rule of a whole window, over augmented trees: mean over tokens, clip, then AdamW or Muon.

    Args:
        config: rates, decay, clipping; `learning_rate` and `warmup_steps` are set.
        total_updates: length of the schedule.
    """
    rate = make_schedule(config, total_updates=total_updates)
    adamw = optax.adamw(
        rate,
        b1=config.beta1,
        b2=config.beta2,
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        mask=decay_mask if config.decay == "matrices" else None,
    )
    rule = adamw
    if config.optimizer == "muon":
        # A consistent RMS of 0.2 makes an update as large as AdamW's, so one learning rate serves both.
        muon = optax.contrib.muon(rate, weight_decay=config.weight_decay, consistent_rms=0.2)
        rule = optax.partition({"muon": muon, "adamw": adamw}, _muon_labels)
    return _mean_over_tokens(optax.chain(clip_by_global_norm(config.grad_clip), rule))


def make_schedule(config: TrainConfig, *, total_updates: int) -> Callable[[jax.Array], jax.Array]:
    """`learning_rate_at` of minigpt_jax/schedule.py as a function of the update count that JAX can trace."""

    def rate(count: jax.Array) -> jax.Array:
        # An int32 count would make the rate float32 in a float64 run as well.
        return learning_rate_at(jnp.asarray(count, float), config, total_updates=total_updates, numpy=jnp)

    return rate


def decay_mask(parameters: Tree) -> Tree:
    """True for what weight decay acts on: matrices, the embedding among them; not norm weights."""
    return jax.tree.map(lambda leaf: leaf.ndim >= 2, parameters)


def _muon_labels(parameters: Tree) -> Tree:
    def label(path: tuple[Any, ...], leaf: jax.Array) -> str:
        inside_block = any(getattr(key, "key", None) == "layers" for key in path)
        return "muon" if inside_block and leaf.ndim == 2 else "adamw"

    return jax.tree_util.tree_map_with_path(label, parameters)


# --- Clipping ---


class ClipState(NamedTuple):
    """The global norm of the last gradient, before clipping."""

    grad_norm: jax.Array


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Scale by min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_ does; 0 switches it off."""

    def init(parameters: Tree) -> ClipState:
        return ClipState(grad_norm=jnp.zeros((), _highest_dtype(parameters)))

    def update(updates: Tree, state: ClipState, parameters: Tree = None) -> tuple[Tree, ClipState]:
        norm = optax.tree.norm(updates)
        if max_norm > 0:
            scale = jnp.minimum(1, max_norm / (norm + 1e-6))
            updates = jax.tree.map(lambda leaf: leaf * scale.astype(leaf.dtype), updates)
        return updates, ClipState(grad_norm=norm.astype(state.grad_norm.dtype))

    return optax.GradientTransformation(init, update)


# --- Accumulation ---


def augmented(parameters: Tree, tokens: jax.Array | float = 0.0) -> Tree:
    """The tree that MultiSteps works on."""
    return {"parameters": parameters, "tokens": jnp.asarray(tokens, _highest_dtype(parameters))}


def _mean_over_tokens(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """`inner` on the mean gradient: summed gradients over summed tokens."""

    def init(tree: Tree) -> Tree:
        return inner.init(tree["parameters"])

    def update(sums: Tree, state: Tree, tree: Tree) -> tuple[Tree, Tree]:
        # The guard is on the denominator: a window without tokens never gets here with an effect.
        tokens = jnp.maximum(sums["tokens"], 1)
        mean = jax.tree.map(lambda leaf: leaf / tokens.astype(leaf.dtype), sums["parameters"])
        updates, state = inner.update(mean, state, tree["parameters"])
        return {"parameters": updates, "tokens": jnp.zeros_like(tokens)}, state

    return optax.GradientTransformation(init, update)


def accumulate(optimizer: optax.GradientTransformation, *, accumulation_steps: int, dtype: Any) -> optax.MultiSteps:
    """MultiSteps over augmented trees. A micro-gradient that is not finite, or has no term, is rejected.

    A rejected one leaves every accumulator, moment and counter as it was, and does not count towards the window.
    """
    return optax.MultiSteps(
        optimizer,
        every_k_schedule=accumulation_steps,
        use_grad_mean=False,
        should_skip_update_fn=_reject,
        accumulator_dtype=dtype,
    )


def flush(
    optimizer: optax.GradientTransformation, tree: Tree, state: optax.MultiStepsState, *, dtype: Any
) -> tuple[Tree, optax.MultiStepsState]:
    """Finish a window that has fewer micro-batches than the others: one update from what is accumulated.

    MultiSteps has no flush, so it is told that the window ends here and is given a last micro-gradient of zeros,
    which adds nothing to the sums. `state.mini_step` must be above 0.
    """
    last = optax.MultiSteps(
        optimizer,
        every_k_schedule=lambda _: state.mini_step + 1,
        use_grad_mean=False,
        should_skip_update_fn=_accept,
        accumulator_dtype=dtype,
    )
    return last.update(optax.tree.zeros_like(tree), state, tree)


# --- Slots by name ---


def named_slots(state: optax.MultiStepsState) -> dict[str, Any]:
    """What the optimizer remembers, as minigpt_jax/formats/checkpoints.py names and nests it.

    `second_moment` has only what AdamW updates: under Muon, matrices inside the blocks have a first moment alone.
    """
    slots: dict[str, Any] = {"micro_steps": state.mini_step, "updates": state.gradient_step}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        slot = _slot(path)
        if slot is not None:
            *parents, last = slot
            place = slots
            for key in parents:
                place = place.setdefault(key, {})
            place[last] = leaf
    return slots


def with_named_slots(state: optax.MultiStepsState, slots: dict[str, Any]) -> optax.MultiStepsState:
    """`state` with every slot taken from `slots`, which `named_slots` of a like state made."""

    def choose(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        slot = _slot(path)
        if slot is None:
            # The inner rules count updates for themselves (each in a buffer of its own: the state is donated); what
            # else there is are constants.
            return jnp.copy(slots["updates"]) if _names(path)[-1] == "count" else leaf
        value: Any = slots
        for key in slot:
            value = value[key]
        return value

    state = jax.tree_util.tree_map_with_path(choose, state)
    return state._replace(mini_step=slots["micro_steps"], gradient_step=slots["updates"])


_SLOTS = {
    ("acc_grads", "parameters"): "gradient_sums", ("acc_grads", "tokens"): "token_sum", ("grad_norm",): "grad_norm",
    ("mu",): "first_moment", ("nu",): "second_moment",
}  # fmt: skip
"""The end of a path in optax's state, up to the parameter, and the slot's name."""


def _slot(path: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The place of a leaf of optax's state among the named slots; None when it is no slot."""
    names = _names(path)
    for at in range(len(names)):
        for ending, slot in _SLOTS.items():
            if names[at : at + len(ending)] == ending:
                return (slot, *names[at + len(ending) :])
    return None


def _names(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """The keys, attributes and numbers of a path in a tree."""
    return tuple(getattr(key, "key", getattr(key, "name", getattr(key, "idx", None))) for key in path)


def _reject(updates: Tree, gradient_step: jax.Array, tree: Tree) -> tuple[jax.Array, tuple[()]]:
    # One sum of squares finds every NaN and infinity, and gradients so large that their norm overflows.
    return ~jnp.isfinite(optax.tree.norm(updates)) | (updates["tokens"] == 0), ()


def _accept(updates: Tree, gradient_step: jax.Array, tree: Tree) -> tuple[jax.Array, tuple[()]]:
    return jnp.asarray(False), ()


def _highest_dtype(tree: Tree) -> Any:
    return jnp.result_type(jnp.float32, *[leaf.dtype for leaf in jax.tree.leaves(tree)])
