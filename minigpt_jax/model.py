"""The decoder-only transformer in Flax NNX.

Choices: RMSNorm before each sub-layer, SwiGLU, rotary positions (half-split), grouped-query attention, no biases,
activations kept two-dimensional between layers (a [S, D] matrix needs no transpose in any weight gradient).
The model ends at the last norm; the output head is applied in chunks by minigpt_jax/loss.py, or by `logits`.
Attribute names are Hugging Face's.

Parameters live outside the modules, as a dict (see minigpt_jax/initialization.py); `nnx.merge` joins the two.

B batch  T time  S = B*T positions  D hidden  F ffn  V vocabulary  N query heads  K kv heads  H head size
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from minigpt_jax.attention import Kernel, attention
from minigpt_jax.config import ModelConfig
from minigpt_jax.dropout import dropout
from minigpt_jax.lora import NO_ADAPTERS, LayerAdapters, adapted

Attend = Callable[..., jax.Array]
"""What `attention` takes and returns."""

# --- RMSNorm ---


class RMSNorm(nnx.Module):
    """x / rms(x) * weight over the last axis (Zhang and Sennrich, 2019).

    Args:
        size: length of the last axis.
        eps: added to the mean square, inside the root.
        weight_before_cast: multiply in the high precision (3-series) or after the cast back (2-series).
    """

    def __init__(self, size: int, *, eps: float, weight_before_cast: bool):
        self.weight = nnx.Param(jnp.ones(size))
        self.eps = eps
        self.weight_before_cast = weight_before_cast

    def __call__(self, x: jax.Array) -> jax.Array:
        high = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        high = high * jax.lax.rsqrt(jnp.mean(high * high, axis=-1, keepdims=True) + self.eps)
        # Released weights depend on which side of the cast the weight is applied.
        if self.weight_before_cast:
            return (self.weight[...] * high).astype(x.dtype)
        return self.weight[...].astype(x.dtype) * high.astype(x.dtype)


# --- Rotary positions ---


def rotary_angles(
    positions: jax.Array, *, head_dim: int, theta: float, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of position * theta^(-2i / H) (Su et al., 2021). positions [B, T] -> two [B, T, 1, H/2]."""
    high = jnp.promote_types(dtype, jnp.float32)
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=high) / head_dim)
    angles = positions.astype(high)[:, :, None, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turn the pairs (x[i], x[i + H/2]) by the given angles. x [B, T, N, H]."""
    # Half-split: pairs are H/2 apart, not neighbours; released weights depend on it.
    first, second = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


# --- Attention ---


class Attention(nnx.Module):
    """Causal grouped-query attention with rotary positions, within segments."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, kernel: Kernel, rngs: nnx.Rngs):
        linear = partial(nnx.Linear, use_bias=False, dtype=dtype, rngs=rngs)
        norm = partial(RMSNorm, eps=config.rms_norm_eps, weight_before_cast=config.norm_weight_before_cast)
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.kernel: Kernel = kernel
        self.q_proj = linear(config.hidden_size, config.num_heads * config.head_dim)
        self.k_proj = linear(config.hidden_size, config.num_kv_heads * config.head_dim)
        self.v_proj = linear(config.hidden_size, config.num_kv_heads * config.head_dim)
        self.o_proj = linear(config.num_heads * config.head_dim, config.hidden_size)
        self.q_norm = norm(config.head_dim) if config.qk_norm else None
        self.k_norm = norm(config.head_dim) if config.qk_norm else None

    def __call__(
        self,
        x: jax.Array,  # [S, D]
        *,
        segment_ids: jax.Array,  # [B, T]
        cos: jax.Array,  # [B, T, 1, H/2]
        sin: jax.Array,
        adapters: LayerAdapters = NO_ADAPTERS,
        attend: Attend | None = None,
    ) -> jax.Array:  # [S, D]
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


class FeedForward(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer, 2020)."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        linear = partial(nnx.Linear, use_bias=False, dtype=dtype, rngs=rngs)
        self.gate_proj = linear(config.hidden_size, config.intermediate_size)
        self.up_proj = linear(config.hidden_size, config.intermediate_size)
        self.down_proj = linear(config.intermediate_size, config.hidden_size)

    def __call__(self, x: jax.Array, *, adapters: LayerAdapters = NO_ADAPTERS) -> jax.Array:  # [S, D] -> [S, D]
        gate = adapted(self.gate_proj, x, adapters.get("gate_proj"))
        up = adapted(self.up_proj, x, adapters.get("up_proj"))
        return adapted(self.down_proj, jax.nn.silu(gate) * up, adapters.get("down_proj"))


# --- Block ---


class Block(nnx.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)); dropout on both branches."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, kernel: Kernel, rngs: nnx.Rngs):
        norm = partial(RMSNorm, eps=config.rms_norm_eps, weight_before_cast=config.norm_weight_before_cast)
        self.input_layernorm = norm(config.hidden_size)
        self.self_attn = Attention(config, dtype=dtype, kernel=kernel, rngs=rngs)
        self.post_attention_layernorm = norm(config.hidden_size)
        self.mlp = FeedForward(config, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,  # [S, D]
        *,
        segment_ids: jax.Array,
        cos: jax.Array,
        sin: jax.Array,
        dropout_rate: float,
        dropout_keys: tuple[jax.Array | None, jax.Array | None],
        adapters: LayerAdapters = NO_ADAPTERS,
        attend: Attend | None = None,
    ) -> jax.Array:  # [S, D]
        normed = self.input_layernorm(x)
        branch = self.self_attn(normed, segment_ids=segment_ids, cos=cos, sin=sin, adapters=adapters, attend=attend)
        x = x + dropout(branch, rate=dropout_rate, key=dropout_keys[0])
        branch = self.mlp(self.post_attention_layernorm(x), adapters=adapters)
        return x + dropout(branch, rate=dropout_rate, key=dropout_keys[1])


# --- Transformer ---


class Transformer(nnx.Module):
    """Token ids to hidden states; `logits` turns these into scores over the vocabulary."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, kernel: Kernel, rngs: nnx.Rngs):
        self.config = config
        self.dtype = dtype
        self.embed_tokens = nnx.Embed(config.vocab_size, config.hidden_size, rngs=rngs)
        self.layers = nnx.List([Block(config, dtype=dtype, kernel=kernel, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = RMSNorm(
            config.hidden_size, eps=config.rms_norm_eps, weight_before_cast=config.norm_weight_before_cast
        )
        # A tied head is the embedding table itself: one array, never a second module.
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else nnx.Linear(config.hidden_size, config.vocab_size, use_bias=False, dtype=dtype, rngs=rngs)
        )

    def __call__(
        self,
        tokens: jax.Array,  # int32 [B, T]
        *,
        segment_ids: jax.Array,  # int32 [B, T]
        positions: jax.Array,  # int32 [B, T]
        dropout_rate: float = 0.0,
        dropout_key: jax.Array | None = None,
        adapters: Sequence[LayerAdapters] | None = None,  # one for each layer
        attends: Sequence[Attend] | None = None,  # one for each layer
    ) -> jax.Array:  # [S, D]
        """Hidden states after the last norm, in the compute dtype. Dropout acts only when a key is given.

        `adapters` are minigpt_jax/lora.py's `layer_adapters`; without them the model is itself. `attends` take the
        place of attention within segments, as a cache of earlier keys and values does.
        """
        config = self.config
        num_keys = 2 * config.num_layers + 1
        keys: list[jax.Array | None] = [None] * num_keys
        if dropout_key is not None:
            keys = list(jax.random.split(dropout_key, num_keys))
        cos, sin = rotary_angles(positions, head_dim=config.head_dim, theta=config.rope_theta, dtype=self.dtype)
        # Cast after the look-up: the gradients of a token's places are then summed in the parameters' dtype.
        x = jnp.take(self.embed_tokens.embedding[...], tokens.reshape(-1), axis=0).astype(self.dtype)  # [S, D]
        x = dropout(x, rate=dropout_rate, key=keys[-1])
        for number, layer in enumerate(self.layers):
            x = layer(
                x,
                segment_ids=segment_ids,
                cos=cos,
                sin=sin,
                dropout_rate=dropout_rate,
                dropout_keys=(keys[2 * number], keys[2 * number + 1]),
                adapters=NO_ADAPTERS if adapters is None else adapters[number],
                attend=None if attends is None else attends[number],
            )
        return self.norm(x)

    @property
    def head(self) -> jax.Array:
        """The output head as a [V, D] table, in the parameters' dtype."""
        if self.lm_head is None:
            return self.embed_tokens.embedding[...]
        return self.lm_head.kernel[...].T

    def logits(self, hidden: jax.Array) -> jax.Array:  # [S, D] -> [S, V]
        """Scores over the vocabulary, in at least float32."""
        high = jnp.promote_types(hidden.dtype, jnp.float32)
        return jnp.einsum("sd,vd->sv", hidden, self.head.astype(hidden.dtype), preferred_element_type=high)


def model_graph(config: ModelConfig, *, dtype: jnp.dtype, kernel: Kernel) -> nnx.GraphDef[Transformer]:
    """The model's structure without parameters; `nnx.merge(graph, parameters)` makes it callable."""
    model = nnx.eval_shape(lambda: Transformer(config, dtype=dtype, kernel=kernel, rngs=nnx.Rngs(0)))
    return nnx.split(model)[0]
