"""The proof, level by level: parts of the model, logits, loss, every gradient, every parameter and optimizer slot.

Both sides get the same weights and the same batches. A part of the model is given what it gets in JAX, so an error of
one does not show in the next; the stream of a layer is not, and shows how errors grow. "optimizer" is one update by
given gradients, "update N" what whole training steps leave. Below float64 a third side computes the same in float64
(PyTorch again) and says how far each of the two is from the truth.

B batch  T time  S = B*T positions  D hidden
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax
import numpy as np

from minigpt_bridge.bounds import BFLOAT16_RATIO, BOUNDS, relative_error
from minigpt_bridge.sides import Arrays, JaxSide, Precision, Side, TorchSide, Value, stored
from minigpt_jax.config import ModelConfig, TrainConfig
from minigpt_jax.formats.names import Parameters, flatten, unflatten
from minigpt_jax.initialization import initial_parameters

UPDATES = (1, 2, 10)
"""Updates after which everything is compared."""

BFLOAT16_BATCHES = 8
"""In bfloat16 the error of one small tensor on one batch is mostly chance; it is taken over this many."""


COMPARED_TRAINING = TrainConfig(learning_rate=1e-3, warmup_steps=5, accumulation_steps=2, grad_clip=0.5)
"""The training that is compared: accumulation, warm-up, clipping and decay all act in it."""


@dataclass(frozen=True)
class Row:
    """One tensor on both sides."""

    level: str
    """batch, sub-module, stream, logits, loss, gradient, optimizer, trajectory, or update N; or a stage after
    pretraining or "lora merge", whose names begin with one of these, or merge, and a colon."""
    name: str
    max_abs: float
    """Largest absolute difference between JAX and PyTorch."""
    relative: float
    """The same over max(1, the largest of PyTorch's)."""
    ulp: float
    """The same in units in the last place of PyTorch's largest element."""
    cosine: float
    """Of the angle between the two as vectors; 1 where both are zero."""
    bound: float | None
    """For `relative`, in bfloat16 for `ratio`; None where the contract has none."""
    jax_error: float | None = None
    """JAX's distance from the float64 result, measured as `relative`; None in float64."""
    torch_error: float | None = None
    """PyTorch's."""
    squares: tuple[float, float] | None = None
    """Sums of squared distances from the float64 result, JAX's and PyTorch's; in bfloat16 only."""

    @property
    def ratio(self) -> float | None:
        """JAX's root mean square distance from the float64 result over PyTorch's; in bfloat16 only."""
        if self.squares is None:
            return None
        ours, theirs = self.squares
        if theirs == 0:
            return 1.0 if ours == 0 else float("inf")
        return float(np.sqrt(ours / theirs))

    @property
    def share(self) -> float:
        """How much of the bound is used up: 1 is the bound itself, 0 where there is none."""
        measured = self.relative if self.ratio is None else self.ratio
        if self.bound is None:
            return 0.0
        if self.bound == 0:
            return float("inf") if measured else 0.0
        return measured / self.bound

    @property
    def ok(self) -> bool:
        """Whether the bound holds; never for a difference that is not a number."""
        return self.share <= 1


def compare(config: ModelConfig, parameters: Parameters, *, precision: Precision, rows: int, time: int) -> list[Row]:
    """Every row of the proof for one model.

    Args:
        config: the model's shape.
        parameters: its weights, a NumPy tree.
        precision: of the computation, and of the parameters but for bfloat16, whose parameters are float32. There no
            training is compared.
        rows: of the random batches, which have segments of unlike length and ragged weights.
        time: tokens of a row.
    """
    with jax.enable_x64(precision == "float64"):
        start = stored(parameters, precision)
        ours, theirs = JaxSide(config, start, precision), TorchSide(config, start, precision)
        exact = None if precision == "float64" else TorchSide(config, start, "float64")
        table = Table(precision)
        single = BFLOAT16_BATCHES if precision == "bfloat16" else 1
        batches = [random_batch(config, seed=seed, rows=rows, time=time) for seed in range(2 * max(UPDATES))]
        sides: list[Side] = [ours, theirs] if exact is None else [ours, theirs, exact]
        for arrays in batches[:single]:
            inputs = ours.inputs(arrays)
            table.add(*(side.batch(arrays) for side in sides))
            table.add(*(side.parts(arrays, inputs) for side in sides))
            table.add(*(side.streams(arrays) for side in sides))
            table.add(*(side.whole(arrays) for side in sides))
        if precision != "bfloat16":
            train = replace(COMPARED_TRAINING, dtype=precision)
            gradients = {value.name: value.array for value in ours.whole(batches[0]) if value.level == "gradient"}
            table.add(*(side.optimizer(gradients, train) for side in sides))
            table.add(*(side.training(batches, train, UPDATES) for side in sides))
        return list(table.rows.values())


def random_weights(config: ModelConfig) -> Parameters:
    """Initial weights in float64 whose norms are moved from 1: a norm of 1 hides a cast on the wrong side."""
    return moved(
        initial_parameters(config, initializer="scaled_normal", seed=42, dtype="float64"), seed=42, most_axes=1
    )


def moved(start: Parameters, *, seed: int, most_axes: int = 2) -> Parameters:
    """The tree with noise of deviation 0.1 on every array of at most so many axes."""
    rng = np.random.default_rng(seed)
    leaves = flatten(start)
    return unflatten(
        {path: leaf + 0.1 * rng.standard_normal(leaf.shape) * (leaf.ndim <= most_axes) for path, leaf in leaves.items()}
    )


def random_batch(config: ModelConfig, *, seed: int, rows: int, time: int) -> Arrays:
    """Five [B, T] arrays: tokens, targets, loss_weights, segment_ids, positions that restart with each segment."""
    rng = np.random.default_rng(seed)
    starts = rng.random((rows, time)) < 0.1
    index = np.arange(time)
    began = np.maximum.accumulate(np.where(starts, index, 0), axis=1)
    tokens, targets = rng.integers(0, config.vocab_size, (2, rows, time), dtype=np.int32)
    weights = (rng.random((rows, time)) < rng.uniform(0.2, 1)).astype(np.float32)
    weights[0, 0] = 1  # a micro-batch without a supervised token is skipped
    segments = np.cumsum(starts, axis=1).astype(np.int32) + 1
    return tokens, targets, weights, segments, (index - began).astype(np.int32)


class Table:
    """Rows by tensor; a tensor that comes again, with another batch, keeps its worst."""

    def __init__(self, precision: Precision):
        self.precision: Precision = precision
        self.rows: dict[tuple[str, str], Row] = {}

    def add(self, *sides: Iterator[Value]) -> None:
        """Compare what JAX and PyTorch say, tensor by tensor, and both with a third side that is exact, if given."""
        for values in zip(*sides, strict=True):
            self._keep(self._row(*values))

    def _keep(self, row: Row) -> None:
        seen = self.rows.get((row.level, row.name))
        self.rows[row.level, row.name] = row if seen is None else _worse(seen, row)

    def _row(self, ours: Value, theirs: Value, exact: Value | None = None) -> Row:
        assert ours[:2] == theirs[:2], (ours[:2], theirs[:2])
        a, b = np.asarray(ours.array, np.float64).ravel(), np.asarray(theirs.array, np.float64).ravel()
        largest = float(np.abs(b).max())
        lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
        # Losses come as Python floats, and bfloat16 is read as float32.
        spacing = np.spacing(theirs.array.dtype.type(largest)) if theirs.array.dtype.kind == "f" else 1.0
        row = Row(
            ours.level,
            ours.name,
            max_abs=float(np.abs(a - b).max()),
            relative=relative_error(a, b),
            ulp=float(np.abs(a - b).max()) / float(spacing),
            cosine=float(a @ b) / lengths if lengths else float(np.array_equal(a, b)),
            bound=self._bound(ours),
        )
        if exact is None:
            return row
        truth = np.asarray(exact.array, np.float64).ravel()
        row = replace(row, jax_error=relative_error(a, truth), torch_error=relative_error(b, truth))
        if self.precision != "bfloat16" or row.level == "batch":
            return row
        return replace(row, squares=(float(np.sum((a - truth) ** 2)), float(np.sum((b - truth) ** 2))))

    def _bound(self, value: Value) -> float | None:
        level = value.name.partition(":")[0] if ":" in value.name else value.level
        if level == "batch":
            return 0.0
        if self.precision == "bfloat16":
            # One number a batch is chance; the loss of each position and every gradient are bound.
            return None if value.name == "mean loss" else BFLOAT16_RATIO
        bounds = BOUNDS[self.precision]
        if level in ("sub-module", "stream", "logits") or (level == "merge" and self.precision == "float64"):
            return bounds.sub_module
        if level in ("loss", "gradient"):
            return bounds.gradient
        if level in ("optimizer", "update 1"):
            return bounds.update
        # Of a longer training in float32 the contract binds the loss alone. A merged kernel is rounded once more than
        # its parts, so in float32 merging has no bound of its own either.
        return bounds.trajectory if self.precision == "float64" or level == "trajectory" else None


def _worse(one: Row, other: Row) -> Row:
    """The same tensor over both batches."""
    worst = one if one.relative >= other.relative else other
    if one.squares is None or other.squares is None:
        return worst
    return replace(worst, squares=(one.squares[0] + other.squares[0], one.squares[1] + other.squares[1]))
