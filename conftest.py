"""Tests side by side, and what both directories of tests share.

Each of pytest-xdist's workers has cores of its own. JAX and PyTorch take every core they see, and two of them on the
same two cores are slower than one after the other. A worker's share is set here, before either is loaded.
"""

import os

import pytest
from hypothesis import HealthCheck, settings

if "PYTEST_XDIST_WORKER" in os.environ and hasattr(os, "sched_setaffinity"):
    number, count = int(os.environ["PYTEST_XDIST_WORKER"][2:]), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[number::count] or os.sched_getaffinity(0))

# A first example may compile for seconds, so examples have no deadline.
settings.register_profile("minigpt", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("minigpt")


@pytest.fixture
def float64():
    """JAX with 64-bit floats for the length of one test."""
    import jax

    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def little_compiling():
    """For functions that run a few times: compiling them takes longer, so XLA is asked for few optimizations."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def run_environment(tmp_path_factory, little_compiling):
    """For whole runs of a few steps: little compiling, and caches away from the person's own, which the tests share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
        patch.setenv("COLUMNS", "200")  # a wide terminal: no line is folded
        yield


@pytest.fixture
def as_it_was():
    """JAX's 64-bit floats, which a float64 run switches on, are as before when the test ends."""
    import jax

    before = jax.config.jax_enable_x64
    yield
    jax.config.update("jax_enable_x64", before)
