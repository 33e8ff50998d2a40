"""How near the two frameworks must be: every bound of the proof has its name here, and is never loosened."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True)
class Bounds:
    """The largest difference allowed in one precision."""

    sub_module: float
    """Output of a part of the model, and the full logits."""
    gradient: float
    """The loss and every gradient."""
    update: float
    """Every parameter and optimizer slot after one update."""
    trajectory: float
    """The same after 200 updates with accumulation, schedule, clipping and decay; in float32, of the loss."""


BOUNDS = {
    "float64": Bounds(sub_module=1e-13, gradient=1e-12, update=1e-12, trajectory=1e-9),
    "float32": Bounds(sub_module=2e-6, gradient=1e-5, update=1e-5, trajectory=1e-4),
}

BFLOAT16_RATIO = 1.25
"""How far from the float64 truth JAX may be in bfloat16, as a multiple of what torch is."""


def relative_error(ours: ArrayLike, theirs: ArrayLike) -> float:
    """The measure of every bound: max |a - b| / max(1, max |b|); infinite for unlike shapes and for NaN."""
    a, b = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    if a.shape != b.shape:
        return np.inf
    if np.array_equal(a, b):
        return 0.0
    with np.errstate(invalid="ignore"):
        error = float(np.abs(a - b).max() / max(1.0, float(np.abs(b).max())))
    return error if np.isfinite(error) else np.inf
