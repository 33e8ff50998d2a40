"""The proof, level by level: parts of the model, logits, loss, every gradient, every parameter and optimizer slot.

Both sides get the same weights and the same batches. The parts of a block are fed JAX's own inputs, so an error of one
does not show in the next; the stream of a layer is not, and shows how errors grow.

B batch  T time  S = B*T positions  D hidden
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from minigpt_bridge.bounds import BOUNDS
from minigpt_jax import model as jax_rooms
from minigpt_jax import train_step as jax_steps
from minigpt_jax.config import ModelConfig, TrainConfig
from minigpt_jax.engine import trees_of as jax_trees
from minigpt_jax.formats.names import Parameters, flatten
from minigpt_torch import model as torch_rooms
from minigpt_torch import train_step as torch_steps
from minigpt_torch.engine import trees_of as torch_trees
from minigpt_torch.weights import as_tree, make_model

Precision = Literal["float64", "float32"]
Arrays = tuple[np.ndarray, ...]

UPDATES = (1, 2, 10)
"""Updates after which everything is compared."""


@dataclass(frozen=True)
class Row:
    """One tensor on both sides."""

    level: str
    """sub-module, stream, logits, loss, gradient, or update N."""
    name: str
    max_abs: float
    """Largest absolute difference."""
    relative: float
    """The same over max(1, the largest of PyTorch's)."""
    ulp: float
    """The same in units in the last place of PyTorch's largest element."""
    cosine: float
    """Of the angle between the two as vectors; 1 where both are zero."""
    bound: float
    """For `relative`."""

    @property
    def ok(self) -> bool:
        """Whether the bound holds."""
        return self.relative <= self.bound


def compare(config: ModelConfig, parameters: Parameters, *, precision: Precision, rows: int, time: int) -> list[Row]:
    """Every row of the proof for one model.

    Args:
        config: the model's shape.
        parameters: its weights, a NumPy tree.
        precision: of parameters and computation.
        rows: of the random batches, which have segments of unlike length and ragged weights.
        time: tokens of a row.
    """
    with jax.enable_x64(precision == "float64"):
        cast = jax.tree.map(lambda leaf: np.asarray(leaf, precision), parameters)
        batches = [random_batch(config, seed=seed, rows=rows, time=time) for seed in range(2 * max(UPDATES))]
        both = _Both(config, cast, precision)
        return [*both.parts(batches[0]), *both.whole(batches[0]), *both.training(batches)]


def random_batch(config: ModelConfig, *, seed: int, rows: int, time: int) -> Arrays:
    """Five [B, T] arrays: tokens, targets, loss_weights, segment_ids, positions that restart with each segment."""
    rng = np.random.default_rng(seed)
    starts = rng.random((rows, time)) < 0.1
    index = np.arange(time)
    began = np.maximum.accumulate(np.where(starts, index, 0), axis=1)
    tokens, targets = rng.integers(0, config.vocab_size, (2, rows, time), dtype=np.int32)
    weights = (rng.random((rows, time)) < rng.uniform(0.2, 1)).astype(np.float32)
    segments = np.cumsum(starts, axis=1).astype(np.int32) + 1
    return tokens, targets, weights, segments, (index - began).astype(np.int32)


class _Both:
    """One model in both frameworks."""

    def __init__(self, config: ModelConfig, parameters: Parameters, precision: Precision):
        self.config, self.parameters, self.precision = config, parameters, precision
        self.bounds = BOUNDS[precision]
        self.graph = jax_rooms.model_graph(config, dtype=jnp.dtype(precision), kernel="blocked")
        self.on_device = jax.tree.map(jnp.asarray, parameters)

    def twin(self) -> torch_rooms.Transformer:
        """A PyTorch model of its own."""
        return make_model(self.config, self.parameters, dtype=getattr(torch, self.precision))

    @torch.no_grad()
    def parts(self, arrays: Arrays) -> Iterator[Row]:
        """Each part of each block on JAX's input, and the stream after each block on each side's own."""
        ours, theirs = nnx.merge(self.graph, self.on_device), self.twin()
        ours_batch, their_batch = _jax_batch(arrays), torch_steps.batch_tensors(arrays)
        options, their_options = self._options(ours_batch, their_batch)
        no_dropout: dict[str, Any] = {"dropout_rate": 0.0}
        stream = jnp.take(ours.embed_tokens.embedding[...], ours_batch.tokens.reshape(-1), axis=0)
        their_stream = theirs.embed_tokens(their_batch.tokens.reshape(-1))
        bound = self.bounds.sub_module
        for number, (layer, their_layer) in enumerate(zip(ours.layers, theirs.layers, strict=True)):
            same = torch.from_numpy(np.array(stream))
            for name, extra, their_extra in (
                ("input_layernorm", {}, {}),
                ("self_attn", options, their_options),
                ("mlp", {}, {}),
                (
                    "block",
                    options | no_dropout | {"dropout_keys": (None, None)},
                    their_options | no_dropout | {"dropout_masks": (None, None)},
                ),
            ):
                part, their_part = (
                    (layer, their_layer) if name == "block" else (getattr(layer, name), getattr(their_layer, name))
                )
                result, their_result = part(stream, **extra), their_part(same, **their_extra)
                yield _row("sub-module", f"layers.{number}.{name}", result, their_result, bound)
            stream = result
            their_stream = their_layer(their_stream, **their_options, **no_dropout, dropout_masks=(None, None))
            yield _row("stream", f"layers.{number}", stream, their_stream, bound)
        yield _row("sub-module", "norm", ours.norm(stream), theirs.norm(torch.from_numpy(np.array(stream))), bound)

    def _options(self, ours: Any, theirs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        head_dim, theta = self.config.head_dim, self.config.rope_theta
        cos, sin = jax_rooms.rotary_angles(
            ours.positions, head_dim=head_dim, theta=theta, dtype=jnp.dtype(self.precision)
        )
        their_cos, their_sin = torch_rooms.rotary_angles(
            theirs.positions, head_dim=head_dim, theta=theta, dtype=getattr(torch, self.precision)
        )
        return (
            {"segment_ids": ours.segment_ids, "cos": cos, "sin": sin},
            {"segment_ids": theirs.segment_ids, "cos": their_cos, "sin": their_sin},
        )

    def whole(self, arrays: Arrays) -> Iterator[Row]:
        """Logits, loss and every gradient."""
        ours, theirs = _jax_batch(arrays), torch_steps.batch_tensors(arrays)
        twin = self.twin()
        logits = jax.jit(lambda tree: _logits(nnx.merge(self.graph, tree), ours))(self.on_device)
        yield _row("logits", "logits", logits, _logits(twin, theirs), self.bounds.sub_module)
        loss, gradients = jax.jit(jax.value_and_grad(lambda tree: jax_steps.summed_loss(self.graph, tree, ours)))(
            self.on_device
        )
        their_loss = torch_steps.summed_loss(twin, theirs)
        named = dict(twin.named_parameters())
        their_gradients = dict(zip(named, torch.autograd.grad(their_loss, list(named.values())), strict=True))
        tokens = max(float(arrays[2].sum()), 1.0)
        yield _row("loss", "mean loss", loss / tokens, their_loss / tokens, self.bounds.gradient)
        flat = flatten(as_tree(their_gradients, self.config))
        for path, gradient in flatten(gradients).items():
            # Of the mean loss: what training uses.
            yield _row("gradient", path, np.asarray(gradient) / tokens, flat[path] / tokens, self.bounds.gradient)

    def training(self, batches: list[Arrays]) -> Iterator[Row]:
        """Every parameter and slot after updates with accumulation, warm-up, clipping and decay."""
        train = TrainConfig(
            learning_rate=1e-3, warmup_steps=5, accumulation_steps=2, grad_clip=0.5, dtype=self.precision
        )
        total = max(UPDATES)
        step = jax_steps.make_train_step(self.graph, train, total_updates=total)
        # The step gives its state's buffers away; the parameters are still needed.
        state = jax_steps.init_state(jax.tree.map(jnp.copy, self.on_device), train, total_updates=total)
        theirs = torch_steps.init_state(self.twin(), train)
        key = jax.random.key(0)
        for number, arrays in enumerate(batches):
            state, _ = step(state, _jax_batch(arrays), key)
            torch_steps.train_step(theirs, torch_steps.batch_tensors(arrays), train, total_updates=total)
            updates = (number + 1) // 2
            if number % 2 and updates in UPDATES:
                bound = self.bounds.update if updates == 1 else self.bounds.trajectory
                flat = flatten(torch_trees(theirs))
                for path, leaf in flatten(jax.device_get(jax_trees(state))).items():
                    yield _row(f"update {updates}", path, leaf, flat[path], bound)


def _logits(model: Any, batch: Any) -> Any:
    return model.logits(model(batch.tokens, segment_ids=batch.segment_ids, positions=batch.positions))


def _jax_batch(arrays: Arrays) -> jax_steps.BatchArrays:
    return jax_steps.BatchArrays(*map(jnp.asarray, arrays))


def _row(level: str, name: str, ours: Any, theirs: Any, bound: float) -> Row:
    theirs = theirs.detach().numpy() if isinstance(theirs, torch.Tensor) else np.asarray(theirs)
    precision = theirs.dtype if theirs.dtype.kind == "f" else np.dtype(np.float64)
    a, b = np.asarray(ours, np.float64).ravel(), np.asarray(theirs, np.float64).ravel()
    difference, largest = float(np.abs(a - b).max()), float(np.abs(b).max())
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    return Row(
        level,
        name,
        max_abs=difference,
        relative=difference / max(1.0, largest),
        ulp=difference / float(np.spacing(precision.type(largest))),
        cosine=float(a @ b) / lengths if lengths else float(np.array_equal(a, b)),
        bound=bound,
    )
