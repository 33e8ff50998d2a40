"""The bounds of the parity tests, from the one place where they are named, minigpt_bridge/bounds.py."""

import pytest

from minigpt_bridge import bounds
from minigpt_bridge.bounds import BOUNDS


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
    """The measure of every bound; infinite where something is not finite, so that max() cannot lose it."""
    return bounds.relative_error


@pytest.fixture
def many_small_steps():
    """Little time to compile, and PyTorch on one thread: with tiny arrays several threads wait for each other."""
    import jax
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    torch.set_num_threads(threads)
