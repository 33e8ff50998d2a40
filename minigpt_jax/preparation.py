"""Everything that is known before the first step: the configuration resolved, the model found, the data planned.

Framework-free. Nothing is written into the run directory here, and whatever can be wrong is found here.
"""

import dataclasses
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

from minigpt_jax.adapter_tree import adapter_shapes
from minigpt_jax.config import ModelConfig, TrainConfig
from minigpt_jax.console import work_progress
from minigpt_jax.data.corpus import Corpus, load_corpus
from minigpt_jax.defaults import default_warmup, model_config, require_model_to_start_from, resolve
from minigpt_jax.errors import UserError
from minigpt_jax.formats.model_files import Model
from minigpt_jax.run_directory import RunDirectory, existing_run_directory, new_run_directory, resumed_config
from minigpt_jax.tokenizer import Tokenizer, load_tokenizer
from minigpt_jax.tracking import require_tracker

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
    """The model that the run starts from; None for fresh weights, and on resume where it is not needed again."""
    teacher: Model | None = None
    """In distill, the model to learn from."""


def prepare(config: TrainConfig, *, given: Collection[str], accelerator: str | None, open_model: ModelOpener) -> Run:
    """Resolve the configuration, check everything, load and plan the data."""
    require_tracker(config.tracker)
    source = None
    if config.resume:
        directory = existing_run_directory(config.out)
        model, stored = directory.read_config()
        train = resumed_config(stored, config, given, where=directory.path)
        tokenizer = directory.read_tokenizer()
        if train.init_from is not None and (train.holds_first_model or not directory.saved_steps()):
            source = open_model(train.init_from)
            if source.config != model:
                raise UserError(f"{train.init_from} is not the model that {directory.path} was started from")
        teacher = _open_teacher(train, open_model)
    else:
        require_model_to_start_from(config)
        source = open_model(config.init_from) if config.init_from is not None else None
        teacher = _open_teacher(config, open_model)
        shape = source.config if source is not None else None
        train = resolve(config, accelerator=accelerator, source=shape)
        directory = new_run_directory(config.out, name=f"{train.stage}-{train.model or 'custom'}")
        model = model_config(train, source=shape)
        told_by = source or teacher
        tokenizer = load_tokenizer(train.tokenizer) if told_by is None else _tokenizer_of(told_by, train)
    if train.stage == "lora":
        adapter_shapes(model, train.lora)
    if teacher is not None:
        _require_teacher_fits(teacher, model, tokenizer, train)
    with work_progress("tokenizing") as on_progress:
        corpus = load_corpus(train, tokenizer, model_vocab_size=model.vocab_size, on_progress=on_progress)
    total_updates = train.steps or math.ceil(len(corpus.training) / train.accumulation_steps)
    if train.warmup_steps is None:
        train = dataclasses.replace(train, warmup_steps=default_warmup(total_updates))
    return Run(directory, model, train, tokenizer, corpus, total_updates, source, teacher)


def _open_teacher(train: TrainConfig, open_model: ModelOpener) -> Model | None:
    return open_model(train.teacher) if train.stage == "distill" and train.teacher is not None else None


def _require_teacher_fits(teacher: Model, model: ModelConfig, tokenizer: Tokenizer, train: TrainConfig) -> None:
    """Refuse a teacher whose distribution is over other tokens than the student's, or that reads shorter rows.

    Raises:
        UserError: it is.
    """
    if teacher.config.vocab_size != model.vocab_size:
        raise UserError(
            f"--teacher {train.teacher} has a vocabulary of {teacher.config.vocab_size}, the student one of "
            f"{model.vocab_size}; a teacher needs the student's own"
        )
    longest = teacher.config.max_position_embeddings
    if train.max_seq_len > longest:
        raise UserError(f"--max-seq-len {train.max_seq_len} is more than the {longest} of --teacher {train.teacher}")
    if teacher.require_tokenizer().sha256 != tokenizer.sha256:
        raise UserError(
            f"--teacher {train.teacher} was trained with another tokenizer than the student; equal ids would mean "
            "other text to it"
        )


def _tokenizer_of(source: Model, train: TrainConfig) -> Tokenizer:
    """The tokenizer that the model was trained with."""
    asked = None if train.tokenizer is None else load_tokenizer(train.tokenizer)
    if source.tokenizer is None and asked is not None:
        return asked
    tokenizer = source.require_tokenizer()
    if asked is not None and asked.sha256 != tokenizer.sha256:
        raise UserError(f"--tokenizer {train.tokenizer} is not the tokenizer that {source.path} was trained with")
    return tokenizer
