"""How often a model finds the right choice the likeliest. Framework-free; the model is a Scorer.

Two ways of asking. `text` shows the question alone, and compares how likely the text of each choice is as its answer:
by the sum over its tokens (what lm-eval calls acc) and by that sum divided by its length in UTF-8 bytes (its acc_bytes;
its acc_norm divides by characters, which is nearly the same within a language). `letter` shows the choices with their
letters, as MMLU and C-Eval are asked, and compares the letters; a small model does not get that far.

Context and choice are encoded apart, so that every choice of an item follows the very same tokens. Of equally likely
choices the first is taken. What is too long for the model's row is cut at its beginning, alike for all choices of an
item, and counted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Literal, NamedTuple

import numpy as np

from minigpt_jax.accuracy import Accuracy, accuracy_of
from minigpt_jax.data.chat import ChatEncoder
from minigpt_jax.data.exams import Item
from minigpt_jax.data.sample_questions import prompt_for, question_and_answer
from minigpt_jax.errors import UserError
from minigpt_jax.languages import language_of
from minigpt_jax.scoring import Row, Scorer, continuation_row, score_rows
from minigpt_jax.tokenizer import Tokenizer

Asking = Literal["text", "letter"]


# --- How an item is asked ---


class Prompts:
    """Items as token ids.

    Args:
        tokenizer: the model's.
        ask: by the choices' texts, or by their letters.
        chat: ask as a user by the chat template; few-shot examples are earlier turns. Otherwise all is one text.
    """

    def __init__(self, tokenizer: Tokenizer, *, ask: Asking, chat: bool):
        self._tokenizer, self._ask = tokenizer, ask
        self._encoder = ChatEncoder(tokenizer) if chat else None

    def context(self, item: Item, examples: Sequence[Item]) -> list[int]:
        """The ids before the answer."""
        if self._encoder is not None:
            turns = [
                {"role": role, "content": content}
                for example in examples
                for role, content in (("user", self._question(example)), ("assistant", self._right_answer(example)))
            ]
            return self._encoder.encode_prompt([*turns, {"role": "user", "content": self._question(item)}])
        shown = [
            question_and_answer(self._question(each), self._right_answer(each), _layout(each)) for each in examples
        ]
        text = "\n\n".join([*shown, prompt_for(self._question(item), _layout(item))])
        return [self._tokenizer.bos_id, *self._tokenizer.encode(text)]

    def continuations(self, item: Item) -> list[list[int]]:
        """The ids of each choice."""
        space = " " if self._encoder is None and _layout(item) == "en" else ""
        return [self._tokenizer.encode(space + answer) for answer in self.answers(item)]

    def answers(self, item: Item) -> list[str]:
        """What each choice is as an answer."""
        return list(item.choices if self._ask == "text" else ascii_uppercase[: len(item.choices)])

    def _right_answer(self, item: Item) -> str:
        return self.answers(item)[item.answer]

    def _question(self, item: Item) -> str:
        if self._ask == "text":
            return item.question
        choices = (f"{letter}. {choice}" for letter, choice in zip(ascii_uppercase, item.choices, strict=False))
        return "\n".join([item.question, *choices])


def choose_examples(item: Item, pool: Sequence[Item], count: int) -> list[Item]:
    """The first `count` of a pool that are of the item's subject; of any where those are too few."""
    own = [example for example in pool if example.subject == item.subject]
    return list((own if len(own) >= count else pool)[:count])


def example_pool(candidates: Sequence[Item], items: Sequence[Item], *, count: int) -> list[Item]:
    """The candidates for few-shot examples that are not themselves evaluated.

    Raises:
        UserError: there are fewer than `count`.
    """
    evaluated = {item.content for item in items}
    pool = [candidate for candidate in candidates if candidate.content not in evaluated]
    if len(pool) < count:
        raise UserError(
            f"--few-shot {count} takes as many items of --few-shot-data that are not evaluated themselves; it has "
            f"{len(pool)}"
        )
    return pool


def _layout(item: Item) -> Literal["en", "zh"]:
    return "zh" if language_of(item.question) == "zh" else "en"


# --- What came out ---


@dataclass(frozen=True)
class Outcome:
    """One item, and how likely the model finds its choices."""

    item: Item
    log_likelihoods: tuple[float, ...]
    """Of each choice, in nats, summed over its tokens."""
    answer_bytes: tuple[int, ...]
    """UTF-8 bytes of each."""
    tokens: int
    """Tokens of all choices."""
    was_cut: bool
    """Whether the beginning of the prompt did not fit."""

    @property
    def is_right(self) -> bool:
        """Whether the right choice is the likeliest."""
        return int(np.argmax(self.log_likelihoods)) == self.item.answer

    @property
    def is_right_by_byte(self) -> bool:
        """Whether the right choice is the likeliest for its length."""
        return int(np.argmax(np.divide(self.log_likelihoods, self.answer_bytes))) == self.item.answer

    @property
    def chance(self) -> float:
        """Of guessing right."""
        return 1 / len(self.item.choices)


class Accuracies(NamedTuple):
    """Of one group of items."""

    by_sum: Accuracy
    by_byte: Accuracy


@dataclass(frozen=True)
class ExamReport:
    """The outcomes of all items, at least one."""

    outcomes: tuple[Outcome, ...]

    @property
    def total(self) -> Accuracies:
        """Over all items."""
        return _accuracies(self.outcomes)

    def by(self, group_of: Callable[[Item], str]) -> dict[str, Accuracies]:
        """Over the items of each group, those of no name left out."""
        groups: dict[str, list[Outcome]] = {}
        for outcome in self.outcomes:
            groups.setdefault(group_of(outcome.item), []).append(outcome)
        return {name: _accuracies(outcomes) for name, outcomes in groups.items() if name}


def _accuracies(outcomes: Sequence[Outcome]) -> Accuracies:
    return Accuracies(
        accuracy_of((outcome.is_right, outcome.chance) for outcome in outcomes),
        accuracy_of((outcome.is_right_by_byte, outcome.chance) for outcome in outcomes),
    )


# --- Evaluation ---


def evaluate_choices(
    items: Sequence[Item],
    prompts: Prompts,
    *,
    scorer: Scorer,
    max_seq_len: int,
    batch_size: int,
    examples: Sequence[Item] = (),
    few_shot: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> ExamReport:
    """Ask a model every item.

    Args:
        items: at least one.
        prompts: how they are asked.
        scorer: of the model.
        max_seq_len: the most predictions of a row.
        batch_size: rows that are read at once; a choice is a row.
        examples: few-shot examples are taken from them; those that are among the items are not.
        few_shot: how many an item gets.
        on_progress: told how many choices are done, and how many there are.

    Raises:
        UserError: too few examples, a choice of more than `max_seq_len` tokens, or a likelihood that is not finite.
    """
    pool = example_pool(examples, items, count=few_shot)
    asked = [_rows(item, prompts, choose_examples(item, pool, few_shot), max_seq_len=max_seq_len) for item in items]
    rows = [row for item_rows, _ in asked for row in item_rows]

    def show(done: int) -> None:
        if on_progress is not None:
            on_progress(done, len(rows))

    scores = iter(score_rows(scorer, rows, batch_size=batch_size, max_seq_len=max_seq_len, on_progress=show))
    outcomes = []
    for item, (item_rows, was_cut) in zip(items, asked, strict=True):
        found = [next(scores).log_probabilities for _ in item_rows]
        sums = tuple(float(each.sum(dtype=np.float64)) for each in found)
        sizes = tuple(len(answer.encode("utf-8")) for answer in prompts.answers(item))
        outcomes.append(Outcome(item, sums, sizes, sum(map(len, found)), was_cut))
    return ExamReport(tuple(outcomes))


def _rows(item: Item, prompts: Prompts, examples: Sequence[Item], *, max_seq_len: int) -> tuple[list[Row], bool]:
    """A row for each choice, and whether the context was cut to fit."""
    context, continuations = prompts.context(item, examples), prompts.continuations(item)
    longest = max(map(len, continuations))
    room = max_seq_len + 1 - longest
    if room < 1:
        raise UserError(f"{item.where}: a choice has {longest} tokens; --max-seq-len {max_seq_len} is too small")
    return [continuation_row(context[-room:], each) for each in continuations], len(context) > room
