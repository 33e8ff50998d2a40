"""Causal grouped-query attention: within segments by one function of three kernels that agree, and to a cache.

- `reference`: one dense einsum, written to be read.
- `blocked`: queries in blocks of 64, each against only the keys it may see. Slices are static, and a block is
  recomputed in the backward pass instead of keeping its scores. The fastest on a CPU.
- `cudnn`: flash attention through `jax.nn.dot_product_attention`; NVIDIA GPUs, bfloat16 or float16.

A position sees the positions at or before it that carry its own segment id. Scores and softmax are computed in at
least float32.

B batch  T time (queries)  S time (keys)  N query heads  K kv heads  G = N/K queries of a kv head  H head size
"""

from typing import Literal

import jax
import jax.numpy as jnp

Kernel = Literal["reference", "blocked", "cudnn"]

BLOCK = 64
"""Queries of one block; also the unit by which a block's visible keys grow."""


def default_kernel(platform: str, dtype: jnp.dtype) -> Kernel:
    """The fastest kernel that runs on `platform` ("cpu", "gpu", ...) in `dtype`."""
    if platform in ("gpu", "cuda") and dtype in (jnp.bfloat16, jnp.float16):
        return "cudnn"
    return "blocked"


def attention(
    query: jax.Array,  # [B, T, N, H]
    key: jax.Array,  # [B, T, K, H]
    value: jax.Array,  # [B, T, K, H]
    *,
    segment_ids: jax.Array,  # int32 [B, T]
    kernel: Kernel,
) -> jax.Array:
    """softmax(q k' / sqrt(H)) v, causal within segments. Returns [B, T, N, H] in the dtype of `query`."""
    # cuDNN's backward pass with a mask takes rows of even length only.
    if kernel == "cudnn" and query.shape[1] % 2 == 0:
        mask = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
        return jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=True, implementation="cudnn")
    batch, time, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[2]
    # Heads outermost: each product below is then one plain matrix product per (B, K).
    grouped = query.reshape(batch, time, num_kv_heads, num_heads // num_kv_heads, head_dim)
    grouped = grouped.transpose(0, 2, 3, 1, 4)  # [B, K, G, T, H]
    key, value = key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)  # [B, K, S, H]
    if kernel == "reference":
        context = _attend_within(grouped, key, value, segment_ids, segment_ids, 0)
    else:
        block = jax.checkpoint(_attend_within, static_argnums=5)
        context = jnp.concatenate(
            [
                block(
                    grouped[:, :, :, start : start + BLOCK],
                    key[:, :, : start + BLOCK],
                    value[:, :, : start + BLOCK],
                    segment_ids[:, start : start + BLOCK],
                    segment_ids[:, : start + BLOCK],
                    start,
                )
                for start in range(0, time, BLOCK)
            ],
            axis=3,
        )
    return context.transpose(0, 3, 1, 2, 4).reshape(batch, time, num_heads, head_dim)


def attention_to_cache(
    query: jax.Array,  # [B, T, N, H]
    key: jax.Array,  # [B, K, S, H]
    value: jax.Array,  # [B, K, S, H]
    *,
    positions: jax.Array,  # int32 [B, T]
) -> jax.Array:  # [B, T, N, H]
    """Attention to keys and values that lie by their position: a query sees the slots 0 to its own position."""
    batch, time, num_heads, head_dim = query.shape
    num_kv_heads, slots = key.shape[1:3]
    grouped = query.reshape(batch, time, num_kv_heads, num_heads // num_kv_heads, head_dim)
    visible = jnp.arange(slots) <= positions[:, :, None]  # [B, T, S]
    context = _attend(grouped.transpose(0, 2, 3, 1, 4), key, value, visible)  # [B, K, G, T, H]
    return context.transpose(0, 3, 1, 2, 4).reshape(query.shape)


def _attend_within(
    query: jax.Array,  # [B, K, G, T, H]
    key: jax.Array,  # [B, K, S, H]
    value: jax.Array,  # [B, K, S, H]
    query_segments: jax.Array,  # [B, T]
    key_segments: jax.Array,  # [B, S]
    start: int,
) -> jax.Array:  # [B, K, G, T, H]
    """Attention of the queries at positions start, start + 1, ... to the keys at positions 0, 1, ..."""
    causal = (start + jnp.arange(query.shape[3]))[:, None] >= jnp.arange(key.shape[2])[None, :]
    return _attend(query, key, value, causal & (query_segments[:, :, None] == key_segments[:, None, :]))


def _attend(
    query: jax.Array,  # [B, K, G, T, H]
    key: jax.Array,  # [B, K, S, H]
    value: jax.Array,  # [B, K, S, H]
    visible: jax.Array,  # bool [B, T, S]
) -> jax.Array:  # [B, K, G, T, H]
    """Attention of the queries to the keys that they may see."""
    batch, num_kv_heads, groups, time, head_dim = query.shape
    high = jnp.promote_types(query.dtype, jnp.float32)
    rows = query.reshape(batch, num_kv_heads, groups * time, head_dim)
    scores = jnp.einsum("bkth,bksh->bkts", rows, key, preferred_element_type=high) * head_dim**-0.5
    scores = scores.reshape(batch, num_kv_heads, groups, time, -1)
    # Every position sees itself, so no row of scores is wholly masked.
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(high).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    weights = weights.reshape(batch, num_kv_heads, groups * time, -1)
    return jnp.einsum("bkts,bksh->bkth", weights, value).reshape(query.shape)
