"""The decoder-only transformer in PyTorch, written to be read.

Choices and names are those of its twin, minigpt_jax/model.py; what differs is the idiom alone. Random numbers are
drawn outside: dropout is given its masks.

B batch  T time  S = B*T positions  D hidden  F ffn  V vocabulary  N query heads  K kv heads  H head size
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minigpt_jax.config import ModelConfig
from minigpt_torch.attention import Kernel, attention
from minigpt_torch.dropout import dropout
from minigpt_torch.lora import NO_ADAPTERS, LayerAdapters, adapted

Attend = Callable[..., Tensor]
"""What `attention` takes and returns."""

# --- RMSNorm ---


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis (Zhang and Sennrich, 2019).

    Args:
        size: length of the last axis.
        eps: added to the mean square, inside the root.
        weight_before_cast: multiply in the high precision (3-series) or after the cast back (2-series).
    """

    def __init__(self, size: int, *, eps: float, weight_before_cast: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps
        self.weight_before_cast = weight_before_cast

    def forward(self, x: Tensor) -> Tensor:
        high = x.to(torch.promote_types(x.dtype, torch.float32))
        high = high * torch.rsqrt(torch.mean(high * high, dim=-1, keepdim=True) + self.eps)
        # Released weights depend on which side of the cast the weight is applied.
        if self.weight_before_cast:
            return (self.weight * high).to(x.dtype)
        return self.weight.to(x.dtype) * high.to(x.dtype)


# --- Rotary positions ---


def rotary_angles(positions: Tensor, *, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position * theta^(-2i / H) (Su et al., 2021). positions [B, T] -> two [B, T, 1, H/2]."""
    high = torch.promote_types(dtype, torch.float32)
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=high, device=positions.device) / head_dim)
    angles = positions.to(high)[:, :, None, None] * frequencies
    return torch.cos(angles), torch.sin(angles)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (x[i], x[i + H/2]) by the given angles. x [B, T, N, H]."""
    # Half-split: pairs are H/2 apart, not neighbours; released weights depend on it.
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


# --- Attention ---


class Linear(nn.Linear):
    """A product without bias; the weight is cast to the input's dtype, so parameters stay float32 under bfloat16."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions, within segments."""

    def __init__(self, config: ModelConfig, *, kernel: Kernel):
        super().__init__()
        norm = partial(RMSNorm, eps=config.rms_norm_eps, weight_before_cast=config.norm_weight_before_cast)
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.kernel: Kernel = kernel
        self.q_proj = Linear(config.hidden_size, config.num_heads * config.head_dim)
        self.k_proj = Linear(config.hidden_size, config.num_kv_heads * config.head_dim)
        self.v_proj = Linear(config.hidden_size, config.num_kv_heads * config.head_dim)
        self.o_proj = Linear(config.num_heads * config.head_dim, config.hidden_size)
        self.q_norm = norm(config.head_dim) if config.qk_norm else None
        self.k_norm = norm(config.head_dim) if config.qk_norm else None

    def forward(
        self,
        x: Tensor,  # [S, D]
        *,
        segment_ids: Tensor,  # [B, T]
        cos: Tensor,  # [B, T, 1, H/2]
        sin: Tensor,
        adapters: LayerAdapters = NO_ADAPTERS,
        attend: Attend | None = None,
    ) -> Tensor:  # [S, D]
        batch, time = segment_ids.shape
        query = adapted(self.q_proj, x, adapters.get("q_proj"))
        key = adapted(self.k_proj, x, adapters.get("k_proj"))
        value = adapted(self.v_proj, x, adapters.get("v_proj"))
        query = query.reshape(batch, time, self.num_heads, self.head_dim)  # [B, T, N, H]
        key = key.reshape(batch, time, self.num_kv_heads, self.head_dim)  # [B, T, K, H]
        value = value.reshape(batch, time, self.num_kv_heads, self.head_dim)  # [B, T, K, H]
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        context = (attend or attention)(query, key, value, segment_ids=segment_ids, kernel=self.kernel)
        return adapted(self.o_proj, context.reshape(batch * time, -1), adapters.get("o_proj"))


# --- FeedForward ---


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer, 2020)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor, *, adapters: LayerAdapters = NO_ADAPTERS) -> Tensor:  # [S, D] -> [S, D]
        gate = adapted(self.gate_proj, x, adapters.get("gate_proj"))
        up = adapted(self.up_proj, x, adapters.get("up_proj"))
        return adapted(self.down_proj, F.silu(gate) * up, adapters.get("down_proj"))


# --- Block ---


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)); dropout on both branches."""

    def __init__(self, config: ModelConfig, *, kernel: Kernel):
        super().__init__()
        norm = partial(RMSNorm, eps=config.rms_norm_eps, weight_before_cast=config.norm_weight_before_cast)
        self.input_layernorm = norm(config.hidden_size)
        self.self_attn = Attention(config, kernel=kernel)
        self.post_attention_layernorm = norm(config.hidden_size)
        self.mlp = FeedForward(config)

    def forward(
        self,
        x: Tensor,  # [S, D]
        *,
        segment_ids: Tensor,
        cos: Tensor,
        sin: Tensor,
        dropout_rate: float,
        dropout_masks: tuple[Tensor | None, Tensor | None],
        adapters: LayerAdapters = NO_ADAPTERS,
        attend: Attend | None = None,
    ) -> Tensor:  # [S, D]
        normed = self.input_layernorm(x)
        branch = self.self_attn(normed, segment_ids=segment_ids, cos=cos, sin=sin, adapters=adapters, attend=attend)
        x = x + dropout(branch, rate=dropout_rate, keep=dropout_masks[0])
        branch = self.mlp(self.post_attention_layernorm(x), adapters=adapters)
        return x + dropout(branch, rate=dropout_rate, keep=dropout_masks[1])


# --- Transformer ---


class Transformer(nn.Module):
    """Token ids to hidden states; `logits` turns these into scores over the vocabulary.

    The parameters' dtype is torch's default when it is made; `dtype` is that of the computation.
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, kernel: Kernel):
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Block(config, kernel=kernel) for _ in range(config.num_layers)])
        self.norm = RMSNorm(
            config.hidden_size, eps=config.rms_norm_eps, weight_before_cast=config.norm_weight_before_cast
        )
        # A tied head is the embedding table itself: one tensor, never a second module.
        self.lm_head = None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size)

    def forward(
        self,
        tokens: Tensor,  # int64 [B, T]
        *,
        segment_ids: Tensor,  # int64 [B, T]
        positions: Tensor,  # int64 [B, T]
        dropout_rate: float = 0.0,
        dropout_masks: Sequence[Tensor] | None = None,  # 2 * layers + 1 of bool [S, D]
        adapters: Sequence[LayerAdapters] | None = None,  # one for each layer
        attends: Sequence[Attend] | None = None,  # one for each layer
    ) -> Tensor:  # [S, D]
        """Hidden states after the last norm, in the compute dtype. Dropout acts only when masks are given.

        `adapters` are minigpt_torch/lora.py's `layer_adapters`; without them the model is itself. `attends` take the
        place of attention within segments, as a cache of earlier keys and values does.
        """
        config = self.config
        masks: list[Tensor | None] = [None] * (2 * config.num_layers + 1)
        if dropout_masks is not None:
            masks = list(dropout_masks)
        cos, sin = rotary_angles(positions, head_dim=config.head_dim, theta=config.rope_theta, dtype=self.dtype)
        # Cast after the look-up: the gradients of a token's places are then summed in the parameters' dtype.
        x = self.embed_tokens(tokens.reshape(-1)).to(self.dtype)  # [S, D]
        x = dropout(x, rate=dropout_rate, keep=masks[-1])
        for number, layer in enumerate(self.layers):
            x = layer(
                x,
                segment_ids=segment_ids,
                cos=cos,
                sin=sin,
                dropout_rate=dropout_rate,
                dropout_masks=(masks[2 * number], masks[2 * number + 1]),
                adapters=NO_ADAPTERS if adapters is None else adapters[number],
                attend=None if attends is None else attends[number],
            )
        return self.norm(x)

    @property
    def head(self) -> Tensor:
        """The output head as a [V, D] table, in the parameters' dtype."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def logits(self, hidden: Tensor) -> Tensor:  # [S, D] -> [S, V]
        """Scores over the vocabulary, in at least float32."""
        high = torch.promote_types(hidden.dtype, torch.float32)
        return torch.einsum("sd,vd->sv", hidden.to(high), self.head.to(hidden.dtype).to(high))
