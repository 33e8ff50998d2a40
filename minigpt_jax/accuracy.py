"""How many were right, how sure that is, and whether guessing would have done as well. Framework-free."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Z95 = 1.959963984540054
"""The 97.5 % quantile of the normal distribution."""


@dataclass(frozen=True)
class Accuracy:
    """A share of right answers."""

    right: int
    asked: int
    """At least 1."""
    chance: float | None = None
    """Share that guessing gets right; None where nothing can be guessed."""

    @property
    def share(self) -> float:
        """Right answers of those asked."""
        return self.right / self.asked

    @property
    def ci95(self) -> tuple[float, float]:
        """The 95 % interval of Wilson (1927), which stays within [0, 1]."""
        share, count, z2 = self.share, self.asked, Z95 * Z95
        middle = (share + z2 / (2 * count)) / (1 + z2 / count)
        half = Z95 / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count * count))
        # Exact at the ends, where rounding would leave them by 1e-17.
        return 0.0 if self.right == 0 else middle - half, 1.0 if self.right == count else middle + half

    @property
    def verdict(self) -> str:
        """What can be said of it against chance; empty where nothing can be guessed."""
        if self.chance is None:
            return ""
        low, high = self.ci95
        if low <= self.chance <= high or self._p_value(self.chance) > 0.05:
            return "not distinguishable from chance"
        return "above chance" if self.share > self.chance else "below chance"

    def _p_value(self, chance: float) -> float:
        """Of the exact two-sided binomial test: of few items the interval alone would make too much."""
        most = self.asked

        def probability(right: int) -> float:
            ways = math.lgamma(most + 1) - math.lgamma(right + 1) - math.lgamma(most - right + 1)
            return math.exp(ways + right * math.log(chance) + (most - right) * math.log1p(-chance))

        at_least = math.fsum(probability(right) for right in range(self.right, most + 1))
        at_most = math.fsum(probability(right) for right in range(self.right + 1))
        return min(1.0, 2 * min(at_least, at_most))

    def to_json(self) -> dict[str, Any]:
        """The figures by their names in JSON."""
        figures = {"items": self.asked, "accuracy": self.share, "ci95": list(self.ci95)}
        return figures if self.chance is None else figures | {"chance": self.chance, "verdict": self.verdict}


def accuracy_of(results: Iterable[tuple[bool, float | None]]) -> Accuracy:
    """The accuracy of (is right, its chance) of each item, of which there is one at least.

    Chance is the mean over the items, or None where theirs are.
    """
    rights, chances = zip(*results, strict=True)
    known = [chance for chance in chances if chance is not None]
    return Accuracy(sum(rights), len(rights), sum(known) / len(known) if known else None)
