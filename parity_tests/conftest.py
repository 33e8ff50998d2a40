"""How near two frameworks must be: every tolerance of the parity tests has its name here, and is never loosened.

A difference is max |a - b| / max(1, max |b|), as `relative_error` measures it.
"""

from dataclasses import dataclass

import numpy as np
import pytest


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
    """The same after 200 updates with accumulation, schedule, clipping and decay."""


@pytest.fixture
def float64():
    """JAX with 64-bit floats for the length of one test."""
    import jax

    with jax.enable_x64(True):
        yield


@pytest.fixture
def bound():
    """The bounds in float64."""
    return Bounds(sub_module=1e-13, gradient=1e-12, update=1e-12, trajectory=1e-9)


@pytest.fixture
def bound_float32():
    """The bounds in float32; a trajectory is compared by its loss."""
    return Bounds(sub_module=2e-6, gradient=1e-5, update=1e-5, trajectory=1e-4)


@pytest.fixture
def relative_error():
    def measure(ours, theirs):
        ours, theirs = np.asarray(ours), np.asarray(theirs)
        assert ours.shape == theirs.shape
        return float(np.abs(ours - theirs).max() / max(1.0, np.abs(theirs).max()))

    return measure


@pytest.fixture
def bound_bfloat16():
    """How far from the float64 truth JAX may be in bfloat16, as a multiple of what torch is."""
    return 1.25
