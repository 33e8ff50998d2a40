"""Fixtures of the tests."""

import pytest
from hypothesis import HealthCheck, settings

# A first example may compile for seconds, so examples have no deadline.
settings.register_profile("minigpt", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("minigpt")


@pytest.fixture
def float64():
    """JAX with 64-bit floats for the length of one test."""
    import jax

    with jax.enable_x64(True):
        yield
