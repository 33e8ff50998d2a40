"""The one table of names: where a tensor stands in our parameter tree, and what the rest of the world calls it.

Framework-free. The other names are those of MiniMind's and Hugging Face's Llama and Qwen3. A linear layer's kernel is
[in, out] in the tree and [out, in] there; everything else has the same layout.

D hidden  F ffn  V vocabulary  N query heads  K kv heads  H head size
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minigpt_jax.config import ModelConfig
from minigpt_jax.errors import UserError

Parameters = dict[str, Any]
"""Nested dicts of arrays, as minigpt_jax/initialization.py makes them; the blocks of `layers` are keyed by number."""
Tensors = dict[str, np.ndarray]
"""Arrays by their outside name, in the outside layout."""

MOST_PROBLEMS = 6
"""How many of a file's faults an error lists."""

_WRAPPERS = re.compile(r"^(?:module\.|_orig_mod\.)+")
"""What DistributedDataParallel and torch.compile put before every name."""

_DERIVED = re.compile(r"(?:^|\.)(?:freqs_cos|freqs_sin|freqs_cis|pos_cis|rotary_emb\.inv_freq)$")
"""Tables that some checkpoints carry and every model computes for itself."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a model."""

    path: str
    """In our tree, with dots between the keys."""
    name: str
    """Outside."""
    shape: tuple[int, ...]
    """In our tree."""
    is_kernel: bool
    """A linear layer's: transposed outside."""

    @property
    def outside_shape(self) -> tuple[int, ...]:
        """The shape under the outside name."""
        return self.shape[::-1] if self.is_kernel else self.shape


def table(config: ModelConfig) -> list[Entry]:
    """Every tensor of a model of this shape, in the order of the forward pass."""
    hidden, ffn, vocabulary = config.hidden_size, config.intermediate_size, config.vocab_size
    query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def norm(place: str, size: int) -> Entry:
        return Entry(f"{place}.weight", f"model.{place}.weight", (size,), is_kernel=False)

    def kernel(place: str, fan_in: int, fan_out: int, prefix: str = "model.") -> Entry:
        return Entry(f"{place}.kernel", f"{prefix}{place}.weight", (fan_in, fan_out), is_kernel=True)

    def block(place: str) -> Iterator[Entry]:
        yield norm(f"{place}.input_layernorm", hidden)
        yield kernel(f"{place}.self_attn.q_proj", hidden, query_size)
        yield kernel(f"{place}.self_attn.k_proj", hidden, kv_size)
        yield kernel(f"{place}.self_attn.v_proj", hidden, kv_size)
        if config.qk_norm:
            yield norm(f"{place}.self_attn.q_norm", config.head_dim)
            yield norm(f"{place}.self_attn.k_norm", config.head_dim)
        yield kernel(f"{place}.self_attn.o_proj", query_size, hidden)
        yield norm(f"{place}.post_attention_layernorm", hidden)
        yield kernel(f"{place}.mlp.gate_proj", hidden, ffn)
        yield kernel(f"{place}.mlp.up_proj", hidden, ffn)
        yield kernel(f"{place}.mlp.down_proj", ffn, hidden)

    entries = [Entry("embed_tokens.embedding", "model.embed_tokens.weight", (vocabulary, hidden), is_kernel=False)]
    for number in range(config.num_layers):
        entries += block(f"layers.{number}")
    entries.append(norm("norm", hidden))
    # A tied head is the embedding: one tensor, in the tree and outside.
    return entries if config.tie_word_embeddings else [*entries, kernel("lm_head", hidden, vocabulary, prefix="")]


# --- Between tree and outside ---


def to_outside(parameters: Parameters, config: ModelConfig) -> Tensors:
    """The tree's arrays by their outside names, contiguous in the outside layout; dtypes stay.

    Args:
        parameters: a tree of the shape of `config`: parameters, or anything with one array for each (moments).
        config: the model's shape.

    Raises:
        KeyError: the tree lacks a tensor of the table.
    """
    leaves = flatten(parameters)
    return {
        entry.name: np.ascontiguousarray(leaves[entry.path].T if entry.is_kernel else leaves[entry.path])
        for entry in table(config)
    }


def from_outside(tensors: Mapping[str, np.ndarray], config: ModelConfig, *, where: str) -> Parameters:
    """The tree from arrays by their outside names; dtypes stay.

    Args:
        tensors: as `to_outside` gives them; wrappers' prefixes and tables that a model computes are ignored. Under
            tied embeddings a head that equals the embedding is left out.
        config: the model's shape.
        where: the file, named in errors.

    Raises:
        UserError: one line with everything that is missing, unexpected or of another shape.
    """
    found = unwrapped(tensors, where=where)
    entries = table(config)
    problems: list[str] = []
    if config.tie_word_embeddings and "lm_head.weight" in found:
        head, embedding = found.pop("lm_head.weight"), found.get("model.embed_tokens.weight")
        if embedding is not None and not np.array_equal(head, embedding):
            problems.append("lm_head.weight differs from model.embed_tokens.weight, which the config ties")
    require_fit(found, {entry.name: entry.outside_shape for entry in entries}, where=where, problems=problems)
    return unflatten(
        {
            entry.path: np.ascontiguousarray(found[entry.name].T if entry.is_kernel else found[entry.name])
            for entry in entries
        }
    )


def require_fit(
    found: Mapping[str, np.ndarray],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    where: str,
    what: str = "its config",
    problems: Sequence[str] = (),
) -> None:
    """Refuse arrays that are not exactly those of `shapes`.

    Args:
        found: arrays by name.
        shapes: of a model's tensors, by the same names.
        where: the file, named in the error.
        what: whose shapes these are.
        problems: what else is wrong with it.

    Raises:
        UserError: one line with everything that is wrong, missing, unexpected or of another shape.
    """
    everything = [
        *problems,
        *(f"{name} is missing" for name in shapes if name not in found),
        *(f"{name} is unexpected" for name in found if name not in shapes),
        *(
            f"{name} is {list(found[name].shape)}, not {list(shape)}"
            for name, shape in shapes.items()
            if name in found and found[name].shape != shape
        ),
    ]
    if everything:
        more = f"; and {len(everything) - MOST_PROBLEMS} more" if len(everything) > MOST_PROBLEMS else ""
        raise UserError(f"{where} does not fit {what}: {'; '.join(everything[:MOST_PROBLEMS])}{more}")


def require_sound(tensors: Mapping[str, np.ndarray], *, where: str) -> None:
    """Refuse what is no weight: integers, complex numbers, NaN and infinity.

    Raises:
        UserError: with the first such tensor.
    """
    for name, tensor in tensors.items():
        # NumPy knows bfloat16 through ml_dtypes, and as no kind of its own.
        if tensor.dtype.kind != "f" and tensor.dtype.name != "bfloat16":
            raise UserError(f"{where}: {name} is {tensor.dtype}; weights are float32, float64, float16 or bfloat16")
        if not np.isfinite(tensor).all():
            raise UserError(
                f"{where}: {name} holds values that are not finite; it is damaged, or its training diverged"
            )


def unwrapped(tensors: Mapping[str, np.ndarray], *, where: str) -> Tensors:
    """`tensors` without wrappers' prefixes and without tables that every model computes for itself.

    Raises:
        UserError: two names are the same without their prefixes.
    """
    found: Tensors = {}
    for name, tensor in tensors.items():
        if _DERIVED.search(name) is None:
            short = _WRAPPERS.sub("", name)
            if short in found:
                raise UserError(f"{where} holds {short} twice, with and without a wrapper's prefix")
            found[short] = tensor
    return found


def is_tied(tensors: Mapping[str, np.ndarray]) -> bool:
    """Whether these unwrapped tensors have one table for embedding and head: no head, or an equal one."""
    head = tensors.get("lm_head.weight")
    return head is None or np.array_equal(head, tensors.get("model.embed_tokens.weight", np.empty(0)))


# --- Nested and flat ---


def map_leaves(function: Callable[[Any], Any], tree: Mapping[Any, Any]) -> dict[Any, Any]:
    """The same nested tree with `function` of every leaf."""
    return {
        key: map_leaves(function, value) if isinstance(value, Mapping) else function(value)
        for key, value in tree.items()
    }


def flatten(tree: Mapping[Any, Any], *, prefix: str = "") -> dict[str, Any]:
    """A nested tree as one dict; the keys are joined by dots."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        leaves |= flatten(value, prefix=f"{path}.") if isinstance(value, Mapping) else {path: value}
    return leaves


def digest(tree: Mapping[Any, Any]) -> str:
    """SHA-256 over every array of a tree and its path."""
    total = hashlib.sha256()
    for path, leaf in sorted(flatten(tree).items()):
        total.update(f"{path} {leaf.dtype} {leaf.shape}".encode())
        total.update(np.ascontiguousarray(leaf).tobytes())
    return total.hexdigest()


def unflatten(leaves: Mapping[str, Any]) -> dict[Any, Any]:
    """The nested tree of `flatten`; a key of digits is a number."""
    tree: dict[Any, Any] = {}
    for path, leaf in leaves.items():
        *parents, last = [int(key) if key.isdigit() else key for key in path.split(".")]
        place = tree
        for key in parents:
            place = place.setdefault(key, {})
        place[last] = leaf
    return tree
