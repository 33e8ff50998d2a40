"""How likely a PyTorch model finds tokens: minigpt_jax/scoring.py's `Scorer`; the twin is minigpt_jax/evaluate.py.

Only tokens that are asked about cost logits: their positions are gathered first and go a chunk at a time.

B rows  T predictions  S = B*T positions  C positions of one chunk  D hidden  V vocabulary
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minigpt_jax.scoring import TokenScores
from minigpt_torch.chunks import chunk_logits, over_chunks
from minigpt_torch.lora import LayerAdapters
from minigpt_torch.loss import CHUNK, token_losses
from minigpt_torch.model import Transformer


class TorchScorer:
    """A model that says how likely it finds tokens.

    Args:
        model: with its weights.
        adapters: minigpt_torch/lora.py's `layer_adapters`, beside the weights.
    """

    def __init__(self, model: Transformer, *, adapters: Sequence[LayerAdapters] | None = None):
        self._model, self._adapters = model, adapters

    @torch.no_grad()
    def score(self, tokens: NDArray[np.int32], counts: NDArray[np.bool_]) -> TokenScores:
        """The scores [B, T] of the last T of T + 1 tokens; 0 and False where `counts` is False."""
        device = self._model.embed_tokens.weight.device
        ids, asked = torch.from_numpy(tokens).long().to(device), torch.from_numpy(counts).to(device)
        # Padding stands at the end of its row, where no token that counts can see it.
        hidden = self._model(
            ids[:, :-1],
            segment_ids=torch.ones_like(asked, dtype=torch.int64),
            positions=torch.arange(asked.shape[1], device=device).expand_as(asked),
            adapters=self._adapters,
        )
        scores = token_scores(hidden, self._model.head, ids[:, 1:].reshape(-1), asked.reshape(-1))
        return TokenScores(*(each.reshape(asked.shape).cpu().numpy() for each in scores))


def token_scores(
    hidden: Tensor,  # [S, D]
    head: Tensor,  # [V, D]
    targets: Tensor,  # int64 [S]
    counts: Tensor,  # bool [S]
) -> tuple[Tensor, Tensor]:
    """Log softmax(hidden @ head.T)[target] in at least float32, and whether that is the likeliest token; both [S].

    Of equally likely tokens the one with the lowest id counts as the likeliest, as in greedy decoding. Where `counts`
    is False the results are 0 and False.
    """
    positions, constants = (hidden[counts], targets[counts]), (head.to(hidden.dtype),)
    chunks = list(over_chunks(_chunk_scores, CHUNK, positions=positions, constants=constants))
    losses, is_likeliest = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    log_probabilities = torch.zeros(counts.shape, dtype=losses.dtype, device=counts.device)
    return log_probabilities.masked_scatter(counts, -losses), torch.zeros_like(counts).masked_scatter(
        counts, is_likeliest
    )


def _chunk_scores(hidden: Tensor, targets: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """The chunk's losses and whether its targets are the likeliest, [C]. hidden [C, D], targets [C], head [V, D]."""
    logits = chunk_logits(hidden, head)
    return token_losses(logits, targets), logits.argmax(dim=-1) == targets
