"""One evaluation of a model in any format: read the data, open the model in the framework asked for, measure."""

from typing import Any, NamedTuple

from minigpt_bridge.decoders import open_decoder, open_scorer
from minigpt_jax.config import Backend, TrainConfig
from minigpt_jax.console import work_progress
from minigpt_jax.data.corpus import QUESTIONS, sample_files
from minigpt_jax.data.exams import EXAM_SUFFIXES, Item, read_items, sample_items
from minigpt_jax.data.records import expand_paths
from minigpt_jax.data.sample_questions import heldout_questions
from minigpt_jax.evaluation import evaluate_loss
from minigpt_jax.evaluation_config import EvaluationConfig
from minigpt_jax.evaluation_tables import Table, exam_table, loss_table, questions_table
from minigpt_jax.multiple_choice import Prompts, evaluate_choices
from minigpt_jax.questions import evaluate_questions


class Opening(NamedTuple):
    """Which model, and how it computes; as for `open_decoder`."""

    source: str
    backend: Backend
    dtype: str
    int8: bool
    adapter: str | None

    @property
    def options(self) -> dict[str, Any]:
        """All but the source."""
        options = self._asdict()
        del options["source"]
        return options


class Measured(NamedTuple):
    """What was found."""

    table: Table
    note: str | None
    """What was taken for granted about the model and a person should know."""


def measure(model: Opening, config: EvaluationConfig) -> Measured:
    """Evaluate a model; a bar shows how far loss and multiple choice are.

    Raises:
        UserError: the model, an adapter or the data cannot be read, or there is nothing to measure.
    """
    match config.task:
        case "loss":
            return _loss(model, config)
        case "multiple-choice":
            return _multiple_choice(model, config)
        case "questions":
            return _questions(model, config)


def _loss(model: Opening, config: EvaluationConfig) -> Measured:
    paths = expand_paths(config.data or [sample_files(TrainConfig.seed)["pretrain_val"]])
    ready = open_scorer(model.source, **model.options)
    with work_progress("scoring") as report:
        found = evaluate_loss(
            paths,
            scorer=ready.scorer,
            tokenizer=ready.tokenizer,
            max_seq_len=min(config.max_seq_len, ready.config.max_position_embeddings),
            batch_size=config.batch_size,
            on_progress=report,
        )
    return Measured(loss_table(found), ready.note)


def _multiple_choice(model: Opening, config: EvaluationConfig) -> Measured:
    items = _items(config.data) if config.data else sample_items(count=QUESTIONS)
    examples = _items(config.few_shot_data) if config.few_shot else []
    ready = open_scorer(model.source, **model.options)
    with work_progress("scoring") as report:
        found = evaluate_choices(
            items,
            Prompts(ready.tokenizer, ask=config.ask, chat=config.chat),
            scorer=ready.scorer,
            max_seq_len=min(config.max_seq_len, ready.config.max_position_embeddings),
            batch_size=config.batch_size,
            examples=examples,
            few_shot=config.few_shot,
            on_progress=report,
        )
    return Measured(exam_table(found, ask=config.ask), ready.note)


def _items(paths: tuple[str, ...]) -> list[Item]:
    return read_items(expand_paths(paths, suffixes=EXAM_SUFFIXES))


def _questions(model: Opening, config: EvaluationConfig) -> Measured:
    ready = open_decoder(model.source, **model.options)
    questions = heldout_questions(count=QUESTIONS)
    found = evaluate_questions(questions, decoder=ready.decoder, tokenizer=ready.tokenizer, chat=config.chat)
    return Measured(questions_table(found), ready.note)
