"""Direct preference optimization (Rafailov et al., 2023): which of two answers is the better one.

Choices and names are those of its twin, minigpt_jax/preference.py; what differs is the idiom alone.

S = rows * T positions, row after row  C positions of one chunk  D hidden  V vocabulary  P pairs
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from minigpt_torch.chunks import chunk_logits, over_chunks
from minigpt_torch.loss import CHUNK, token_losses

# --- Log-probabilities of answers ---


def answer_log_probabilities(
    hidden: Tensor,  # [S, D]
    head: Tensor,  # [V, D]
    targets: Tensor,  # int64 [S]
    loss_weights: Tensor,  # float [S]
    *,
    rows: int,
) -> Tensor:
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
    supervised = loss_weights != 0
    high = torch.promote_types(hidden.dtype, torch.float32)
    positions = hidden[supervised], targets[supervised], loss_weights[supervised].to(high)
    chunks = over_chunks(_chunk_log_probabilities, CHUNK, positions=positions, constants=(head.to(hidden.dtype),))
    terms = torch.zeros(hidden.shape[0], dtype=high, device=hidden.device)
    terms = terms.masked_scatter(supervised, torch.cat(list(chunks)))
    return terms.reshape(rows, -1).sum(dim=1)


def _chunk_log_probabilities(hidden: Tensor, targets: Tensor, loss_weights: Tensor, head: Tensor) -> Tensor:
    """The chunk's weighted terms [C]. hidden [C, D], targets [C], loss_weights [C], head [V, D]."""
    return -loss_weights * token_losses(chunk_logits(hidden, head), targets)


# --- The loss of a pair ---


class PreferenceResult(NamedTuple):
    """What a batch of pairs says; every tensor is [P]."""

    loss: Tensor
    """In nats; ln 2 where the policy is its reference."""
    chosen_rewards: Tensor
    """beta * (policy - reference) of the chosen answer; a measure, without gradient."""
    rejected_rewards: Tensor
    """The same of the rejected answer."""

    @property
    def margins(self) -> Tensor:
        """How much higher the chosen answer's reward is."""
        return self.chosen_rewards - self.rejected_rewards

    @property
    def accuracies(self) -> Tensor:
        """1 where the chosen answer's reward is the higher one, else 0; a tie is 0."""
        return (self.chosen_rewards > self.rejected_rewards).to(self.loss.dtype)


def preference_loss(
    chosen: Tensor,  # [P]
    rejected: Tensor,  # [P]
    reference_chosen: Tensor,  # [P]
    reference_rejected: Tensor,  # [P]
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
    chosen_log_ratios = chosen - reference_chosen.detach()
    rejected_log_ratios = rejected - reference_rejected.detach()
    logits = beta * (chosen_log_ratios - rejected_log_ratios)
    loss = -(1 - label_smoothing) * F.logsigmoid(logits) - label_smoothing * F.logsigmoid(-logits)
    chosen_rewards = beta * chosen_log_ratios.detach()
    rejected_rewards = beta * rejected_log_ratios.detach()
    return PreferenceResult(loss, chosen_rewards, rejected_rewards)
