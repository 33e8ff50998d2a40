"""What the machine can do at most: a large matrix product, and reading memory, measured beside what they bound."""

import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from minigpt_jax.engine import matmul_flops

READ_BYTES = 256 * 2**20
"""Far more than any cache holds."""


@dataclass(frozen=True)
class Limits:
    """Of the first device, with all its cores."""

    matmul_gflops: float
    """10^9 floating-point operations a second of a large matrix product."""
    read_gb_per_s: float
    """10^9 bytes a second that are read from memory."""


def measure_limits() -> Limits:
    """In float32, the best of several: limits are what nothing disturbed."""
    return Limits(matmul_flops(jnp.dtype(jnp.float32)) / 1e9, _read_gb_per_s())


def _read_gb_per_s() -> float:
    numbers = jnp.ones((16, READ_BYTES // 64), jnp.float32)
    # Rows are summed one beside the other, so that every core has some.
    read = jax.jit(lambda block: block.sum(axis=1))
    read(numbers).block_until_ready()
    fastest = float("inf")
    for _ in range(7):
        begin = time.perf_counter()
        read(numbers).block_until_ready()
        fastest = min(fastest, time.perf_counter() - begin)
    return float(numbers.nbytes / fastest / 1e9)
