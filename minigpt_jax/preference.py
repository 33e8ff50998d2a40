"""Direct preference optimization (Rafailov et al., 2023): which of two answers is the better one.

Choices: an answer counts by the sum over its supervised tokens, not by their mean, so neither padding nor length
rescales it; a pair is one term of the loss. The logits of a chunk are made once for the value and once more in the
backward pass, since how much a token's gradient counts is known only when its pair's loss is.

S = rows * T positions, row after row  C positions of one chunk  D hidden  V vocabulary  P pairs
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from minigpt_jax.chunks import chunk_logits, one_chunk, supervised_first, used_chunks, whole_chunks
from minigpt_jax.loss import SPARSE_CHUNK, next_token_loss, token_losses

# --- Log-probabilities of answers ---


def answer_log_probabilities(
    hidden: jax.Array,  # [S, D]
    head: jax.Array,  # [V, D]
    targets: jax.Array,  # int32 [S]
    loss_weights: jax.Array,  # float [S]
    *,
    rows: int,
) -> jax.Array:
    """Sum over each row's positions of loss_weights * log softmax(hidden @ head.T)[target], in nats.

    Only supervised positions cost anything: they are gathered first, and no logits are made for the rest.

    Args:
        hidden: last hidden states, in the compute dtype.
        head: output head; cast to the dtype of `hidden` for the product.
        targets: the right next token of each position; any valid id where the weight is 0.
        loss_weights: 1 for a token of the answer, 0 for the prompt and for padding.
        rows: how many conversations the positions are cut into; it divides S.

    Returns:
        [rows] in at least float32; 0 for a row without a supervised token.
    """
    return _weighted_log_probabilities(hidden, head, targets, loss_weights).reshape(rows, -1).sum(axis=1)


@jax.custom_vjp
def _weighted_log_probabilities(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, loss_weights: jax.Array
) -> jax.Array:
    """The terms of the sums above, [S]."""
    count = hidden.shape[0]
    size = min(SPARSE_CHUNK, count)
    order = supervised_first(loss_weights)
    gathered = whole_chunks(size, hidden[order], targets[order], loss_weights[order])
    cast_head = head.astype(hidden.dtype)
    high = jnp.promote_types(hidden.dtype, jnp.float32)

    def put_chunk(number: jax.Array, terms: jax.Array) -> jax.Array:
        chunk_hidden, chunk_targets, chunk_weights = one_chunk(number, size, *gathered)
        (losses,), _ = token_losses(chunk_logits(chunk_hidden, cast_head), chunk_targets)
        chunk_terms = -chunk_weights.astype(high) * losses
        return jax.lax.dynamic_update_slice_in_dim(terms, chunk_terms, number * size, axis=0)

    terms = jnp.zeros(gathered[0].shape[0], high)
    terms = jax.lax.fori_loop(0, used_chunks(size, gathered[2]), put_chunk, terms)
    return jnp.zeros(count, high).at[order].set(terms[:count], unique_indices=True)


def _weighted_log_probabilities_forward(*arrays: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _weighted_log_probabilities(*arrays), arrays


def _weighted_log_probabilities_backward(
    arrays: tuple[jax.Array, ...], cotangents: jax.Array
) -> tuple[jax.Array, jax.Array, None, None]:
    """The same gradient as that of a next-token loss in which a position weighs -cotangent times as much."""
    hidden, head, targets, loss_weights = arrays

    def loss(hidden: jax.Array, head: jax.Array) -> jax.Array:
        return next_token_loss(hidden, head, targets, -cotangents * loss_weights, sparse=True)

    return *jax.grad(loss, argnums=(0, 1))(hidden, head), None, None


_weighted_log_probabilities.defvjp(_weighted_log_probabilities_forward, _weighted_log_probabilities_backward)


# --- The loss of a pair ---


class PreferenceResult(NamedTuple):
    """What a batch of pairs says; every array is [P]."""

    loss: jax.Array
    """In nats; ln 2 where the policy is its reference."""
    chosen_rewards: jax.Array
    """beta * (policy - reference) of the chosen answer; a measure, without gradient."""
    rejected_rewards: jax.Array
    """The same of the rejected answer."""

    @property
    def margins(self) -> jax.Array:
        """How much higher the chosen answer's reward is."""
        return self.chosen_rewards - self.rejected_rewards

    @property
    def accuracies(self) -> jax.Array:
        """1 where the chosen answer's reward is the higher one, else 0; a tie is 0."""
        return (self.chosen_rewards > self.rejected_rewards).astype(self.loss.dtype)


def preference_loss(
    chosen: jax.Array,  # [P]
    rejected: jax.Array,  # [P]
    reference_chosen: jax.Array,  # [P]
    reference_rejected: jax.Array,  # [P]
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> PreferenceResult:
    """-(1 - s) * log sigmoid(m) - s * log sigmoid(-m), with m = beta * (log-ratio of chosen - log-ratio of rejected).

    A log-ratio is policy minus reference. s = 0 is equation 7 of Rafailov et al. (2023), s > 0 the conservative loss
    of Mitchell (2023), for labels that are wrong with probability s; both are the loss "sigmoid" of TRL's DPOTrainer.

    Args:
        chosen: log-probabilities of the chosen answers under the policy, as `answer_log_probabilities` makes them.
        rejected: the same of the rejected answers.
        reference_chosen: those of the chosen answers under the frozen reference; not differentiated.
        reference_rejected: those of the rejected answers under the reference; not differentiated.
        beta: how strongly the policy is held to its reference.
        label_smoothing: s, in [0, 0.5).

    Returns:
        One value a pair, so a padding pair can be left out by a weight of 0: its values are finite.
    """
    chosen_log_ratios = chosen - jax.lax.stop_gradient(reference_chosen)
    rejected_log_ratios = rejected - jax.lax.stop_gradient(reference_rejected)
    logits = beta * (chosen_log_ratios - rejected_log_ratios)
    loss = -(1 - label_smoothing) * jax.nn.log_sigmoid(logits) - label_smoothing * jax.nn.log_sigmoid(-logits)
    chosen_rewards = beta * jax.lax.stop_gradient(chosen_log_ratios)
    rejected_rewards = beta * jax.lax.stop_gradient(rejected_log_ratios)
    return PreferenceResult(loss, chosen_rewards, rejected_rewards)
