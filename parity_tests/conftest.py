"""The bounds of the parity tests, from the one place where they are named, minigpt_bridge/bounds.py."""

import numpy as np
import pytest

from minigpt_bridge.bounds import BFLOAT16_RATIO, BOUNDS


@pytest.fixture
def float64():
    """JAX with 64-bit floats for the length of one test."""
    import jax

    with jax.enable_x64(True):
        yield


@pytest.fixture
def bound():
    """The bounds in float64."""
    return BOUNDS["float64"]


@pytest.fixture
def bound_float32():
    """The bounds in float32; a trajectory is compared by its loss."""
    return BOUNDS["float32"]


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
    return BFLOAT16_RATIO
