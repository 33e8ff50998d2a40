"""Keys and values of the tokens that a model has read, each in the slot of its position.

The twin of minigpt_jax/kv_cache.py.

B rows  T new tokens of a row  L slots of a row  K kv heads  H head size
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from minigpt_jax.config import ModelConfig
from minigpt_torch.attention import attention_to_cache


class KVCache(NamedTuple):
    """One entry a layer. What lies in slots at or after a row's length is not looked at, and written over."""

    keys: tuple[Tensor, ...]  # [B, K, L, H]
    values: tuple[Tensor, ...]  # [B, K, L, H]

    @property
    def slots(self) -> int:
        """L."""
        return self.keys[0].shape[2]


def empty_cache(config: ModelConfig, *, rows: int, slots: int, dtype: torch.dtype, device: torch.device) -> KVCache:
    """A cache of zeros."""
    shape = (rows, config.num_kv_heads, slots, config.head_dim)

    def zeros() -> tuple[Tensor, ...]:
        return tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers))

    return KVCache(zeros(), zeros())


class CachedAttention:
    """The attention of one forward pass: each layer first puts the new keys and values into its slots, in place.

    Args:
        cache: what was there before.
        positions: [B, T] of the new tokens.
        is_real: bool [B, T]; others are padding, and are not put anywhere.
    """

    def __init__(self, cache: KVCache, *, positions: Tensor, is_real: Tensor):
        self._cache, self._positions = cache, positions
        self._rows, self._columns = is_real.nonzero(as_tuple=True)
        self._slots = positions[self._rows, self._columns]
        # The twin computes every slot; here those that no row uses yet are left out.
        self._used = int(self._slots.max()) + 1 if len(self._slots) else 1

    def of_layer(self, number: int) -> Any:
        """What the layer takes in place of attention within segments."""

        def attend(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
            keys, values = self._cache.keys[number], self._cache.values[number]
            keys[self._rows, :, self._slots] = key[self._rows, self._columns]
            values[self._rows, :, self._slots] = value[self._rows, self._columns]
            used = slice(self._used)
            return attention_to_cache(query, keys[:, :, used], values[:, :, used], positions=self._positions)

        return attend
