"""What counts as a divergence of the two frameworks: how an error is measured, what rounding explains, what is said."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from minigpt_bridge.bounds import BOUNDS

PART = BOUNDS["float64"].sub_module
"""Largest error of an operation's output in float64."""
GRADIENT = BOUNDS["float64"].gradient
"""Largest error of the loss and of every gradient in float64."""
UPDATE = BOUNDS["float64"].update
"""Largest error of a parameter or an optimizer slot after one update in float64."""
CAST_SHARE = 0.01
"""Largest share of a norm's bfloat16 outputs that may differ. Measured at widths 10 to 768 and inputs of 0.02 to 30:
at most 2e-4 where both frameworks cast at the same place; where they do not, at least 0.06 for weights 5e-4 from 1, and
0.27 for weights 0.1 from it. Weights that bfloat16 holds exactly, a fresh norm's 1, do not tell the two apart."""
UNKNOWN = "unknown cause"

Phase = Literal["forward", "backward", "update"]


@dataclass(frozen=True)
class Divergence:
    """The first place where PyTorch's numbers differ from JAX's by more than rounding."""

    step: int
    """The update under way, counted from 1."""
    phase: Phase
    layer: int | None
    """Number of the block, from 0; None outside the blocks, or where an update is wrong in several of them."""
    operation: str
    """By its name in the code: q_proj, attention, mlp (the whole of its parts), weight_decay, ..."""
    error: float
    bound: float
    """What rounding explains."""
    cause: str

    def __str__(self) -> str:
        place = "" if self.layer is None else f"layer {self.layer}, "
        measured = f"error {self.error:.1e}, rounding explains {self.bound:.0e}"
        return f"step {self.step}, {self.phase}, {place}{self.operation}: {self.cause} ({measured})"


def differing_share(ours: Any, theirs: Any) -> float:
    """The share of elements that are not the same number; 1 where shapes differ."""
    ours, theirs = np.asarray(ours, np.float32), np.asarray(theirs, np.float32)
    return float(np.mean(ours != theirs)) if ours.shape == theirs.shape else 1.0


def only(descriptions: Iterable[str]) -> str:
    """The one description of a cause that fits; several that fit say as little as none."""
    fitting = set(descriptions)
    return fitting.pop() if len(fitting) == 1 else UNKNOWN
