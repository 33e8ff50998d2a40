"""The operations of a forward pass, in their order: one formula for both frameworks.

The twins have the same rooms by the same names, so `part.self_attn.q_proj(x)` is an operation of either. Functions and
modules are looked up when an operation runs: one that somebody replaced is the one that is called. Parts come before
the whole that they make: where the parts agree and the whole does not, their composition is at fault.

B batch  T time  S = B*T positions  D hidden  F ffn  V vocabulary  N heads  H head size
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax

from minigpt_bridge.finder import suspects
from minigpt_bridge.finder.capture import input_of
from minigpt_jax.config import ModelConfig


class Side(NamedTuple):
    """What an operation may read besides its inputs, of one framework."""

    library: Any
    """jax.numpy or torch."""
    rooms: Any
    """model.py of the package."""
    objective: Any
    """objective.py of the package."""
    no_dropout: dict[str, Any]
    """The options of a block that switch dropout off."""
    batch: Any
    """Five [B, T] arrays by the names of minigpt_jax/data/batching.py."""


class Operation(NamedTuple):
    """One thing that a forward pass computes."""

    name: str
    inputs: tuple[str, ...]
    """The results that it reads: of earlier operations, or `x` (a block's input; after the blocks, the last one's
    output), `cos`, `sin` and `table` (the output head)."""
    call: Callable[..., Any]
    """(part, side, *inputs) -> result. The part is a block, or the model outside the blocks."""
    scope: str | None
    """The part's module whose parameters it reads; None for none."""
    suspects: suspects.Suspects
    """What to compare a wrong result with."""
    theirs: Callable[..., Any] | None = None
    """What PyTorch runs instead of `call` to show a result inside a whole; it returns None where the whole hides it."""
    is_norm: bool = False
    """Also compared in bfloat16, where the place of a cast shows."""
    is_summed: bool = False
    """A sum over all positions, with the bound of the loss."""


class Operations(NamedTuple):
    """The operations before the blocks, of each block, and after them."""

    start: tuple[Operation, ...]
    layer: tuple[Operation, ...]
    end: tuple[Operation, ...]


@cache  # one object for each shape: the compiled functions of minigpt_bridge/finder/recording.py are kept by it
def operations_of(config: ModelConfig) -> Operations:
    """The operations of a model of this shape."""
    return Operations(_start(), (*_attention(config), *_feed_forward()), _end(config))


def _start() -> tuple[Operation, ...]:
    def angles(part: Any, side: Side) -> Any:  # [2, B, T, 1, H/2]
        options = {"head_dim": part.config.head_dim, "theta": part.config.rope_theta, "dtype": part.dtype}
        return side.library.stack(side.rooms.rotary_angles(side.batch.positions, **options))

    def embed(part: Any, side: Side) -> Any:  # [S, D]
        return jax.numpy.take(part.embed_tokens.embedding[...], side.batch.tokens.reshape(-1), axis=0)

    def their_embed(part: Any, side: Side) -> Any:
        return part.embed_tokens(side.batch.tokens.reshape(-1))

    return (
        Operation("rotary_angles", (), angles, None, suspects.rotary_angles),
        Operation("embed_tokens", (), embed, "embed_tokens", suspects.embedding, their_embed),
    )


# --- A block ---


def _attention(config: ModelConfig) -> tuple[Operation, ...]:
    def heads(part: Any, side: Side, x: Any) -> Any:  # [S, N*H] or [B, T, N, H] -> [B, T, N, H]
        return x.reshape(*side.batch.tokens.shape, -1, part.self_attn.head_dim)

    def norm(name: str, source: str) -> Operation:
        def call(part: Any, side: Side, x: Any) -> Any:
            return getattr(part.self_attn, name)(heads(part, side, x))

        return Operation(name, (source,), call, f"self_attn.{name}", suspects.norm, is_norm=True)

    def rotate(name: str, source: str) -> Operation:
        def call(part: Any, side: Side, x: Any, cos: Any, sin: Any) -> Any:
            return side.rooms.rotate(heads(part, side, x), cos, sin)

        return Operation(name, (source, "cos", "sin"), call, None, suspects.rotation)

    def attend(part: Any, side: Side, query: Any, key: Any, value: Any) -> Any:
        options = {"segment_ids": side.batch.segment_ids, "kernel": part.self_attn.kernel}
        return side.rooms.attention(query, key, heads(part, side, value), **options)

    def whole(part: Any, side: Side, x: Any, cos: Any, sin: Any) -> Any:
        return part.self_attn(x, segment_ids=side.batch.segment_ids, cos=cos, sin=sin)

    query, key = ("q_norm", "k_norm") if config.qk_norm else ("q_proj", "k_proj")
    norms = (norm("q_norm", "q_proj"), norm("k_norm", "k_proj")) if config.qk_norm else ()
    return (
        _layer_norm("input_layernorm", "x"),
        *(_linear("self_attn", name, "input_layernorm") for name in ("q_proj", "k_proj", "v_proj")),
        *norms,
        rotate("q_rotate", query),
        rotate("k_rotate", key),
        Operation("attention", ("q_rotate", "k_rotate", "v_proj"), attend, None, suspects.attention),
        _linear("self_attn", "o_proj", "attention"),
        Operation("self_attn", ("input_layernorm", "cos", "sin"), whole, "self_attn", suspects.self_attention),
    )


def _feed_forward() -> tuple[Operation, ...]:
    def block(part: Any, side: Side, x: Any, cos: Any, sin: Any) -> Any:
        return part(x, segment_ids=side.batch.segment_ids, cos=cos, sin=sin, **side.no_dropout)

    def residual(part: Any, side: Side, x: Any, cos: Any, sin: Any) -> Any:
        options = {"segment_ids": side.batch.segment_ids, "cos": cos, "sin": sin}
        return x + part.self_attn(part.input_layernorm(x), **options)

    def shown_residual(part: Any, side: Side, *inputs: Any) -> Any:
        return input_of(part.post_attention_layernorm, lambda: block(part, side, *inputs))

    def product(part: Any, side: Side, x: Any) -> Any:
        return jax.nn.silu(part.mlp.gate_proj(x)) * part.mlp.up_proj(x)

    def mlp(part: Any, side: Side, x: Any) -> Any:
        return part.mlp(x)

    def shown_product(part: Any, side: Side, x: Any) -> Any:
        return input_of(part.mlp.down_proj, lambda: mlp(part, side, x))

    inside, whole = ("post_attention_layernorm",), ("x", "cos", "sin")
    return (
        Operation("attention_residual", whole, residual, "", suspects.attention_residual, shown_residual),
        _layer_norm("post_attention_layernorm", "attention_residual"),
        _linear("mlp", "gate_proj", *inside),
        _linear("mlp", "up_proj", *inside),
        Operation("silu_product", inside, product, "mlp", suspects.silu_product, shown_product),
        _linear("mlp", "down_proj", "silu_product"),
        Operation("mlp", inside, mlp, "mlp", suspects.feed_forward),
        Operation("block", whole, block, "", suspects.block),
    )


def _layer_norm(name: str, source: str) -> Operation:
    def call(part: Any, side: Side, x: Any) -> Any:
        return getattr(part, name)(x)

    return Operation(name, (source,), call, name, suspects.norm, is_norm=True)


def _linear(room: str, name: str, source: str) -> Operation:
    def call(part: Any, side: Side, x: Any) -> Any:
        return getattr(getattr(part, room), name)(x.reshape(math.prod(side.batch.tokens.shape), -1))

    return Operation(name, (source,), call, f"{room}.{name}", suspects.linear)


# --- After the blocks ---


def _end(config: ModelConfig) -> tuple[Operation, ...]:
    def head(part: Any, side: Side, hidden: Any) -> Any:  # [S, D] -> [S, V]
        return part.logits(hidden)

    def loss(part: Any, side: Side, hidden: Any, table: Any) -> Any:
        batch = side.batch
        return side.objective.next_token_loss(hidden, table, batch.targets.reshape(-1), batch.loss_weights.reshape(-1))

    def model(part: Any, side: Side) -> Any:
        batch = side.batch
        return part(batch.tokens, segment_ids=batch.segment_ids, positions=batch.positions)

    table = "embed_tokens" if config.tie_word_embeddings else "lm_head"
    return (
        Operation("norm", ("x",), lambda part, side, x: part.norm(x), "norm", suspects.norm, is_norm=True),
        Operation("head", ("norm",), head, table, suspects.none),
        Operation("loss", ("norm", "table"), loss, None, suspects.loss, is_summed=True),
        Operation("model", (), model, None, suspects.none),
    )
