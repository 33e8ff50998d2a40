"""Where a run is: what the loop counts, saved with every checkpoint as JSON and restored exactly.

Framework-free.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

CONVERTED = "converted"
"""`Progress.data` of a run that holds a converted model and has never been trained."""

LARGEST_EXPONENT = 700
"""exp of more is not a finite float64."""


@dataclass
class LogWindow:
    """Sums over the micro-batches since the last logged line."""

    loss_sum: float = 0.0
    loss_terms: int = 0
    """What the loss is a mean over: supervised tokens, or pairs."""
    figures: dict[str, float] = field(default_factory=dict)
    """What else the stage measures, summed over the same."""
    supervised_tokens: int = 0
    real_tokens: int = 0
    positions: int = 0
    timed_tokens: int = 0
    """Real tokens whose time is in `seconds`; those of a compilation are not."""
    timed_supervised_tokens: int = 0
    """Supervised ones, likewise."""
    seconds: float = 0.0

    def add(self, loss_sum: float, loss_terms: int, figures: dict[str, float]) -> None:
        """Count a micro-batch's sums in."""
        self.loss_sum += loss_sum
        self.loss_terms += loss_terms
        for name, value in figures.items():
            self.figures[name] = self.figures.get(name, 0.0) + value

    def metrics(self, *, is_of_tokens: bool) -> dict[str, float]:
        """Loss, what else the stage measures, padding and, where a time was taken, the rate.

        There is at least one supervised token. A loss over tokens has a perplexity: of its cross entropy, where that
        is measured beside it.
        """
        metrics = {"loss": self.loss_sum / self.loss_terms}
        metrics |= {name: value / self.loss_terms for name, value in self.figures.items()}
        if is_of_tokens:
            metrics["perplexity"] = math.exp(min(metrics.get("cross_entropy", metrics["loss"]), LARGEST_EXPONENT))
        metrics["padding_fraction"] = 1 - self.real_tokens / self.positions
        if self.timed_tokens:
            metrics["tokens_per_second"] = self.timed_tokens / self.seconds
            if self.supervised_tokens < self.real_tokens:
                metrics["supervised_tokens_per_second"] = self.timed_supervised_tokens / self.seconds
        return metrics


@dataclass
class Progress:
    """Where a run is. Saved with every checkpoint as JSON and restored exactly."""

    data: str
    """Key of the training data; a resumed run needs the same."""
    model: str
    """Digest of the model's shape; likewise."""
    validation: str = ""
    """Key of the validation data; likewise. Empty where there is none."""
    frozen: str = ""
    """Digest of the weights that are not trained; likewise. Empty where there are none."""
    micro_batches: int = 0
    """Micro-batches taken from the data: the position to resume at."""
    accumulated: int = 0
    """Micro-batches in the unfinished window."""
    updates: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    learning_rate_scale: float = 1.0
    """Halved by every rollback."""
    best_val_loss: float | None = None
    wall_seconds: float = 0.0
    grad_norm: float = 0.0
    learning_rate: float = 0.0
    window: LogWindow = field(default_factory=LogWindow)

    def to_json(self) -> dict[str, Any]:
        """All fields, for a checkpoint."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Progress":
        """The progress that `to_json` gave."""
        return cls(**{**fields, "window": LogWindow(**fields["window"])})
