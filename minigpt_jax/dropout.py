"""Dropout, from a key given at call time."""

import jax
import jax.numpy as jnp


def dropout(x: jax.Array, *, rate: float, key: jax.Array | None) -> jax.Array:
    """Zero each element with probability `rate` and scale the rest by 1 / (1 - rate); nothing without a key."""
    if key is None or rate == 0:
        return x
    return jnp.where(keep_mask(key, rate=rate, shape=x.shape), x / (1 - rate), 0).astype(x.dtype)


def keep_mask(key: jax.Array, *, rate: float, shape: tuple[int, ...]) -> jax.Array:
    """What `dropout` keeps under `key`: bool of `shape`. Other masks with 64-bit floats than without."""
    return jax.random.bernoulli(key, 1 - rate, shape)
