"""Parts of the model in NumPy, with what could be wrong in them as an option: the material of the suspects.

B batch  T time (queries)  S time (keys)  D hidden  N query heads  K kv heads  H head size
"""

from collections.abc import Callable
from typing import Any

import numpy as np

# --- RMSNorm ---


def norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """RMSNorm over the last axis."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def cast_norm(x: np.ndarray, weight: np.ndarray, eps: float, *, before_cast: bool) -> np.ndarray:
    """RMSNorm of a bfloat16 input by a float32 weight, multiplied before or after the cast back; as float32."""
    high = norm(x.astype(np.float32), np.ones(1, np.float32), eps)
    if before_cast:
        return (weight * high).astype(x.dtype).astype(np.float32)
    return (weight.astype(x.dtype) * high.astype(x.dtype)).astype(np.float32)


def low_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """RMSNorm without a cast to float32, the mean's sum apart; as float32."""
    mean_square = np.mean((x * x).astype(np.float32), axis=-1, keepdims=True).astype(x.dtype)
    inverse = (1 / np.sqrt((mean_square + np.asarray(eps, x.dtype)).astype(np.float32))).astype(x.dtype)
    return (weight.astype(x.dtype) * (x * inverse)).astype(np.float32)


# --- Rotation ---


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Turn the pairs (x[i], x[i + H/2])."""
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _rotate_neighbours(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    first, second = x[..., ::2], x[..., 1::2]
    return np.stack([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(x.shape)


def _reflect(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos + second * sin, second * cos + first * sin], axis=-1)


EXCHANGED = "the rotation's cosine and sine are exchanged"
ROTATIONS: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]] = {
    "the rotation's sine has the wrong sign": lambda x, cos, sin: rotate(x, cos, -sin),
    "the rotation's sine has the wrong sign in the first half": _reflect,
    "the rotation's sine has the wrong sign in the second half": lambda x, cos, sin: _reflect(x, cos, -sin),
    EXCHANGED: lambda x, cos, sin: rotate(x, sin, cos),
    "the rotation turns neighbouring pairs instead of halves": _rotate_neighbours,
}

# --- Attention ---


def attention(
    query: np.ndarray,  # [B, T, N, H]
    key: np.ndarray,  # [B, T, K, H]
    value: np.ndarray,  # [B, T, K, H]
    segments: np.ndarray,  # [B, T]
    *,
    power: float = -0.5,
    ahead: int = 0,
    causal: bool = True,
    within_segments: bool = True,
    tiled: bool = False,
) -> np.ndarray:
    """Grouped-query attention; NaN where a position sees nothing at all. Returns [B, T, N, H].

    Args:
        query: of N heads.
        key: of K heads.
        value: of K heads.
        segments: a position sees its own segment.
        power: scores are multiplied by H to this power.
        ahead: how many positions after itself a position sees.
        causal: whether the future is hidden.
        within_segments: whether other segments are hidden.
        tiled: query head n reads kv head n % K instead of n // (N / K).
    """
    num_heads, head_dim, num_kv_heads = query.shape[2], query.shape[3], key.shape[2]
    number = np.arange(num_heads)
    source = number % num_kv_heads if tiled else number // (num_heads // num_kv_heads)
    scores = np.einsum("btnh,bsnh->bnts", query, key[:, :, source]) * head_dim**power
    index = np.arange(query.shape[1])
    visible = np.ones((1, len(index), len(index)), bool)
    if causal:
        visible = visible & (index[:, None] + ahead >= index)
    if within_segments:
        visible = visible & (segments[:, :, None] == segments[:, None, :])
    scores = np.where(visible[:, None], scores, -np.inf)
    exponentials = np.exp(scores - scores.max(-1, keepdims=True))
    weights = exponentials / exponentials.sum(-1, keepdims=True)
    return np.einsum("bnts,bsnh->btnh", weights, value[:, :, source])


ATTENTIONS: dict[str, dict[str, Any]] = {
    "scores are not divided by sqrt(head_dim)": {"power": 0.0},
    "scores are divided by head_dim instead of its root": {"power": -1.0},
    "scores are multiplied by sqrt(head_dim)": {"power": 0.5},
    "the mask is off by one: a position sees one of the future": {"ahead": 1},
    "the mask is off by one: a position does not see itself": {"ahead": -1},
    "the future is not hidden": {"causal": False},
    "other segments are not hidden": {"within_segments": False},
    "kv heads are tiled instead of repeated": {"tiled": True},
}
"""Descriptions of mistakes, and the options of `attention` that make them."""

# --- Activations ---


def silu(x: np.ndarray) -> np.ndarray:
    """The product x * sigmoid(x)."""
    return x / (1 + np.exp(-x))


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    return x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2


ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "the gate's activation is left out": lambda x: x,
    "the gate's activation is a sigmoid instead of silu": lambda x: 1 / (1 + np.exp(-x)),
    "the gate's activation is relu instead of silu": lambda x: np.maximum(x, 0),
    "the gate's activation is gelu (tanh) instead of silu": _gelu_tanh,
}
