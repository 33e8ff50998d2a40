"""The PyTorch engine: what minigpt_jax/trainer.py drives when a run is started with `--backend torch`.

It owns the model, the optimizer and the checkpoints; the loop sees NumPy batches and plain numbers. Every method does
what that of the twin, minigpt_jax/engine.py, does; steps are eager, so `read` has nothing to wait for.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minigpt_jax.adapter_tree import merge
from minigpt_jax.config import ModelConfig, TrainConfig
from minigpt_jax.data.batching import Batch
from minigpt_jax.errors import UserError
from minigpt_jax.formats.checkpoints import TREES, SafetensorsStore
from minigpt_jax.formats.names import flatten, map_leaves, unflatten
from minigpt_jax.generation import greedy
from minigpt_jax.trainer import Evaluation, StepReport
from minigpt_torch.generate import TorchDecoder
from minigpt_torch.lora import adapter_tensors
from minigpt_torch.model import Transformer
from minigpt_torch.muon import Muon
from minigpt_torch.objective import NO_MASKS, BatchTensors, batch_tensors, log_probabilities
from minigpt_torch.train_step import (
    StepMetrics,
    TrainState,
    draw_dropout_masks,
    evaluate,
    flush,
    init_state,
    train_step,
)
from minigpt_torch.weights import as_array, as_own, as_tensor, as_tree, make_model, parameters_of


def find_device() -> torch.device:
    """The accelerator that PyTorch sees (CUDA, then Apple's MPS), else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def accelerator() -> str | None:
    """The platform when it is not a CPU: "gpu" or "mps"."""
    return {"cuda": "gpu", "mps": "mps", "cpu": None}[find_device().type]


@cache
def matmul_flops(dtype_name: str) -> float:
    """FLOPs per second of a large matrix product on the device: the best of three."""
    device, dtype = find_device(), getattr(torch, dtype_name)
    size = 2048 if device.type == "cpu" else 8192
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        (matrix @ matrix)[0, 0].item()
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds[1:])


class TorchEngine:
    """Trains one model on one device.

    Args:
        model: the model's shape.
        train: the resolved configuration of the run.
        total_updates: length of the schedule.
        checkpoints: where checkpoints are written and read.
        teacher: in distill, the teacher's shape.

    Raises:
        UserError: an option that this engine does not have.
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
        self.device = find_device()
        if self.device.type == "mps" and train.dtype == "float64":
            raise UserError("--dtype float64 does not run on Apple's MPS; choose float32, or --backend jax")
        self._model, self._teacher, self._train, self._total_updates = model, teacher, train, total_updates
        self._dtype: torch.dtype = getattr(torch, train.dtype or "float32")
        self._store = SafetensorsStore(checkpoints, keep=train.keep_checkpoints)
        self._state: TrainState | None = None

    # --- state ---

    def init(self, trained: dict[str, Any], frozen: dict[str, Any] | None = None) -> None:
        """Start from these NumPy parameters, with empty moments.

        Args:
            trained: the model's parameters, or adapters in lora.
            frozen: what is not trained: the base in lora, the teacher in distill, the reference in dpo.
        """
        high = np.float64 if self._dtype == torch.float64 else np.float32

        def make(shape: ModelConfig, parameters: dict[str, Any]) -> Transformer:
            cast = map_leaves(lambda leaf: leaf.astype(high), parameters)
            return make_model(shape, cast, dtype=self._dtype, kernel="fused", device=self.device)

        if self._train.stage == "lora":
            assert frozen is not None
            adapters = adapter_tensors(map_leaves(lambda leaf: leaf.astype(high), trained), device=self.device)
            self._state = init_state(make(self._model, frozen), self._train, adapters=adapters)
        else:
            other = None if frozen is None else make(self._teacher or self._model, frozen)
            self._state = init_state(make(self._model, trained), self._train, frozen=other)

    @property
    def state(self) -> TrainState:
        """The training state; `init` came first."""
        assert self._state is not None
        return self._state

    def set_learning_rate_scale(self, scale: float) -> None:
        """Multiply every later learning rate of the schedule by `scale`."""
        self.state.learning_rate_scale = scale

    # --- steps ---

    def train_step(self, batch: Batch) -> StepMetrics:
        """Train on one micro-batch."""
        masks = NO_MASKS
        if self._train.dropout or self._train.stage == "lora":
            # The seed depends on the micro-batch's own number alone, so that a resumed run draws the same masks.
            numbers = [self._train.seed, self._train.stage_number, batch.index]
            seed = int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)
            generator = torch.Generator(self.device).manual_seed(seed)
            masks = draw_dropout_masks(self._model, self._train, num_positions=batch.tokens.size, generator=generator)
        return train_step(
            self.state,
            self._tensors(batch),
            self._train,
            total_updates=self._total_updates,
            dropout_masks=masks,
        )

    def read(self, handles: Sequence[StepMetrics]) -> list[StepReport]:
        """The numbers of these steps."""
        return [
            StepReport(
                loss_sum=metrics.loss_sum,
                loss_terms=int(metrics.loss_terms),
                supervised_tokens=int(metrics.supervised_tokens),
                figures=metrics.figures,
                skipped=metrics.skipped,
                updates=metrics.updates,
                grad_norm=metrics.grad_norm,
                learning_rate=metrics.learning_rate,
            )
            for metrics in handles
        ]

    def flush(self) -> float | None:
        """Make an update from a window that the data ended early.

        Returns:
            The global norm of its gradient before clipping; None when nothing was accumulated, or when the update would
            have left a parameter not finite and was not made.
        """
        if self.state.micro_steps == 0:
            return None
        return flush(self.state, self._train, total_updates=self._total_updates)

    def evaluate(self, batches: Iterable[Batch]) -> Evaluation:
        """What the stage measures, summed over `batches`."""
        parts = [evaluate(self.state, self._tensors(batch), self._train) for batch in batches]
        return Evaluation(
            sum(part.loss.item() for part in parts),
            sum(int(part.terms) for part in parts),
            {name: sum(part.figures[name].item() for part in parts) for name in parts[0].figures},
        )

    @torch.no_grad()
    def log_probabilities(self, batches: Iterable[Batch]) -> list[NDArray[np.float64]]:
        """Log-probability of each row's answer under the model as it is now; [B] for each batch."""
        rows = (log_probabilities(self.state.model, self._tensors(batch)) for batch in batches)
        return [as_array(each).astype(np.float64) for each in rows]

    def generate(self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, stop_id: int) -> list[list[int]]:
        """The greedy continuation of each prompt, up to and without `stop_id`."""
        model = self.state.model
        if self._train.stage == "lora":
            merged = merge(parameters_of(model), trees_of(self.state)["parameters"], self._train.lora)
            model = make_model(self._model, merged, dtype=self._dtype, kernel="fused", device=self.device)
        return greedy(TorchDecoder(model), prompts, max_new_tokens=max_new_tokens, stop_id=stop_id)

    # --- checkpoints ---

    def save(self, step: int, *, progress: dict[str, Any], val_loss: float | None) -> None:
        """Save everything that training changes."""
        self._store.save(step, trees_of(self.state), progress=progress, val_loss=val_loss)

    def restore(self, step: int) -> dict[str, Any]:
        """Continue from checkpoint `step`; returns the progress saved with it. `init` came first."""
        like = trees_of(self.state)
        loaded = {name: self._store.load(step, name, like[name]) for name in TREES}
        take_trained(self.state, loaded["parameters"])
        take_optimizer(self.state, loaded["optimizer"])
        return self._store.progress(step)

    def saved_steps(self) -> list[int]:
        """Steps of the finished checkpoints, ascending."""
        return self._store.steps

    def best_step(self) -> int | None:
        """The finished checkpoint with the lowest validation loss."""
        return self._store.best_step

    def is_saving(self) -> bool:
        """False: a save is finished when it returns."""
        return False

    def wait(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Nothing to free."""

    # --- the device ---

    def memory_bytes(self) -> int | None:
        """Peak bytes in use on the device; None where the device does not say."""
        return torch.cuda.max_memory_allocated() if self.device.type == "cuda" else None

    def matmul_flops(self) -> float:
        """FLOPs per second of a large matrix product in the compute dtype; measured once in a process."""
        return matmul_flops(self._train.dtype or "float32")

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether `error` looks like the device or the host running out of memory."""
        words = ("out of memory", "can't allocate memory", "DefaultCPUAllocator")
        return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
            isinstance(error, RuntimeError) and any(word in str(error) for word in words)
        )

    def _tensors(self, batch: Batch) -> BatchTensors:
        arrays = (
            batch.tokens, batch.targets, batch.loss_weights, batch.segment_ids, batch.positions, batch.reference
        )  # fmt: skip
        return batch_tensors(arrays, device=self.device)


def trees_of(state: TrainState) -> dict[str, Any]:
    """The two trees of a checkpoint, in the layout of minigpt_jax/formats/checkpoints.py."""

    def moment(name: str) -> dict[str, Any]:
        # Before the first update the optimizers have no slots yet: they are zero.
        owners = {own: state.optimizer_of(parameter) for own, parameter in state.trained.items()}
        slots = {
            own: owners[own].state[parameter].get(name, torch.zeros_like(parameter))
            for own, parameter in state.trained.items()
            if name == "exp_avg" or not isinstance(owners[own], Muon)
        }
        return _tree(state, slots)

    real = as_array(next(iter(state.trained.values()))).dtype
    return {
        "parameters": _tree(state, state.trained),
        "optimizer": {
            "first_moment": moment("exp_avg"),
            "second_moment": moment("exp_avg_sq"),
            "gradient_sums": _tree(state, state.sums),
            "token_sum": np.asarray(state.tokens, real),
            "micro_steps": np.asarray(state.micro_steps, np.int32),
            "updates": np.asarray(state.updates, np.int32),
            "grad_norm": np.asarray(state.grad_norm, real),
            "learning_rate_scale": np.asarray(state.learning_rate_scale, real),
        },
    }


def take_trained(state: TrainState, tree: dict[str, Any]) -> None:
    """Continue with the parameters of a checkpoint, or its adapters."""
    own = _own(state, tree)
    with torch.no_grad():
        for name, parameter in state.trained.items():
            parameter.copy_(own[name])


def take_optimizer(state: TrainState, tree: dict[str, Any]) -> None:
    """Continue with the optimizer's part of a checkpoint."""
    first, second = (_own(state, tree[name]) for name in ("first_moment", "second_moment"))
    for name, parameter in state.trained.items():
        state.optimizer_of(parameter).state[parameter] = {
            "step": torch.tensor(float(tree["updates"])),
            "exp_avg": first[name],
        } | ({"exp_avg_sq": second[name]} if name in second else {})
    state.sums = _own(state, tree["gradient_sums"])
    state.tokens, state.micro_steps = float(tree["token_sum"]), int(tree["micro_steps"])
    state.updates, state.grad_norm = int(tree["updates"]), float(tree["grad_norm"])
    state.learning_rate_scale = float(tree["learning_rate_scale"])


def _tree(state: TrainState, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The tree of arrays from one tensor for each name of `trained`."""
    if state.models.adapters is None:
        return as_tree(tensors, state.model.config)
    return unflatten({path: as_array(tensor) for path, tensor in tensors.items()})


def _own(state: TrainState, tree: dict[str, Any]) -> dict[str, Tensor]:
    """One tensor for each name of `trained`, from a tree of arrays."""
    device = next(iter(state.trained.values())).device
    if state.models.adapters is None:
        return as_own(tree, state.model.config, device=device)
    return {path: as_tensor(array, device) for path, array in flatten(tree).items()}
