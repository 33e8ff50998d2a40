"""Causal grouped-query attention: within segments by one function of two kernels that agree, and to a cache.

- `reference`: written to be read, step for step that of minigpt_jax/attention.py.
- `fused`: PyTorch's own `scaled_dot_product_attention`; flash attention where it has one.

A position sees the positions at or before it that carry its own segment id. Scores and softmax of the reference are
computed in at least float32.

B batch  T time (queries)  S time (keys)  N query heads  K kv heads  G = N/K queries of a kv head  H head size
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Kernel = Literal["reference", "fused"]


def attention(
    query: Tensor,  # [B, T, N, H]
    key: Tensor,  # [B, T, K, H]
    value: Tensor,  # [B, T, K, H]
    *,
    segment_ids: Tensor,  # int [B, T]
    kernel: Kernel,
) -> Tensor:
    """softmax(q k' / sqrt(H)) v, causal within segments. Returns [B, T, N, H] in the dtype of `query`."""
    batch, time, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[2]
    causal = torch.ones(time, time, dtype=torch.bool, device=query.device).tril()
    visible = causal & (segment_ids[:, :, None] == segment_ids[:, None, :])  # [B, T, S]
    if kernel == "fused":
        # Query head n reads kv head n // G: each kv head repeats for its G neighbours, it is not tiled.
        context = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=visible[:, None],
            enable_gqa=num_kv_heads != num_heads,
        )  # [B, N, T, H]
        return context.transpose(1, 2)
    # Heads outermost: each product below is then one plain matrix product per (B, K).
    grouped = query.reshape(batch, time, num_kv_heads, num_heads // num_kv_heads, head_dim)
    grouped = grouped.permute(0, 2, 3, 1, 4)  # [B, K, G, T, H]
    key, value = key.transpose(1, 2), value.transpose(1, 2)  # [B, K, S, H]
    context = _attend(grouped, key, value, visible)
    return context.permute(0, 3, 1, 2, 4).reshape(batch, time, num_heads, head_dim)


def attention_to_cache(
    query: Tensor,  # [B, T, N, H]
    key: Tensor,  # [B, K, S, H]
    value: Tensor,  # [B, K, S, H]
    *,
    positions: Tensor,  # int64 [B, T]
) -> Tensor:  # [B, T, N, H]
    """Attention to keys and values that lie by their position: a query sees the slots 0 to its own position."""
    batch, time, num_heads, head_dim = query.shape
    num_kv_heads, slots = key.shape[1:3]
    grouped = query.reshape(batch, time, num_kv_heads, num_heads // num_kv_heads, head_dim)
    visible = torch.arange(slots, device=query.device) <= positions[:, :, None]  # [B, T, S]
    context = _attend(grouped.permute(0, 2, 3, 1, 4), key, value, visible)  # [B, K, G, T, H]
    return context.permute(0, 3, 1, 2, 4).reshape(query.shape)


def _attend(
    query: Tensor,  # [B, K, G, T, H]
    key: Tensor,  # [B, K, S, H]
    value: Tensor,  # [B, K, S, H]
    visible: Tensor,  # bool [B, T, S]
) -> Tensor:  # [B, K, G, T, H]
    """Attention of the queries to the keys that they may see."""
    high = torch.promote_types(query.dtype, torch.float32)
    scores = torch.einsum("bkgth,bksh->bkgts", query.to(high), key.to(high)) * query.shape[-1] ** -0.5
    # Every position sees itself, so no row of scores is wholly masked.
    scores = scores.masked_fill(~visible[:, None, None], torch.finfo(high).min)
    weights = torch.softmax(scores, dim=-1).to(value.dtype)
    return torch.einsum("bkgts,bksh->bkgth", weights, value)
