"""The held-out questions of the sample corpus: how a model is asked, and when its answer is right.

Framework-free. Exact match: the first line of what the model writes greedily has to be the answer to the letter.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from minigpt_jax.accuracy import Accuracy, accuracy_of
from minigpt_jax.data.chat import ChatEncoder
from minigpt_jax.data.sample_questions import Question
from minigpt_jax.generation import Decoder, greedy
from minigpt_jax.tokenizer import Tokenizer

ANSWER_TOKENS = 16
"""The most tokens of an answer; no right one has as many."""


@dataclass(frozen=True)
class QuestionsReport:
    """Share of the questions that were answered, in all and by what they are."""

    total: Accuracy
    by_kind: dict[str, Accuracy]
    by_language: dict[str, Accuracy]


def prompt_ids(prompts: Sequence[str], tokenizer: Tokenizer, *, chat: bool) -> list[list[int]]:
    """Ids of the beginnings of texts, or of user messages up to where the assistant answers."""
    if not chat:
        return [[tokenizer.bos_id, *tokenizer.encode(prompt)] for prompt in prompts]
    encoder = ChatEncoder(tokenizer)
    return [encoder.encode_prompt([{"role": "user", "content": prompt}]) for prompt in prompts]


def is_right(question: Question, continued: str) -> bool:
    """Whether the first line that a model wrote is the answer to the letter."""
    return continued.strip().split("\n")[0].strip() == question.answer


def evaluate_questions(
    questions: Sequence[Question], *, decoder: Decoder, tokenizer: Tokenizer, chat: bool
) -> QuestionsReport:  # fmt: skip
    """Ask a model each question.

    Args:
        questions: at least one.
        decoder: of the model; its rows are replaced.
        tokenizer: the model's.
        chat: ask as a user by the chat template, instead of letting the model go on with a text.
    """
    prompts = [question.question if chat else question.prompt for question in questions]
    ids = prompt_ids(prompts, tokenizer, chat=chat)
    continued = greedy(decoder, ids, max_new_tokens=ANSWER_TOKENS, stop_id=tokenizer.eos_id)
    rights = [
        (question, is_right(question, tokenizer.decode(new)))
        for question, new in zip(questions, continued, strict=True)
    ]

    def table(name: str) -> dict[str, Accuracy]:
        groups = dict.fromkeys(getattr(question, name) for question in questions)
        return {
            group: accuracy_of((right, None) for question, right in rights if getattr(question, name) == group)
            for group in groups
        }

    return QuestionsReport(accuracy_of((right, None) for _, right in rights), table("kind"), table("language"))
