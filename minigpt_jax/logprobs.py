"""How likely a model held the tokens that were chosen, and which ones it held likeliest. Framework-free.

N tokens
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

MOST_LOGPROBS = 20
"""The most alternatives whose log-probabilities are given beside a token's own."""


@dataclass(frozen=True)
class TokenLogprob:
    """How likely the model held a token, before temperature, filters and penalty."""

    id: int
    logprob: float
    """Natural logarithm of its probability."""
    top: tuple[tuple[int, float], ...]
    """(id, log-probability) of the likeliest tokens in its place, the likeliest first."""


def token_logprobs(
    ids: Sequence[int], own: NDArray[Any], top_ids: NDArray[Any], top: NDArray[Any], *, number: int
) -> list[TokenLogprob]:
    """Of each of N ids, by its log-probability [N] and the likeliest ids and theirs [N, number or more]."""
    return [
        TokenLogprob(id, logprob, tuple(zip(others[:number], theirs[:number], strict=True)))
        for id, logprob, others, theirs in zip(ids, own.tolist(), top_ids.tolist(), top.tolist(), strict=True)
    ]
