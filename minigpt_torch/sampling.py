"""The next token of each row from its scores: the twin of minigpt_jax/sampling.py, in eager PyTorch.

B rows  V vocabulary  A alternatives
"""

from typing import NamedTuple

import torch
from torch import Tensor

from minigpt_jax.logprobs import MOST_LOGPROBS


class Sampling(NamedTuple):
    """How each row's next token is chosen, in this order."""

    repetition_penalty: Tensor  # float [B]
    temperature: Tensor  # float [B]
    top_k: Tensor  # int64 [B]
    top_p: Tensor  # float [B]
    min_p: Tensor  # float [B]


def sample(
    scores: Tensor,  # float [B, V]
    seen: Tensor,  # bool [B, V] ids that the row holds already
    sampling: Sampling,
    uniform: Tensor,  # float [B] in [0, 1)
) -> Tensor:  # int64 [B]
    """The id that each row goes on with."""
    penalty = sampling.repetition_penalty[:, None]
    # Dividing a negative score would reward what it is meant to punish.
    penalized = torch.where(scores > 0, scores / penalty, scores * penalty)
    scores = torch.where(seen, penalized, scores)
    highest = scores.argmax(-1)
    is_drawn = sampling.temperature > 0
    if not is_drawn.any():
        return highest
    return torch.where(is_drawn, _draw(scores, sampling, uniform), highest)


class Logprobs(NamedTuple):
    """What the model held of an id and of the likeliest ones in its place, before any setting."""

    own: Tensor  # float [B]
    top_ids: Tensor  # int64 [B, A], the likeliest first
    top: Tensor  # float [B, A]


def logprobs_of(scores: Tensor, ids: Tensor) -> Logprobs:
    """Log-probabilities by scores [B, V] of ids [B] and of the likeliest."""
    logprobs = scores.log_softmax(-1)
    top, top_ids = logprobs.topk(min(MOST_LOGPROBS, scores.shape[-1]))
    return Logprobs(logprobs.gather(-1, ids[:, None])[:, 0], top_ids, top)


def looked_up(
    ids: Tensor,  # int64 [B, L] of each row, and beyond them whatever was there
    lengths: Tensor,  # int64 [B]
    following: Tensor,  # int64 [B] the id that comes after them
    count: int,
) -> tuple[Tensor, Tensor]:  # int64 [B, count], int64 [B]
    """What followed the newest earlier place of each row's last two ids (Saxena, 2023), and how much of it there is."""
    slots = ids.shape[1]
    numbers = torch.arange(len(lengths), device=ids.device)
    last = ids[numbers, (lengths - 1).clamp(min=0)]
    # Place p: ids[p - 1] and ids[p] are the pair; ids[p + 1] has to be there.
    places = torch.arange(1, slots, device=ids.device)
    is_pair = (ids[:, :-1] == last[:, None]) & (ids[:, 1:] == following[:, None])
    is_pair &= places < lengths[:, None] - 1
    place = torch.where(is_pair, places, 0).amax(-1)
    taken = place[:, None] + 1 + torch.arange(count, device=ids.device)
    guess = ids[numbers[:, None], taken.clamp(max=slots - 1)]
    return guess, torch.where(place > 0, (lengths - 1 - place).clamp(max=count), 0)


def _draw(scores: Tensor, sampling: Sampling, uniform: Tensor) -> Tensor:
    vocab_size = scores.shape[-1]
    temperature = torch.where(sampling.temperature > 0, sampling.temperature, 1)
    scores = (scores - scores.amax(-1, keepdim=True)) / temperature[:, None]
    ranked = scores.sort(-1, descending=True).values
    ranks = torch.arange(vocab_size, device=scores.device)
    top_k = torch.where(sampling.top_k > 0, sampling.top_k.clamp(max=vocab_size), vocab_size)[:, None]
    weights = torch.where(ranks < top_k, ranked.exp(), 0)
    weights = weights / weights.sum(-1, keepdim=True)
    reached = weights.cumsum(-1) - weights  # by the ranks before
    top_p = sampling.top_p[:, None]
    # Sums of rounded weights may reach 1 before the last of them.
    is_kept = (ranks < top_k) & ((reached < top_p) | (ranks == 0) | (top_p >= 1))
    is_kept &= ranked >= sampling.min_p.log()[:, None]
    lowest = torch.where(is_kept, ranked, 0).amin(-1, keepdim=True)
    # In order of the ids: ids of equal scores are kept or left out together.
    reached = torch.where(scores >= lowest, scores.exp(), 0).cumsum(-1)
    total = reached[:, -1:]
    return (reached > uniform[:, None] * total).int().argmax(-1)
