"""What is asked of a batcher, and what it tells of it. Framework-free."""

from collections.abc import Callable
from dataclasses import dataclass

from minigpt_jax.errors import UserError
from minigpt_jax.generation import FinishReason, GenerationConfig
from minigpt_jax.logprobs import MOST_LOGPROBS, TokenLogprob


@dataclass(frozen=True)
class GenerationRequest:
    """One continuation that somebody wants.

    Raises:
        UserError: a number of alternatives that cannot be.
    """

    prompt: tuple[int, ...]
    config: GenerationConfig
    row: int = 0
    """Which of the seed's streams of numbers draws it: its place among several samples of a prompt."""
    num_logprobs: int | None = None
    """Alternatives whose log-probabilities are given beside each token's own; None for no log-probabilities at all."""

    def __post_init__(self) -> None:
        if self.num_logprobs is not None and not 0 <= self.num_logprobs <= MOST_LOGPROBS:
            raise UserError(
                f"log-probabilities of {self.num_logprobs} tokens were asked for; 0 to {MOST_LOGPROBS} can be"
            )


@dataclass(frozen=True)
class Piece:
    """What can be read so far: never half a character, nothing that may be the beginning of a stop string."""

    text: str
    ids: tuple[int, ...]
    """The tokens since the last piece. The text of the newest may still be held back."""
    logprobs: tuple[TokenLogprob, ...]
    """Of each id, when they were asked for."""


@dataclass(frozen=True)
class Finished:
    """The request is done. Its pieces, joined, are text and ids of `generate`'s `Completion`."""

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    """New tokens, without an end mark."""


@dataclass(frozen=True)
class Failed:
    """The request came to nothing more."""

    message: str


Event = Piece | Finished | Failed

OnEvent = Callable[[int, Event], None]
"""(which of the requests that were submitted together, what happened)"""


class QueueFull(Exception):  # noqa: N818 - a state, not an error
    """More requests than there is room to wait for; later there may be."""
