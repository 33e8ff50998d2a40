"""A run from its configuration to its last line: check, prepare, train, show.

Framework-free: the script that calls `launch` brings the engine. Nothing is written into the run directory before
everything that can be wrong with the configuration, the data and the model has been checked.
"""

import contextlib
import dataclasses
import errno
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from minigpt_jax.config import ModelConfig, TrainConfig, to_json
from minigpt_jax.console import RunConsole, say, tokenizing_progress
from minigpt_jax.cost import parameter_count
from minigpt_jax.data.corpus import Corpus, load_corpus
from minigpt_jax.data.sample_questions import Question
from minigpt_jax.defaults import default_warmup, model_config, resolve
from minigpt_jax.errors import UserError, python
from minigpt_jax.formats.model_files import Model
from minigpt_jax.initialization import initial_parameters
from minigpt_jax.progress import CONVERTED, Progress
from minigpt_jax.report import last_values, write_report
from minigpt_jax.run_directory import (
    RunDirectory,
    existing_run_directory,
    new_run_directory,
    resumed_config,
)
from minigpt_jax.tokenizer import Tokenizer, load_tokenizer
from minigpt_jax.tracking import (
    EventsLog,
    MetricsLog,
    make_tracker,
    read_events,
    read_metrics,
    require_tracker,
    write_csv,
)
from minigpt_jax.trainer import Ending, Engine, Trainer

OPENINGS = ("The", "\u4eca\u5929", "Once upon a time", "\u4ed6\u8bf4")
"""Beginnings that a model trained on a person's own text is given."""

SHOWN_SAMPLES = 6

EngineFactory = Callable[..., Engine]
"""(ModelConfig, TrainConfig, *, total_updates, checkpoints) -> Engine."""

ModelOpener = Callable[[str], Model]
"""Path -> the model there, in whatever format."""


@dataclass(frozen=True)
class Run:
    """Everything that is known before the first step."""

    directory: RunDirectory
    model: ModelConfig
    train: TrainConfig
    tokenizer: Tokenizer
    corpus: Corpus
    total_updates: int
    source: Model | None
    """The model that the run starts from; None for fresh weights."""


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
        open_model: finds the model that --init-from names.

    Raises:
        UserError: a mistake in the configuration or the data, a full disk, too little memory.
    """
    run = prepare(config, given=given, accelerator=accelerator, open_model=open_model)
    engine = make_engine(run.model, run.train, total_updates=run.total_updates, checkpoints=run.directory.checkpoints)
    _announce(run, accelerator=accelerator, chosen="model" not in given)
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


def prepare(config: TrainConfig, *, given: Collection[str], accelerator: str | None, open_model: ModelOpener) -> Run:
    """Resolve the configuration, check everything, load and plan the data."""
    require_tracker(config.tracker)
    source = None
    if config.resume:
        directory = existing_run_directory(config.out)
        model, stored = directory.read_config()
        train = resumed_config(stored, config, given, where=directory.path)
        tokenizer = directory.read_tokenizer()
    else:
        source = open_model(config.init_from) if config.init_from is not None else None
        shape = source.config if source is not None else None
        train = resolve(config, accelerator=accelerator, source=shape)
        directory = new_run_directory(config.out, name=f"{train.stage}-{train.model or 'custom'}")
        model = model_config(train, source=shape)
        tokenizer = load_tokenizer(train.tokenizer) if source is None else _tokenizer_of(source, train)
    with tokenizing_progress() as on_progress:
        corpus = load_corpus(train, tokenizer, model_vocab_size=model.vocab_size, on_progress=on_progress)
    total_updates = train.steps or math.ceil(len(corpus.training) / train.accumulation_steps)
    if train.warmup_steps is None:
        train = dataclasses.replace(train, warmup_steps=default_warmup(total_updates))
    return Run(directory, model, train, tokenizer, corpus, total_updates, source)


def _tokenizer_of(source: Model, train: TrainConfig) -> Tokenizer:
    """The tokenizer that the model was trained with."""
    asked = None if train.tokenizer is None else load_tokenizer(train.tokenizer)
    if source.tokenizer is None and asked is not None:
        return asked
    tokenizer = source.require_tokenizer()
    if asked is not None and asked.sha256 != tokenizer.sha256:
        raise UserError(f"--tokenizer {train.tokenizer} is not the tokenizer that {train.init_from} was trained with")
    return tokenizer


def _train(run: Run, engine: Engine) -> Result:
    if run.source is not None:
        engine.init(run.source.read_parameters())
    else:
        engine.init(initial_parameters(run.model, initializer=run.train.initializer, seed=run.train.seed))
    progress = _resume(run, engine) if run.train.resume else _start(run, engine)
    if _is_finished(run):
        _conclude(run, engine, "finished", step=progress.updates)
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
    _conclude(run, engine, ending, step=trainer.progress.updates)
    return Result(run.directory.path, ending, trainer.progress.updates)


def _is_finished(run: Run) -> bool:
    return any(event["kind"] == "finished" for event in read_events(run.directory.path))


def _start(run: Run, engine: Engine) -> Progress:
    if not run.train.resume:
        run.directory.create(run.model, run.train, run.tokenizer)
    # What a run that died before its first checkpoint has logged happens again.
    EventsLog(run.directory.path).truncate_after(-1)
    MetricsLog(run.directory.path).truncate_after(-1)
    EventsLog(run.directory.path).write("started", step=0, data=run.corpus.training_key)
    return Progress(data=run.corpus.training_key, model=_digest(run.model))


def _digest(model: ModelConfig) -> str:
    """What the shape is known by: a config.json that was edited must not pass for the one that was trained."""
    return hashlib.sha256(json.dumps(to_json(model), sort_keys=True).encode()).hexdigest()


def _resume(run: Run, engine: Engine) -> Progress:
    path = run.directory.path
    steps = engine.saved_steps()
    events, metrics = EventsLog(path), MetricsLog(path)
    if not steps:
        say(f"{path} has no finished checkpoint; starting it from the beginning")
        return _start(run, engine)
    try:
        progress = Progress.from_json(engine.restore(steps[-1]))
    except (KeyError, TypeError) as error:
        newest = run.directory.checkpoints / str(steps[-1])
        remedy = "delete it to continue from an older one" if len(steps) > 1 else "there is no older one"
        raise UserError(f"checkpoint {newest} is damaged; {remedy} ({error!r})") from error
    if progress.data == CONVERTED:
        raise UserError(f"{path} was converted, not trained; start from it with --init-from {path}")
    if progress.data != run.corpus.training_key:
        raise UserError(
            f"the training data or tokenizer changed since {path} was started; it cannot be resumed exactly"
        )
    if progress.model != _digest(run.model):
        raise UserError(f"the model in {path}/config.json is not the one that was trained there; restore the file")
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
    return (
        f"out of memory with {run.train.batch_size} rows of {run.train.max_seq_len} tokens ({saved}): "
        "halve --batch-size and double --accumulation-steps, which trains the same, or lower --max-seq-len"
    )


# --- What the person reads ---


def _announce(run: Run, *, accelerator: str | None, chosen: bool) -> None:
    train, training = run.train, run.corpus.training
    parameters = parameter_count(run.model)
    if accelerator is None and chosen and not train.resume:
        say(
            f"No accelerator found: training the {train.model} preset ({parameters / 1e6:.1f}M parameters) on the CPU; "
            "--model minimind2-small chooses the 26M one."
        )
    say(
        f"{train.model or 'custom'}: {parameters:,} parameters, {train.dtype}; {run.total_updates} updates of "
        f"{train.batch_size} x {train.accumulation_steps} rows of {train.max_seq_len}; "
        f"{training.predictions_per_epoch:,} tokens a pass, {training.real_fraction:.1%} of positions real; "
        f"validating on {run.corpus.validation_documents} documents; writing {run.directory.path}"
    )
    if run.source is not None and run.source.note is not None:
        say(run.source.note)
    if run.corpus.overlap:
        say(f"{run.corpus.overlap} of the validation documents are in the training data as well")
    if run.corpus.left_out:
        say(f"left out: {run.corpus.left_out}")


def _conclude(run: Run, engine: Engine, ending: Ending, *, step: int) -> None:
    path = run.directory.path
    samples = _write_samples(run, engine) if ending == "finished" else []
    write_csv(path)
    write_report(path, config=to_json(run.train), model=to_json(run.model), samples=samples)
    last = last_values(read_metrics(path))
    figures = ", ".join(
        f"{label} {last[name]:.3f}"
        for name, label in (
            ("loss", "loss"),
            ("val_loss", "validation loss"),
            ("val_bits_per_byte", "validation bits per byte"),
        )
        if name in last
    )
    again = f"{python()} scripts/train.py --resume --out {path}"
    if ending == "finished":
        say(f"Finished at step {step}: {figures}. Curves: {path}/loss.png, {path}/report.html")
        if run.train.data:
            say(f"Next, to use it elsewhere: {python()} scripts/convert.py {path} {path}-hf --to hf")
        else:
            say(
                'Next, on your own text (one JSON object with a "text" a line): '
                f"{python()} scripts/train.py --data YOUR.jsonl"
            )
    elif ending == "interrupted":
        say(f"Interrupted at step {step}; everything is saved. Continue with: {again}")
    else:
        can_roll_back = run.train.on_non_finite == "stop"
        say(
            f"Stopped at step {step}: {run.train.max_non_finite_steps} micro-batches in a row had a loss or gradient "
            f"that was not finite (their records are in {path}/events.jsonl). The model before them is saved. "
            "Start again with a lower --learning-rate" + (", or add --on-non-finite rollback" * can_roll_back)
        )


def _write_samples(run: Run, engine: Engine) -> list[tuple[str, str]]:
    """Show what the model writes now; returns (prompt, continuation) pairs for the report."""
    questions = run.corpus.questions
    prompts = [question.prompt for question in questions] or OPENINGS
    continued = _continue(run, engine, prompts, max_new_tokens=16 if questions else 48)
    shown = list(zip(prompts, continued, strict=True))[:SHOWN_SAMPLES]
    for prompt, text in shown:
        say(f"  {prompt.strip()} -> {text.strip() or '(nothing)'}".replace("\n", " / "))
    if questions:
        say(_score(questions, continued))
    return shown


def _score(questions: Sequence[Question], continued: Sequence[str]) -> str:
    """How many answers are right, in all and by kind: the first line has to be the answer to the letter."""
    asked, right = Counter(question.kind for question in questions), Counter[str]()
    for question, text in zip(questions, continued, strict=True):
        right[question.kind] += text.strip().split("\n")[0].strip() == question.answer
    kinds = ", ".join(f"{kind} {right[kind]}/{asked[kind]}" for kind in asked)
    return f"It answers {right.total()} of {len(questions)} questions that no text it has seen contains: {kinds}."


def _continue(run: Run, engine: Engine, prompts: Sequence[str], *, max_new_tokens: int) -> list[str]:
    tokenizer = run.tokenizer
    ids = [[tokenizer.bos_id, *tokenizer.encode(prompt)] for prompt in prompts]
    continued = engine.generate(ids, max_new_tokens=max_new_tokens, stop_id=tokenizer.eos_id)
    return [tokenizer.decode(new) for new in continued]
