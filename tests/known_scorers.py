"""Models whose log-probabilities are known: what is computed from them can be checked by hand."""

import numpy as np

from minigpt_jax.scoring import TokenScores


class TableScorer:
    """Each token costs what `nats(id)` says, whatever stands before it; ids in `likeliest` are the likeliest."""

    def __init__(self, nats, likeliest=()):
        self.nats, self.likeliest, self.shapes = nats, list(likeliest), []

    def score(self, tokens, counts):
        self.shapes.append(tokens.shape)
        costs = np.vectorize(self.nats, otypes=[np.float64])(tokens[:, 1:])
        return TokenScores(np.where(counts, -costs, 0.0), counts & np.isin(tokens[:, 1:], self.likeliest))


class PrefixScorer:
    """What a token costs follows from all tokens before it in its row, and from its own."""

    def score(self, tokens, counts):
        before = np.cumsum(tokens, axis=1, dtype=np.int64)[:, :-1]
        costs = (before * 31 + tokens[:, 1:] * 7) % 101 / 10
        return TokenScores(np.where(counts, -costs, 0.0), counts & (costs < 1))
