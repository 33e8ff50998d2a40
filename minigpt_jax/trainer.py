"""The one training loop. It drives an engine and knows no framework.

A step is dispatched without waiting; its numbers are read one update later, so the device never waits for the loop.
Whatever has to be exact (a logged line, a validation, a checkpoint) reads everything first.

The loop counts updates by what the engine reports, never by dividing micro-batches: a micro-batch that was skipped
(its loss or gradient was not finite) does not count towards its update, and another takes its place.
"""

import math
import signal
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from minigpt_jax.config import ModelConfig, TrainConfig
from minigpt_jax.console import RunConsole
from minigpt_jax.cost import peak_memory_bytes, training_flops_per_token
from minigpt_jax.data.batching import Batch, BatchSource, load_batches
from minigpt_jax.progress import LogWindow, Progress
from minigpt_jax.run_directory import RunDirectory
from minigpt_jax.tracking import EventsLog, MetricsLog, Tracker

SMALLEST_LEARNING_RATE_SCALE = 1 / 64
"""A run that rolled back so often that its rate fell below this part of the schedule's is stopped."""


# --- What the loop needs of an engine ---


@dataclass(frozen=True)
class StepReport:
    """The numbers of one micro-batch."""

    loss_sum: float
    """Loss in nats, summed over the supervised tokens, or over the pairs in dpo."""
    loss_terms: int
    """How many of them there were."""
    supervised_tokens: int
    figures: dict[str, float]
    """What else the stage measures, summed over the same, by its name in metrics.jsonl."""
    skipped: bool
    """The micro-batch changed nothing: its loss or gradient was not finite, or it had no supervised token."""
    updates: int
    """Optimizer updates finished after it."""
    grad_norm: float
    """Global norm of the last finished update's gradient, before clipping."""
    learning_rate: float


@dataclass(frozen=True)
class Evaluation:
    """Sums over what was evaluated; the fields are those of `StepReport`."""

    loss_sum: float
    loss_terms: int
    figures: dict[str, float]


class Engine(Protocol):
    """Trains one model on a device; minigpt_jax/engine.py has the JAX one and says what each method does."""

    def init(self, trained: dict[str, Any], frozen: dict[str, Any] | None = None) -> None: ...  # noqa: D102
    def log_probabilities(self, batches: Iterable[Batch]) -> list[NDArray[np.float64]]: ...  # noqa: D102
    def generate(self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, stop_id: int) -> list[list[int]]: ...  # noqa: D102
    def train_step(self, batch: Batch) -> Any: ...  # noqa: D102
    def read(self, handles: Sequence[Any]) -> list[StepReport]: ...  # noqa: D102
    def flush(self) -> float | None: ...  # noqa: D102
    def evaluate(self, batches: Iterable[Batch]) -> Evaluation: ...  # noqa: D102
    def save(self, step: int, *, progress: dict[str, Any], val_loss: float | None) -> None: ...  # noqa: D102
    def restore(self, step: int) -> dict[str, Any]: ...  # noqa: D102
    def saved_steps(self) -> list[int]: ...  # noqa: D102
    def best_step(self) -> int | None: ...  # noqa: D102
    def wait(self) -> None: ...  # noqa: D102
    def set_learning_rate_scale(self, scale: float) -> None: ...  # noqa: D102
    def is_saving(self) -> bool: ...  # noqa: D102
    def memory_bytes(self) -> int | None: ...  # noqa: D102
    def matmul_flops(self) -> float: ...  # noqa: D102
    def is_out_of_memory(self, error: BaseException) -> bool: ...  # noqa: D102
    def close(self) -> None: ...  # noqa: D102


Ending = Literal["finished", "interrupted", "not finite"]


# --- The loop ---


class Trainer:
    """Trains until the data or the steps end, or somebody stops it.

    Args:
        model: the model's shape.
        train: the run's resolved configuration.
        engine: holds the model; `init` or `restore` was called.
        source: the training micro-batches of the whole run.
        validation: the validation batches; None when there is nothing to validate on.
        validation_bytes: UTF-8 bytes of the text that they predict.
        run: where metrics, events and checkpoints go.
        tracker: gets every logged line.
        console: shows them.
        total_updates: length of the run.
        matmul_flops: FLOPs per second that the device reaches in a matrix product.
        progress: where the run stands.
    """

    def __init__(
        self,
        *,
        model: ModelConfig,
        train: TrainConfig,
        engine: Engine,
        source: BatchSource,
        validation: BatchSource | None,
        validation_bytes: int,
        run: RunDirectory,
        tracker: Tracker,
        console: RunConsole,
        total_updates: int,
        matmul_flops: float,
        progress: Progress,
    ):
        self.model, self.train, self.engine = model, train, engine
        self.source, self.validation, self.validation_bytes = source, validation, validation_bytes
        self.run_directory, self.tracker, self.console = run, tracker, console
        self.total_updates, self.matmul_flops = total_updates, matmul_flops
        self.progress = progress
        self.metrics, self.events = MetricsLog(run.path), EventsLog(run.path)
        self._unread: deque[tuple[Batch, Any]] = deque()
        self._clock = time.perf_counter()
        self._compiled = False
        self._done_for = progress.updates  # the last step whose log, validation and checkpoint were seen to

    def run(self) -> Ending:
        """Train to the end. The last state is saved and the best checkpoint linked, however the run ends."""
        with StopSignal() as stop:
            if self.progress.updates == 0 and self.progress.micro_batches == 0:
                self._log({}, validate=True)
            ending = self._loop(stop)
            self._read_all()
            if ending == "finished":
                grad_norm = self.engine.flush()
                if grad_norm is not None:
                    self.progress.updates += 1
                    self.progress.accumulated, self.progress.grad_norm = 0, grad_norm
                elif self.progress.accumulated:
                    self.events.write("skipped last update", step=self.progress.updates, reason="not finite")
            self._finish(ending)
        return ending

    def _loop(self, stop: "StopSignal") -> Ending:
        batches = load_batches(self.source, start=self.progress.micro_batches)
        try:
            self._clock = time.perf_counter()
            while self.progress.updates < self.total_updates:
                batch = next(batches, None)
                if batch is None:
                    break
                self._unread.append((batch, self.engine.train_step(batch)))
                if not self._compiled:
                    self._read_compilation()
                while len(self._unread) > self.train.accumulation_steps:
                    self._read_oldest()
                self._at_end_of_update()
                if self._too_many_skipped():
                    if not self._roll_back():
                        return "not finite"
                    batches.close()
                    batches = load_batches(self.source, start=self.progress.micro_batches)
                if stop.requested and self.progress.updates < self.total_updates:
                    return "interrupted"
        finally:
            batches.close()
        return "finished"

    # --- reading what was dispatched ---

    def _too_many_skipped(self) -> bool:
        return self.progress.skipped_in_a_row >= self.train.max_non_finite_steps

    def _read_oldest(self) -> None:
        batch, handle = self._unread.popleft()
        (report,) = self.engine.read([handle])
        progress, window = self.progress, self.progress.window
        progress.micro_batches = batch.index + 1
        if report.skipped:
            self._note_skipped(batch, report)
        else:
            progress.skipped_in_a_row = 0
            progress.accumulated = (progress.accumulated + 1) % self.train.accumulation_steps
            progress.updates = report.updates
            progress.tokens += batch.num_real
            progress.supervised_tokens += report.supervised_tokens
            progress.grad_norm, progress.learning_rate = report.grad_norm, report.learning_rate
            window.add(report.loss_sum, report.loss_terms, report.figures)
            window.supervised_tokens += report.supervised_tokens
            window.real_tokens += batch.num_real
            window.positions += batch.tokens.size
        seconds = self._seconds_since_last_mark()
        progress.wall_seconds += seconds
        if self._compiled:
            window.seconds += seconds
            window.timed_tokens += 0 if report.skipped else batch.num_real
            window.timed_supervised_tokens += 0 if report.skipped else report.supervised_tokens
        self.console.advance(progress.updates)

    def _read_all(self) -> None:
        while self._unread:
            self._read_oldest()

    def _read_compilation(self) -> None:
        """The first step compiles; its time is not that of a step."""
        self._read_all()
        self._compiled = True

    def _note_skipped(self, batch: Batch, report: StepReport) -> None:
        self.progress.skipped_steps += 1
        if report.supervised_tokens > 0:
            self.progress.skipped_in_a_row += 1
        self.events.write(
            "skipped micro-batch",
            step=self.progress.updates,
            reason="not finite" if report.supervised_tokens > 0 else "no supervised token",
            loss_sum=report.loss_sum,
            micro_batch=batch.index,
            records=self.source.record_ids(batch),
        )

    def _seconds_since_last_mark(self) -> float:
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        return seconds

    # --- at the end of an update ---

    def _at_end_of_update(self) -> None:
        ahead = self.progress.accumulated + len(self._unread)
        expected = self.progress.updates + ahead // self.train.accumulation_steps
        unfinished = ahead % self.train.accumulation_steps != 0
        if unfinished or expected == self._done_for or not self._something_is_due(expected):
            return
        # A rollback happens at the same micro-batch whatever was read ahead.
        while self._unread and not self._too_many_skipped():
            self._read_oldest()
        # After a skip the update is not finished yet; it will be due again.
        if self.progress.updates == expected and self.progress.accumulated == 0:
            self._done_for = expected
            self._do_what_is_due(expected)

    def _something_is_due(self, step: int) -> bool:
        return step == self.total_updates or any(step % interval == 0 for interval in self._intervals())

    def _intervals(self) -> tuple[int, int, int]:
        return self.train.log_interval, self.train.eval_interval, self.train.save_interval

    def _do_what_is_due(self, step: int) -> None:
        if step == self.total_updates:
            return  # _finish does all of it
        log, evaluate, save = (step % interval == 0 for interval in self._intervals())
        val_loss, improved = None, False
        if log or evaluate:
            best = self.progress.best_val_loss
            val_loss = self._log(self._training_metrics(), validate=evaluate)
            improved = val_loss is not None and (best is None or val_loss < best)
        if save or improved:
            self._save(val_loss)

    def _training_metrics(self) -> dict[str, float]:
        window, self.progress.window = self.progress.window, LogWindow()
        if window.supervised_tokens == 0:
            return {}
        metrics = window.metrics(is_of_tokens=self.train.stage != "dpo")
        metrics |= {"learning_rate": self.progress.learning_rate, "grad_norm": self.progress.grad_norm}
        if "tokens_per_second" in metrics:
            supervised = window.supervised_tokens / window.real_tokens
            flops = training_flops_per_token(self.model, time=self.train.max_seq_len, supervised=supervised)
            metrics["model_flops_utilization"] = metrics["tokens_per_second"] * flops / self.matmul_flops
        return metrics

    def _log(self, metrics: dict[str, float], *, validate: bool) -> float | None:
        """Write one line of metrics; returns the validation loss when it was measured."""
        progress = self.progress
        line = {
            **metrics,
            "step": progress.updates,
            "epoch": self.source.epoch_of(progress.micro_batches),
            "tokens": progress.tokens,
            "supervised_tokens": progress.supervised_tokens,
            "skipped_steps": progress.skipped_steps,
            "device_memory_bytes": self.engine.memory_bytes() or peak_memory_bytes(),
        }
        val_loss = None
        if validate and self.validation is not None:
            found = self.engine.evaluate(load_batches(self.validation))
            val_loss = found.loss_sum / found.loss_terms
            line["val_loss"] = val_loss
            line |= {f"val_{name}": value / found.loss_terms for name, value in found.figures.items()}
            if self.validation_bytes:
                nats = found.figures.get("cross_entropy", found.loss_sum)
                line["val_bits_per_byte"] = nats / math.log(2) / self.validation_bytes
            if progress.best_val_loss is None or val_loss < progress.best_val_loss:
                progress.best_val_loss = val_loss
        progress.wall_seconds += self._seconds_since_last_mark()
        line["wall_seconds"] = progress.wall_seconds
        # A save that has ended since may have replaced the best checkpoint.
        if not self.engine.is_saving():
            self.run_directory.link_best(self.engine.best_step())
        self.metrics.write(line, step=progress.updates)
        self.tracker.log({name: value for name, value in line.items() if name != "step"}, progress.updates)
        self.console.show(line)
        return val_loss

    # --- checkpoints ---

    def _save(self, val_loss: float | None) -> None:
        self.engine.wait()
        self.run_directory.link_best(self.engine.best_step())
        self.engine.save(self.progress.updates, progress=self.progress.to_json(), val_loss=val_loss)
        self.progress.wall_seconds += self._seconds_since_last_mark()

    def _finish(self, ending: Ending) -> None:
        val_loss = None
        if ending == "finished":
            val_loss = self._log(self._training_metrics(), validate=True)
        self._save(val_loss)
        self.engine.wait()
        self.run_directory.link_best(self.engine.best_step())
        # The last word: a run that was finished says so here.
        self.events.write(ending, step=self.progress.updates)

    def _roll_back(self) -> bool:
        """Go back to the newest checkpoint with half the learning rate; False when the run has to stop instead."""
        if self.train.on_non_finite == "stop":
            return False
        self.engine.wait()
        steps = self.engine.saved_steps()
        scale = self.progress.learning_rate_scale / 2
        if not steps or scale < SMALLEST_LEARNING_RATE_SCALE:
            return False
        # What was dispatched since is void; the data goes on behind what could not be learned from.
        self._unread.clear()
        bad_until, skipped = self.progress.micro_batches, self.progress.skipped_steps
        self.progress = Progress.from_json(self.engine.restore(steps[-1]))
        self._done_for = self.progress.updates
        self.progress.micro_batches, self.progress.skipped_steps = bad_until, skipped
        self.progress.skipped_in_a_row = 0
        self.progress.learning_rate_scale = scale
        self.engine.set_learning_rate_scale(scale)
        self.metrics.truncate_after(steps[-1])
        self.events.write("rolled back", step=steps[-1], learning_rate_scale=scale)
        self.console.say(f"rolled back to step {steps[-1]}; learning rate scaled by {scale:g}")
        return True


class StopSignal:
    """While active, the first Ctrl-C or termination signal asks the loop to stop; a second one stops at once."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._previous[number] = signal.signal(number, self._handle)
            except ValueError:  # not the main thread: whoever runs us there has its own way to stop
                break
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
