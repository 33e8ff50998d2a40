"""What a run measures, and where the figures go.

METRIC_NAMES is the one list of names: metrics.jsonl, metrics.csv, the trackers, the plot and the report all use it.
Both logs of a run directory are JSON lines, one object a line, appended and flushed, so a killed run loses at most
the line it was writing. A number that is not finite is written as null, since JSON has no NaN. Trackers are thin
adapters over their own libraries, imported only when asked for. Framework-free.
"""

import csv
import importlib.util
import io
import json
import math
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from minigpt_jax.config import TrackerName
from minigpt_jax.errors import UserError, missing_extra, python
from minigpt_jax.files import replace_file

METRIC_NAMES = (
    "step",  # optimizer updates made so far
    "epoch",  # passes over the training data, with a fraction
    "loss",  # nats per supervised token, or per pair in dpo, over the updates since the last line
    "perplexity",  # exp(loss), or exp(cross_entropy) in distill; none in dpo
    "cross_entropy",  # distill: nats per supervised token, a part of the loss
    "divergence",  # distill: KL from the teacher, at the temperature, the other part
    "reward_accuracy",  # dpo: part of the pairs whose chosen answer has the higher reward
    "reward_margin",  # dpo: reward of the chosen answer minus that of the rejected one
    "chosen_reward",  # dpo: beta * (log-probability now - under the reference)
    "rejected_reward",  # dpo
    "learning_rate",
    "grad_norm",  # global norm before clipping
    "tokens",  # real tokens read since the run began, padding excluded
    "supervised_tokens",  # tokens predicted since the run began
    "tokens_per_second",  # real tokens
    "supervised_tokens_per_second",  # where they are not all of them
    "padding_fraction",  # padded positions / all positions
    "model_flops_utilization",  # model FLOP/s / FLOP/s of a matrix product on this device
    "device_memory_bytes",
    "skipped_steps",  # micro-batches that changed nothing: not finite, or nothing supervised
    "val_loss",  # as loss, on the validation data; so are the following
    "val_bits_per_byte",  # not in dpo
    "val_cross_entropy",
    "val_divergence",
    "val_reward_accuracy",
    "val_reward_margin",
    "val_chosen_reward",
    "val_rejected_reward",
    "wall_seconds",  # since the run began, pauses between resumes excluded
)


# --- Files ---


def _plain(value: Any) -> Any:
    """`value` as JSON can hold it: NumPy numbers and arrays become Python's, what is not finite becomes None."""
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _read_lines(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Each record of a JSON lines file with its bytes. A last line that a crash cut short is left out.

    Raises:
        UserError: a line other than that is not a JSON object with a step; the message has file and line.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError:
            if number == len(lines):  # what follows the last newline: nothing, or a line that was never finished
                break
            record = None
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise UserError(f"{path}, line {number}: not a JSON object with a step; delete the line or the file")
        records.append((line, record))
    return records


class _StepLog:
    """JSON lines of which each has a step."""

    def __init__(self, path: Path):
        self.path = path

    def _append(self, record: Mapping[str, Any]) -> None:
        line = json.dumps(_plain(record), ensure_ascii=False, allow_nan=False)
        with self.path.open("a", encoding="utf-8", newline="\n") as file:
            file.write(line + "\n")

    def truncate_after(self, step: int) -> None:
        """Drop every line past `step` and an unfinished last line; the lines kept stay byte for byte.

        Called when a run resumes from the checkpoint of `step`: what came later happens again.

        Raises:
            UserError: the file is damaged elsewhere than in its last line.
        """
        if self.path.exists():
            kept = [line for line, record in _read_lines(self.path) if record["step"] <= step]
            replace_file(self.path, b"".join(line + b"\n" for line in kept))


# --- metrics.jsonl, metrics.csv ---


class MetricsLog(_StepLog):
    """run_dir/metrics.jsonl."""

    def __init__(self, run_dir: Path):
        super().__init__(run_dir / "metrics.jsonl")

    def write(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Append one line, its names in the order of METRIC_NAMES.

        Args:
            metrics: any of METRIC_NAMES; Python or NumPy numbers.
            step: optimizer updates made so far.

        Raises:
            ValueError: a name that is not in METRIC_NAMES.
        """
        unknown = sorted(set(metrics) - set(METRIC_NAMES))
        if unknown:
            raise ValueError(f"unknown metric {', '.join(unknown)}; add it to METRIC_NAMES or use its name there")
        values = {**metrics, "step": step}
        self._append({name: values[name] for name in METRIC_NAMES if name in values})


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, oldest first; a value that was not finite is None. Empty when there is no file.

    Raises:
        UserError: the file is damaged elsewhere than in its last line.
    """
    return [record for _, record in _read_lines(run_dir / "metrics.jsonl")]


def write_csv(run_dir: Path) -> Path:
    """Make run_dir/metrics.csv from metrics.jsonl: a column for each of METRIC_NAMES, empty where nothing was measured.

    Raises:
        UserError: metrics.jsonl is damaged elsewhere than in its last line.
    """
    table = io.StringIO()
    writer = csv.DictWriter(table, METRIC_NAMES, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(read_metrics(run_dir))
    path = run_dir / "metrics.csv"
    replace_file(path, table.getvalue().encode("utf-8"))
    return path


# --- events.jsonl ---


class EventsLog(_StepLog):
    """run_dir/events.jsonl: what happened besides measuring (started, skipped, rolled back, resumed, finished, ...)."""

    def __init__(self, run_dir: Path):
        super().__init__(run_dir / "events.jsonl")

    def write(self, kind: str, *, step: int, **fields: Any) -> None:
        """Append one event; `fields` are whatever JSON can hold, and NumPy numbers and arrays."""
        self._append({"step": step, "kind": kind, **fields})

    def forget_micro_batches(self, first: int) -> None:
        """Drop what was said of micro-batches from number `first` on: a resumed run meets them again."""
        if self.path.exists():
            kept = [line for line, event in _read_lines(self.path) if event.get("micro_batch", -1) < first]
            replace_file(self.path, b"".join(line + b"\n" for line in kept))


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of events.jsonl, oldest first. Empty when there is no file.

    Raises:
        UserError: the file is damaged elsewhere than in its last line.
    """
    return [record for _, record in _read_lines(run_dir / "events.jsonl")]


# --- Trackers ---


class Tracker(Protocol):
    """Takes the metrics of a run as they come."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record `metrics`, named as in METRIC_NAMES, at optimizer update `step`."""

    def finish(self) -> None:
        """Hand over what is buffered and close. Called once, whatever way the run ended."""


def make_tracker(
    name: TrackerName, *, run_dir: Path, run_name: str, config: Mapping[str, Any], resume: bool
) -> Tracker:
    """The tracker called `name`.

    Args:
        name: none, wandb, tensorboard or swanlab.
        run_dir: existing directory; the tracker's own files go there.
        run_name: what the run is called in the tracker's display.
        config: shown beside the run.
        resume: continue the run that this directory tracked before, instead of a new one.

    Raises:
        UserError: the library is not installed, or it cannot start (no API key, no network).
    """
    makers: dict[str, Callable[..., Tracker]] = {"wandb": _Wandb, "tensorboard": _TensorBoard, "swanlab": _SwanLab}
    if name == "none":
        return _NoTracker()
    try:
        return makers[name](run_dir=run_dir, run_name=run_name, config=config, resume=resume)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != name:
            raise  # the library is there but broken: its own message says more
        raise _missing_library(name) from error


def require_tracker(name: TrackerName) -> None:
    """Refuse a tracker whose library is not installed, before anything is written.

    Raises:
        UserError: with the command that installs it.
    """
    if name != "none" and importlib.util.find_spec(name) is None:
        raise _missing_library(name)


def _missing_library(name: TrackerName) -> UserError:
    if name == "swanlab":  # no extra has it: it wants an older protobuf
        return UserError(f"--tracker swanlab needs its library: {python()} -m pip install swanlab")
    return missing_extra(f"--tracker {name}", "tracking")


class _NoTracker:
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        pass

    def finish(self) -> None:
        pass


def _run_id(path: Path, *, resume: bool) -> str:
    """The id in `path` when a run resumes and has one, else a new id, kept there."""
    if resume and path.exists():
        return path.read_text(encoding="ascii").strip()
    run_id = uuid.uuid4().hex[:8]
    replace_file(path, f"{run_id}\n".encode("ascii"))
    return run_id


class _Wandb:
    """Weights & Biases. WANDB_MODE=offline keeps everything in run_dir/wandb, to be sent later by `wandb sync`."""

    def __init__(self, *, run_dir: Path, run_name: str, config: Mapping[str, Any], resume: bool):
        import wandb

        # With console capture on, every redraw of the progress bar would be sent as a line of output.
        settings = wandb.Settings(console="off")
        try:
            self.run = wandb.init(
                project="minigpt",
                name=run_name,
                dir=run_dir,
                id=_run_id(run_dir / "wandb_id.txt", resume=resume),
                resume="allow" if resume else None,
                config=dict(config),
                settings=settings,
            )
        except wandb.Error as error:
            raise UserError(f"wandb cannot start: {_one_line(error)} (WANDB_MODE=offline needs no account)") from error

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.run.log(dict(metrics), step=step)

    def finish(self) -> None:
        self.run.finish()


class _SwanLab:
    """SwanLab. SWANLAB_MODE=offline keeps everything in run_dir/swanlog, to be sent later by `swanlab sync`."""

    def __init__(self, *, run_dir: Path, run_name: str, config: Mapping[str, Any], resume: bool):
        import swanlab
        from swanlab.exceptions import AuthenticationError

        try:
            self.run = swanlab.init(
                project="minigpt",
                name=run_name,
                log_dir=str(run_dir / "swanlog"),
                id=_run_id(run_dir / "swanlab_id.txt", resume=resume),
                resume="allow",
                config=dict(config),
            )
        except (AuthenticationError, RuntimeError, OSError) as error:
            raise UserError(
                f"swanlab cannot start: {_one_line(error)} (SWANLAB_MODE=offline needs no account)"
            ) from error

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.run.log(dict(metrics), step=step)

    def finish(self) -> None:
        self.run.finish()


class _TensorBoard:
    """Event files in run_dir/tensorboard, by TensorBoard's own writer (its other one needs torch or TensorFlow)."""

    def __init__(self, *, run_dir: Path, run_name: str, config: Mapping[str, Any], resume: bool):
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.events, self.summaries = event_pb2, summary_pb2
        self.writer = EventFileWriter(str(run_dir / "tensorboard"))
        self.resumed = resume
        if not resume:
            self._write_text("config", f"run {run_name}\n{json.dumps(_plain(config), indent=2)}")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if self.resumed:  # points that the killed run logged past the checkpoint come again: hide the old ones
            start = self.events.SessionLog(status=self.events.SessionLog.START)
            self.writer.add_event(self.events.Event(step=step, session_log=start))
            self.resumed = False
        values = [self.summaries.Summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()]
        self._write(self.summaries.Summary(value=values), step)

    def finish(self) -> None:
        self.writer.close()

    def _write_text(self, tag: str, text: str) -> None:
        from tensorboard.compat.proto.tensor_pb2 import TensorProto

        plugin = self.summaries.SummaryMetadata.PluginData(plugin_name="text")
        indented = "\n".join("    " + line for line in text.splitlines())  # Markdown for: as it stands
        value = self.summaries.Summary.Value(
            tag=tag,
            metadata=self.summaries.SummaryMetadata(plugin_data=plugin),
            tensor=TensorProto(dtype="DT_STRING", string_val=[indented.encode("utf-8")]),
        )
        self._write(self.summaries.Summary(value=[value]), step=0)

    def _write(self, summary: Any, step: int) -> None:
        self.writer.add_event(self.events.Event(step=step, wall_time=time.time(), summary=summary))
        self.writer.flush()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
