"""How near the two frameworks must be: every tolerance of the proof has its name here, and is never loosened.

A difference is max |a - b| / max(1, max |b|).
"""

from dataclasses import dataclass


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
