"""The JAX engine: what minigpt_jax/trainer.py drives.

It owns the device state, the compiled steps and the checkpoints; the loop sees NumPy batches, plain numbers and
opaque handles. A step is dispatched without waiting for it; `read` waits.

B batch  T time
"""

import time
from collections.abc import Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from minigpt_jax.adapter_tree import merge
from minigpt_jax.attention import default_kernel
from minigpt_jax.checkpoint import CheckpointStore, abstract_like
from minigpt_jax.config import ModelConfig, TrainConfig
from minigpt_jax.data.batching import Batch
from minigpt_jax.data.corpus import cache_directory
from minigpt_jax.generate import JaxDecoder
from minigpt_jax.generation import greedy
from minigpt_jax.model import model_graph
from minigpt_jax.objective import BatchArrays, log_probabilities
from minigpt_jax.optimizer import named_slots, with_named_slots
from minigpt_jax.train_step import (
    StepMetrics,
    TrainState,
    init_state,
    make_eval_step,
    make_flush_step,
    make_train_step,
)
from minigpt_jax.trainer import Evaluation, StepReport


def accelerator() -> str | None:
    """The platform of the first device when it is not a CPU ("gpu", "tpu"), else None."""
    platform = jax.devices()[0].platform
    return None if platform == "cpu" else str(platform)


@cache
def matmul_flops(dtype: jnp.dtype) -> float:
    """FLOPs per second of a large matrix product on the first device: the best of three."""
    size = 2048 if jax.devices()[0].platform == "cpu" else 8192
    with jax.enable_x64(jnp.dtype(dtype).itemsize == 8):
        matrix = jnp.ones((size, size), dtype)
        product = jax.jit(lambda a, b: a @ b)
        product(matrix, matrix).block_until_ready()
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            product(matrix, matrix).block_until_ready()
            seconds.append(time.perf_counter() - start)
    return float(2 * size**3 / min(seconds))


class JaxEngine:
    """Trains one model on one device.

    Args:
        model: the model's shape.
        train: the resolved configuration of the run.
        total_updates: length of the schedule.
        checkpoints: where checkpoints are written and read; an existing directory is not touched before a save.
        teacher: in distill, the teacher's shape.
    """

    def __init__(
        self,
        model: ModelConfig,
        train: TrainConfig,
        *,
        total_updates: int,
        checkpoints: Path,
        teacher: ModelConfig | None = None,
    ):
        configure_jax(train.dtype)
        dtype = jnp.dtype(train.dtype or "float32")
        self.device = jax.devices()[0]
        self._train, self._total_updates = train, total_updates
        self._model, self._dtype = model, dtype
        kernel = default_kernel(self.device.platform, dtype)
        self._graph = model_graph(model, dtype=dtype, kernel=kernel)
        taught_by = None if teacher is None else model_graph(teacher, dtype=dtype, kernel=kernel)
        self._train_step = make_train_step(self._graph, train, total_updates=total_updates, teacher=taught_by)
        self._flush_step = make_flush_step(train, total_updates=total_updates)
        self._eval_step = make_eval_step(self._graph, train, teacher=taught_by)
        self._dropout_key = jax.random.fold_in(jax.random.key(train.seed), train.stage_number)
        self._checkpoint_directory = checkpoints
        self._store: CheckpointStore | None = None
        self._state: TrainState | None = None
        self._frozen: Any = None

    # --- state ---

    def init(self, trained: dict[str, Any], frozen: dict[str, Any] | None = None) -> None:
        """Start from these NumPy parameters, with empty moments.

        Args:
            trained: the model's parameters, or adapters in lora.
            frozen: what is not trained: the base in lora, the teacher in distill, the reference in dpo.
        """
        high = jnp.promote_types(self._dtype, jnp.float32)
        # Placed on the device by name, as a checkpoint's arrays are: otherwise a resumed run would compile anew.
        on_device, self._frozen = jax.device_put(
            jax.tree.map(lambda leaf: np.asarray(leaf, high), (trained, frozen)), self.device
        )
        # Compiled as one: leaf by leaf, each shape would be a compilation of its own.
        fresh = jax.jit(partial(init_state, config=self._train, total_updates=self._total_updates))
        self._state = fresh(on_device)

    @property
    def state(self) -> TrainState:
        """The device state; `init` or `restore` came first."""
        assert self._state is not None
        return self._state

    def set_learning_rate_scale(self, scale: float) -> None:
        """Multiply every later learning rate of the schedule by `scale`."""
        self._state = self.state._replace(learning_rate_scale=jnp.full_like(self.state.learning_rate_scale, scale))

    # --- steps ---

    def train_step(self, batch: Batch) -> StepMetrics:
        """Dispatch one micro-batch; the result is given to `read` later."""
        # The key depends on the micro-batch's own number alone, so that a resumed run draws the same masks.
        key = jax.random.fold_in(self._dropout_key, batch.index)
        self._state, metrics = self._train_step(self.state, _arrays(batch), key, self._frozen)
        return metrics

    def read(self, handles: Sequence[StepMetrics]) -> list[StepReport]:
        """Wait for these steps and return their numbers."""
        return [
            StepReport(
                loss_sum=float(metrics.loss_sum),
                loss_terms=int(metrics.loss_terms),
                supervised_tokens=int(metrics.supervised_tokens),
                figures={name: float(value) for name, value in metrics.figures.items()},
                skipped=bool(metrics.skipped),
                updates=int(metrics.updates),
                grad_norm=float(metrics.grad_norm),
                learning_rate=float(metrics.learning_rate),
            )
            for metrics in jax.device_get(list(handles))
        ]

    def flush(self) -> float | None:
        """Make an update from a window that the data ended early.

        Returns:
            The global norm of its gradient before clipping; None when nothing was accumulated, or when the update would
            have left a parameter not finite and was not made.
        """
        if int(self.state.opt_state.mini_step) == 0:
            return None
        before = int(self.state.opt_state.gradient_step)
        self._state, grad_norm = self._flush_step(self.state)
        return float(grad_norm) if int(self.state.opt_state.gradient_step) > before else None

    def evaluate(self, batches: Iterable[Batch]) -> Evaluation:
        """What the stage measures, summed over `batches`."""
        parts = jax.device_get(
            [self._eval_step(self.state.parameters, _arrays(each), self._frozen) for each in batches]
        )
        return Evaluation(
            sum(float(part.loss) for part in parts),
            sum(int(part.terms) for part in parts),
            {name: sum(float(part.figures[name]) for part in parts) for name in parts[0].figures},
        )

    def log_probabilities(self, batches: Iterable[Batch]) -> list[NDArray[np.float64]]:
        """Log-probability of each row's answer under the model as it is now; [B] for each batch."""
        of_batch = jax.jit(partial(log_probabilities, self._graph))
        return [np.asarray(of_batch(self.state.parameters, _arrays(batch)), np.float64) for batch in batches]

    def generate(self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, stop_id: int) -> list[list[int]]:
        """The greedy continuation of each prompt, up to and without `stop_id`."""
        parameters = self.state.parameters
        if self._train.stage == "lora":
            base, adapters = jax.device_get((self._frozen, parameters))
            parameters = merge(base, adapters, self._train.lora)
        decoder = JaxDecoder(self._model, parameters, dtype=self._dtype)
        return greedy(decoder, prompts, max_new_tokens=max_new_tokens, stop_id=stop_id)

    # --- checkpoints ---

    @property
    def store(self) -> CheckpointStore:
        """The run's checkpoints, opened at first use."""
        if self._store is None:
            self._store = CheckpointStore(self._checkpoint_directory, keep=self._train.keep_checkpoints)
        return self._store

    def save(self, step: int, *, progress: dict[str, Any], val_loss: float | None) -> None:
        """Start saving everything that training changes; does not wait for the disk."""
        self.store.save(step, trees_of(self.state), progress=progress, val_loss=val_loss)

    def restore(self, step: int) -> dict[str, Any]:
        """Continue from checkpoint `step`; returns the progress saved with it. `init` gave the shapes."""
        loaded = {name: self.store.load(step, name, abstract_like(tree)) for name, tree in trees_of(self.state).items()}
        scale = loaded["optimizer"].pop("learning_rate_scale")
        opt_state = with_named_slots(self.state.opt_state, loaded["optimizer"])
        self._state = TrainState(loaded["parameters"], opt_state, scale)
        return self.store.progress(step)

    def saved_steps(self) -> list[int]:
        """Steps of the finished checkpoints, ascending."""
        return self.store.steps

    def best_step(self) -> int | None:
        """The finished checkpoint with the lowest validation loss."""
        return self.store.best_step

    def is_saving(self) -> bool:
        """Whether a save is in progress."""
        return self._store is not None and self._store.is_saving

    def wait(self) -> None:
        """Return when no save is in progress."""
        self.store.wait()

    def close(self) -> None:
        """Wait for a save in progress and free background threads."""
        if self._store is not None:
            self._store.close()

    # --- the device ---

    def memory_bytes(self) -> int | None:
        """Peak bytes in use on the device; None where the device does not say (CPU)."""
        stats = self.device.memory_stats()
        return int(stats["peak_bytes_in_use"]) if stats and "peak_bytes_in_use" in stats else None

    def matmul_flops(self) -> float:
        """FLOPs per second of a large matrix product in the compute dtype; measured once in a process."""
        return matmul_flops(self._dtype)

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether `error` looks like the device or the host running out of memory."""
        words = ("RESOURCE_EXHAUSTED", "Out of memory", "out of memory")
        return isinstance(error, MemoryError) or (
            isinstance(error, jax.errors.JaxRuntimeError) and any(word in str(error) for word in words)
        )


def trees_of(state: TrainState) -> dict[str, Any]:
    """The two trees of a checkpoint, in the layout of minigpt_jax/formats/checkpoints.py."""
    slots = named_slots(state.opt_state)
    return {
        "parameters": state.parameters,
        "optimizer": {**slots, "learning_rate_scale": state.learning_rate_scale},
    }


def _arrays(batch: Batch) -> BatchArrays:
    arrays = (batch.tokens, batch.targets, batch.loss_weights, batch.segment_ids, batch.positions, batch.reference)
    return BatchArrays(*jax.device_put(arrays))


def configure_jax(dtype: str | None) -> None:
    """Process-wide JAX settings: 64-bit floats if asked for, and compiled steps kept on disk."""
    if dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_compilation_cache_dir", str(cache_directory() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
