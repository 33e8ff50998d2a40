"""Keys and values of the tokens that a model has read, each in the slot of its position.

B rows  T new tokens of a row  L slots of a row  K kv heads  H head size
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from minigpt_jax.attention import attention_to_cache
from minigpt_jax.config import ModelConfig


class KVCache(NamedTuple):
    """One entry a layer. What lies in slots at or after a row's length is not looked at, and written over."""

    keys: tuple[jax.Array, ...]  # [B, K, L, H]
    values: tuple[jax.Array, ...]  # [B, K, L, H]

    @property
    def slots(self) -> int:
        """L."""
        return int(self.keys[0].shape[2])


def empty_cache(config: ModelConfig, *, rows: int, slots: int, dtype: jnp.dtype) -> KVCache:
    """A cache of zeros."""
    shape = (rows, config.num_kv_heads, slots, config.head_dim)
    layers = range(config.num_layers)
    return KVCache(tuple(jnp.zeros(shape, dtype) for _ in layers), tuple(jnp.zeros(shape, dtype) for _ in layers))


class CachedAttention:
    """The attention of one forward pass: each layer first puts the new keys and values into its slots.

    Args:
        cache: what was there before.
        positions: [B, T] of the new tokens.
        is_real: bool [B, T]; others are padding, and are not put anywhere.
    """

    def __init__(self, cache: KVCache, *, positions: jax.Array, is_real: jax.Array):
        self.cache = cache
        self._positions = positions
        # One past the last slot is no slot: the write is dropped.
        self._slots = jnp.where(is_real, positions, cache.slots)
        self._rows = jnp.arange(positions.shape[0])[:, None]

    def of_layer(self, number: int) -> Any:
        """What the layer takes in place of attention within segments."""

        def attend(query: jax.Array, key: jax.Array, value: jax.Array, **_: Any) -> jax.Array:
            keys, values = list(self.cache.keys), list(self.cache.values)
            keys[number] = keys[number].at[self._rows, :, self._slots].set(key, mode="drop")
            values[number] = values[number].at[self._rows, :, self._slots].set(value, mode="drop")
            self.cache = KVCache(tuple(keys), tuple(values))
            return attention_to_cache(query, keys[number], values[number], positions=self._positions)

        return attend
