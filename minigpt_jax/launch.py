"""A run from its first line to its last: prepare, train or resume, show.

Framework-free: the script that calls `launch` brings the engine. Nothing is written into the run directory before
everything that can be wrong with the configuration, the data and the model has been checked.
"""

import contextlib
import errno
import hashlib
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from minigpt_jax.announcements import announce, answer_before, conclude
from minigpt_jax.config import ModelConfig, TrainConfig
from minigpt_jax.config_json import to_json
from minigpt_jax.console import RunConsole, say
from minigpt_jax.errors import UserError
from minigpt_jax.first_weights import FirstWeights, first_weights
from minigpt_jax.preparation import ModelOpener, Run, prepare
from minigpt_jax.progress import CONVERTED, Progress
from minigpt_jax.reference import compute_reference, needs_reference, read_reference
from minigpt_jax.tracking import (
    EventsLog,
    MetricsLog,
    make_tracker,
    read_events,
)
from minigpt_jax.trainer import Ending, Engine, Trainer

EngineFactory = Callable[..., Engine]
"""(ModelConfig, TrainConfig, *, total_updates, checkpoints, teacher) -> Engine."""


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    directory: Path
    ending: Ending
    step: int


def launch(
    config: TrainConfig,
    *,
    given: Collection[str],
    make_engine: EngineFactory,
    accelerator: str | None,
    open_model: ModelOpener,
) -> Result:
    """Train as `config` says and leave a complete run directory.

    Args:
        config: as the person gave it.
        given: the fields that the person set, as opposed to defaults.
        make_engine: makes the engine of a framework.
        accelerator: the engine's platform when it is not a CPU.
        open_model: finds the models that --init-from and --teacher name.

    Raises:
        UserError: a mistake in the configuration or the data, a full disk, too little memory.
    """
    run = prepare(config, given=given, accelerator=accelerator, open_model=open_model)
    engine = make_engine(
        run.model,
        run.train,
        total_updates=run.total_updates,
        checkpoints=run.directory.checkpoints,
        teacher=None if run.teacher is None else run.teacher.config,
    )
    announce(run, accelerator=accelerator, chosen="model" not in given)
    try:
        if run.train.resume and _is_finished(run) and (run.directory.path / "report.html").exists():
            say(f"{run.directory.path} is finished ({run.total_updates} updates); nothing to do")
            return Result(run.directory.path, "finished", run.total_updates)
        return _train(run, engine)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise UserError(f"cannot write the run directory {run.directory.path}: {error.strerror}") from error
        raise
    except Exception as error:
        if engine.is_out_of_memory(error):
            raise UserError(_out_of_memory_advice(run, engine)) from error
        raise
    finally:
        engine.close()


def _train(run: Run, engine: Engine) -> Result:
    start = first_weights(run)
    engine.init(start.trained, start.frozen)
    if run.train.stage != "pretrain" and not run.train.resume:
        answer_before(run, engine)
    progress = _resume(run, engine, start) if run.train.resume else _start(run, engine, start)
    if _is_finished(run):
        conclude(run, engine, "finished", step=progress.updates)
        return Result(run.directory.path, "finished", progress.updates)
    tracker = make_tracker(
        run.train.tracker,
        run_dir=run.directory.path,
        run_name=run.directory.path.name,
        config=to_json(run.train),
        resume=run.train.resume,
    )
    console = RunConsole(total=run.total_updates, completed=progress.updates)
    trainer = Trainer(
        model=run.model,
        train=run.train,
        engine=engine,
        source=run.corpus.training,
        validation=run.corpus.validation,
        validation_bytes=run.corpus.validation_bytes,
        run=run.directory,
        tracker=tracker,
        console=console,
        total_updates=run.total_updates,
        matmul_flops=engine.matmul_flops(),
        progress=progress,
    )
    try:
        with console:
            ending = trainer.run()
    finally:
        tracker.finish()
    conclude(run, engine, ending, step=trainer.progress.updates)
    return Result(run.directory.path, ending, trainer.progress.updates)


def _is_finished(run: Run) -> bool:
    return any(event["kind"] == "finished" for event in read_events(run.directory.path))


def _start(run: Run, engine: Engine, start: FirstWeights) -> Progress:
    if not run.train.resume:
        run.directory.create(run.model, run.train, run.tokenizer)
    # What a run that died before its first checkpoint has logged happens again.
    EventsLog(run.directory.path).truncate_after(-1)
    MetricsLog(run.directory.path).truncate_after(-1)
    EventsLog(run.directory.path).write("started", step=0, data=run.corpus.training_key)
    if needs_reference(run):
        compute_reference(run, engine)
    return Progress(
        data=run.corpus.training_key,
        model=_digest(run.model),
        validation=run.corpus.validation_key,
        frozen=start.frozen_digest,
    )


def _digest(model: ModelConfig) -> str:
    """What the shape is known by: a config.json that was edited must not pass for the one that was trained."""
    return hashlib.sha256(json.dumps(to_json(model), sort_keys=True).encode()).hexdigest()


def _resume(run: Run, engine: Engine, start: FirstWeights) -> Progress:
    path = run.directory.path
    steps = engine.saved_steps()
    events, metrics = EventsLog(path), MetricsLog(path)
    if not steps:
        say(f"{path} has no finished checkpoint; starting it from the beginning")
        return _start(run, engine, start)
    try:
        progress = Progress.from_json(engine.restore(steps[-1]))
    except (KeyError, TypeError) as error:
        newest = run.directory.checkpoints / str(steps[-1])
        remedy = "delete it to continue from an older one" if len(steps) > 1 else "there is no older one"
        raise UserError(f"checkpoint {newest} is damaged; {remedy} ({error!r})") from error
    if progress.data == CONVERTED:
        raise UserError(f"{path} was converted, not trained; start from it with --init-from {path}")
    keys = (progress.data, run.corpus.training_key), (progress.validation, run.corpus.validation_key)
    for what, (then, now) in zip(("training", "validation"), keys, strict=True):
        if then != now:
            raise UserError(
                f"the {what} data or tokenizer changed since {path} was started; it cannot be resumed exactly"
            )
    if progress.model != _digest(run.model):
        raise UserError(f"the model in {path}/config.json is not the one that was trained there; restore the file")
    if progress.frozen != start.frozen_digest:
        raise UserError(
            f"the weights of {run.train.teacher or run.train.init_from} changed since {path} was started; it cannot be "
            "resumed exactly"
        )
    if needs_reference(run):
        read_reference(run)
    run.directory.write_config(run.model, run.train)
    run.directory.link_best(engine.best_step())
    metrics.truncate_after(steps[-1])
    events.truncate_after(steps[-1])
    events.forget_micro_batches(progress.micro_batches)
    events.write("resumed", step=steps[-1])
    say(f"resuming {path} at step {steps[-1]}")
    return progress


def _out_of_memory_advice(run: Run, engine: Engine) -> str:
    with contextlib.suppress(UserError):
        engine.wait()
    steps = engine.saved_steps()
    saved = f"the last checkpoint is step {steps[-1]}" if steps else "no checkpoint was saved yet"
    examples = "pairs" if run.train.stage == "dpo" else "rows"
    return (
        f"out of memory with {run.train.batch_size} {examples} of {run.train.max_seq_len} tokens ({saved}): "
        "halve --batch-size and double --accumulation-steps, which trains the same, or lower --max-seq-len"
    )
