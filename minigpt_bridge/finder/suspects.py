"""Wrong variants of the forward operations, each with its description, to name the cause of a divergence.

A suspect is a pair (description, what the operation would then give), computed in NumPy from JAX's own inputs. Numbers
that a mistake could have put in (an eps, a base) are first estimated from PyTorch's result and rounded to six digits:
a wrong guess does not reproduce it.

B batch  T time (queries)  S time (keys), or positions  D hidden  N query heads  K kv heads  H head size
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from minigpt_bridge.bounds import relative_error
from minigpt_bridge.finder import numpy_variants as rooms
from minigpt_bridge.finder.divergence import UNKNOWN, only
from minigpt_jax.config import ModelConfig


@dataclass(frozen=True)
class Case:
    """An operation whose result is over its bound."""

    config: ModelConfig
    name: str
    place: str
    """Where the operation's part stands in the parameter tree: "layers.1." or ""."""
    scope: str | None
    parameters: dict[str, np.ndarray]
    """JAX's, of the whole model, by path."""
    inputs: tuple[np.ndarray, ...]
    tape: dict[str, np.ndarray]
    """JAX's results around the operation, by name."""
    batch: Any
    """Five [B, T] arrays by name."""
    ours: np.ndarray
    theirs: np.ndarray
    bound: float

    def parameter(self, path: str) -> np.ndarray:
        """A parameter by its path inside the part."""
        return self.parameters[f"{self.place}{path}"]


Suspect = tuple[str, np.ndarray]
Suspects = Callable[[Case], Iterator[Suspect]]


def cause_of(case: Case, suspects: Suspects) -> str:
    """The description of the one variant that gives what PyTorch gave."""
    if case.ours.shape != case.theirs.shape:
        return f"its shape is {case.theirs.shape}, not {case.ours.shape}"
    with np.errstate(all="ignore"):
        own = [text for text, result in suspects(case) if _explains(case, result)]
        return only(own or [text for text, result in _any_operation(case) if _explains(case, result)])


def _explains(case: Case, result: np.ndarray) -> bool:
    """Whether a variant gives PyTorch's result; what the variant leaves open (NaN) may be anything."""
    known = ~np.isnan(result)
    if result.shape != case.theirs.shape or not known.any():
        return False
    return relative_error(result[known], case.theirs[known]) <= case.bound


def rounded(value: float) -> float:
    """An estimate to six digits: the number that somebody wrote."""
    return float(f"{value:.6g}") if math.isfinite(value) and abs(value) > 1e-13 else 0.0


def gradient_cause(name: str, compared: Mapping[str, tuple[np.ndarray, np.ndarray]], bound: float) -> str:
    """Why a gradient differs while everything forward agrees.

    Args:
        name: what the wrong gradient is by.
        compared: (JAX's, PyTorch's) gradients of the same operation, by name.
        bound: what rounding explains.
    """
    ours, theirs = compared[name]
    if ours.shape != theirs.shape:
        return UNKNOWN
    if not ours.any():
        return "a stray bias is added" if name.endswith("bias") else f"{name} should have no gradient"
    # A parameter that JAX does not have, and that gets what is missing here, is a copy of this one.
    copies = [
        other
        for other, (expected, found) in compared.items()
        if not expected.any() and found.shape == ours.shape and relative_error(ours, theirs + found) <= bound
    ]
    if copies:
        return f"{' and '.join(copies)} is not tied to {name} but a separate copy: its gradient is missing there"
    if not theirs.any():
        return f"no gradient arrives at {name}"
    factor = rounded(float(np.vdot(ours, theirs) / np.vdot(ours, ours)))
    if relative_error(factor * ours, theirs) <= bound:
        return f"the gradient by {name} is multiplied by {factor:g}"
    return UNKNOWN


# --- Any operation ---


def none(case: Case) -> Iterator[Suspect]:
    """No variants but those of any operation."""
    return iter(())


def embedding(case: Case) -> Iterator[Suspect]:
    """The look-up with a scale."""
    yield "it is multiplied by the root of the hidden size", case.ours * math.sqrt(case.config.hidden_size)


def _any_operation(case: Case) -> Iterator[Suspect]:
    ours, theirs = case.ours, case.theirs
    yield "its result is zero", np.zeros_like(ours)
    factor = rounded(float(np.vdot(ours, theirs) / np.vdot(ours, ours)))
    if factor not in (0.0, 1.0):
        yield f"its result is multiplied by {factor:g}", factor * ours
    offset = rounded(float(np.median(theirs - ours)))
    if offset and ours.ndim:
        yield f"{offset:g} is added to its result", ours + offset
    if case.inputs and case.inputs[0].size == ours.size:
        yield "it returns its input as it is", case.inputs[0].reshape(ours.shape)
    if relative_error(ours, theirs) < 1e-5 and np.array_equal(theirs, theirs.astype(np.float32)):
        yield "its result is rounded to float32", theirs


# --- Norm and linear ---


def norm(case: Case) -> Iterator[Suspect]:
    """RMSNorm with another eps, mean or weight."""
    x, weight = case.inputs[0].reshape(case.ours.shape), case.parameter(f"{case.scope}.weight")
    mean_square, right = np.mean(x * x, axis=-1, keepdims=True), case.config.rms_norm_eps
    eps = rounded(float(np.nanmedian((weight * x / case.theirs) ** 2 - mean_square)))
    if eps != right:
        yield f"eps is {eps:g} instead of {right:g}", rooms.norm(x, weight, eps)
    yield "eps is added outside the root", x / (np.sqrt(mean_square) + right) * weight
    yield "the mean is subtracted, as in LayerNorm", rooms.norm(x - x.mean(-1, keepdims=True), weight, right)
    yield "the weight is not applied", rooms.norm(x, np.ones_like(weight), right)
    yield "the weight is applied as 1 + weight", rooms.norm(x, 1 + weight, right)
    yield "squares are summed instead of averaged", x / np.sqrt(mean_square * weight.size + right) * weight


def norm_in_bfloat16(x: np.ndarray, weight: np.ndarray, eps: float, *, before_cast: bool) -> Iterator[Suspect]:
    """RMSNorm with bfloat16 input and float32 weight: the casts in other places; results as float32.

    Args:
        x: the input, in bfloat16.
        weight: in float32.
        eps: of the norm.
        before_cast: whether the weight is rightly multiplied before the cast back.
    """
    sides = ("before", "after") if before_cast else ("after", "before")
    yield (
        f"the weight is multiplied {sides[1]} the cast back instead of {sides[0]} it",
        rooms.cast_norm(x, weight, eps, before_cast=not before_cast),
    )
    yield "it computes in bfloat16 throughout", rooms.low_norm(x, weight, eps)


def linear(case: Case) -> Iterator[Suspect]:
    """A product with a bias, or with another weight."""
    own = f"{case.place}{case.scope}.kernel"
    kernel = case.parameters[own]
    x = case.inputs[0].reshape(-1, kernel.shape[0])
    if len(x) > 1:
        yield "a stray bias is added", case.ours + np.mean(case.theirs - case.ours, axis=0)
    if kernel.shape[0] == kernel.shape[1]:
        yield "its weight is transposed", x @ kernel.T
    for path, other in case.parameters.items():
        if path != own and path.endswith(".kernel") and other.shape == kernel.shape:
            room, _, name = path.removeprefix(case.place).removesuffix(".kernel").rpartition(".")
            same_room = f"{room}.{case.name}" == case.scope
            yield f"it is swapped with {name if same_room else path.removesuffix('.kernel')}", x @ other


# --- Rotation ---


def rotary_angles(case: Case) -> Iterator[Suspect]:
    """Angles by another base, from other positions, or with sine and cosine mixed up."""
    cos, sin = case.ours
    yield "the rotation's sine has the wrong sign", np.stack([cos, -sin])
    yield rooms.EXCHANGED, np.stack([sin, cos])
    head_dim, positions = case.config.head_dim, np.asarray(case.batch.positions)
    ones = np.nonzero(positions == 1)
    if head_dim >= 4 and ones[0].size:
        theirs = case.theirs[:, ones[0][0], ones[1][0], 0, 1]
        theta = rounded(float(np.arctan2(theirs[1], theirs[0]) ** (-head_dim / 2)))
        if theta not in (0.0, case.config.rope_theta):
            yield f"theta is {theta:g} instead of {case.config.rope_theta:g}", _angles(case, positions, theta)
    for text, wrong in (
        ("positions are counted from 1", positions + 1),
        ("positions do not restart with each segment", np.broadcast_to(np.arange(positions.shape[1]), positions.shape)),
    ):
        yield text, _angles(case, wrong, case.config.rope_theta)


def _angles(case: Case, positions: np.ndarray, theta: float) -> np.ndarray:
    frequencies = theta ** (-np.arange(0, case.config.head_dim, 2) / case.config.head_dim)
    angles = positions[:, :, None, None] * frequencies
    return np.stack([np.cos(angles), np.sin(angles)])


def rotation(case: Case) -> Iterator[Suspect]:
    """Other turns of the pairs, or other pairs."""
    x, cos, sin = case.inputs
    for text, rotate in rooms.ROTATIONS.items():
        yield text, rotate(x.reshape(case.ours.shape), cos, sin)


# --- Attention ---


def attention(case: Case) -> Iterator[Suspect]:
    """Another mask, scale or sharing of kv heads."""
    query, key, value = case.inputs
    for text, wrong in rooms.ATTENTIONS.items():
        yield text, rooms.attention(query, key, value.reshape(key.shape), case.batch.segment_ids, **wrong)


def self_attention(case: Case) -> Iterator[Suspect]:
    """The sub-layer with one wrong part."""
    x, cos, sin = case.inputs
    segments, tape = np.asarray(case.batch.segment_ids), case.tape
    query_name, key_name = ("q_norm", "k_norm") if case.config.qk_norm else ("q_proj", "k_proj")

    def heads(name: str) -> np.ndarray:
        return tape[name].reshape(*segments.shape, -1, case.config.head_dim)

    def finish(query: np.ndarray, key: np.ndarray, **wrong: Any) -> np.ndarray:
        context = rooms.attention(query, key, heads("v_proj"), segments, **wrong)
        return context.reshape(len(x), -1) @ case.parameter("self_attn.o_proj.kernel")

    query, key = heads(query_name), heads(key_name)
    turned = heads("q_rotate"), heads("k_rotate")
    for text, rotate in rooms.ROTATIONS.items():
        # Scores see differences of angles alone: those of this one are those of the wrong sign.
        if text != rooms.EXCHANGED:
            yield text, finish(rotate(query, cos, sin), rotate(key, cos, sin))
    yield "queries and keys are not rotated", finish(query, key)
    yield "queries are not rotated", finish(query, turned[1])
    yield "keys are not rotated", finish(turned[0], key)
    for text, wrong in rooms.ATTENTIONS.items():
        yield text, finish(*turned, **wrong)
    yield "the output projection is left out", heads("attention").reshape(len(x), -1)
    if case.config.qk_norm:
        plain = [rooms.rotate(heads(name), cos, sin) for name in ("q_proj", "k_proj")]
        yield "queries and keys are not normalized", finish(*plain)
        weights = [case.parameter(f"self_attn.{name}.weight") for name in ("q_norm", "k_norm")]
        after = [rooms.norm(x, w, case.config.rms_norm_eps) for x, w in zip(plain, weights, strict=True)]
        yield "queries and keys are normalized after the rotation", finish(*after)


def attention_residual(case: Case) -> Iterator[Suspect]:
    """The first half of a block with another residual."""
    yield "the attention's residual is not added", case.tape["self_attn"]
    yield "the residual is taken after the norm", case.tape["input_layernorm"] + case.tape["self_attn"]


# --- Feed-forward, block, loss ---


def silu_product(case: Case) -> Iterator[Suspect]:
    """Another activation, or the two branches exchanged."""
    gate, up = case.tape["gate_proj"], case.tape["up_proj"]
    yield "gate and up are swapped", rooms.silu(up) * gate
    for text, activation in rooms.ACTIVATIONS.items():
        yield text, activation(gate) * up


def feed_forward(case: Case) -> Iterator[Suspect]:
    """The sub-layer with another product inside."""
    down = case.parameter("mlp.down_proj.kernel")
    for text, product in silu_product(case):
        yield text, product @ down


def block(case: Case) -> Iterator[Suspect]:
    """The second half of a block with another residual."""
    tape = case.tape
    yield "the feed-forward's residual is not added", tape["mlp"]
    yield "the feed-forward's residual is the block's input", tape["x"] + tape["mlp"]
    yield "the residual is taken after the norm", tape["post_attention_layernorm"] + tape["mlp"]


def loss(case: Case) -> Iterator[Suspect]:
    """The loss with other weights or targets, or divided."""
    hidden, table = case.inputs
    logits = hidden @ table.T
    top = logits.max(-1, keepdims=True)
    log_probabilities = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    targets, weights = (np.asarray(a).reshape(-1) for a in (case.batch.targets, case.batch.loss_weights))
    losses = -log_probabilities[np.arange(len(targets)), targets]
    yield "the loss is divided by its supervised tokens", np.sum(weights * losses) / weights.sum()
    yield "the loss is divided by all positions", np.sum(weights * losses) / weights.size
    yield "the loss weights are not applied", np.sum(losses)
    tokens = np.asarray(case.batch.tokens).reshape(-1)
    for text, wrong in (("the tokens themselves", tokens), ("the targets one further", np.roll(targets, -1))):
        found = -log_probabilities[np.arange(len(wrong)), wrong]
        yield f"its targets are {text}", np.sum(weights * found)
