"""The sample's held-out questions: what counts as a right answer, and how the counts are put together."""

import pytest

from minigpt_jax.data.sample_questions import heldout_questions
from minigpt_jax.generation import Extension
from minigpt_jax.questions import evaluate_questions, is_right
from minigpt_jax.tokenizer import load_tokenizer

QUESTIONS = heldout_questions(count=12)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


class Knowing:
    """A decoder that goes on with the n-th text to the n-th prompt, and then ends."""

    def __init__(self, tokenizer, texts):
        self._answers = [[*tokenizer.encode(text), tokenizer.eos_id] for text in texts]

    @property
    def lengths(self):
        return [len(row) for row in self.prompts]

    def start(self, *, rows, slots):
        assert rows == len(self._answers)

    def read(self, tokens):
        self.prompts = [list(row) for row in tokens]

    def extend(self, configs, *, uniforms, stop_ids, is_active, num_logprobs=None):
        steps = uniforms.shape[1]
        new = [answer[:steps] if active else [] for answer, active in zip(self._answers, is_active, strict=True)]
        self._answers = [answer[len(ids) :] for answer, ids in zip(self._answers, new, strict=True)]
        return Extension(new, [[] for _ in new])


def test_right_is_the_first_line_to_the_letter():
    question = QUESTIONS[0]
    assert is_right(question, f" {question.answer}")
    assert is_right(question, f"\n{question.answer}\nand more")
    assert not is_right(question, question.wrong)
    assert not is_right(question, f"{question.answer} indeed")
    assert not is_right(question, "")


@pytest.mark.parametrize("chat", [False, True])
def test_each_answer_is_held_against_its_own_question(tokenizer, chat):
    # Right where the number is even; else the answer to the next question, or nothing.
    texts = [
        each.answer if number % 2 == 0 else QUESTIONS[(number + 1) % 12].answer if number % 4 == 1 else ""
        for number, each in enumerate(QUESTIONS)
    ]
    expected = [text == each.answer for text, each in zip(texts, QUESTIONS, strict=True)]
    assert 0 < sum(expected) < 12
    decoder = Knowing(tokenizer, texts)
    report = evaluate_questions(QUESTIONS, decoder=decoder, tokenizer=tokenizer, chat=chat)
    assert (report.total.right, report.total.asked) == (sum(expected), 12)
    for name, groups in (("kind", report.by_kind), ("language", report.by_language)):
        counted = {group: [0, 0] for group in groups}
        for each, right in zip(QUESTIONS, expected, strict=True):
            counted[getattr(each, name)][0] += right
            counted[getattr(each, name)][1] += 1
        assert {group: [found.right, found.asked] for group, found in groups.items()} == counted
    for prompt, each in zip(decoder.prompts, QUESTIONS, strict=True):
        assert each.question in tokenizer.decode(prompt)
        assert (each.prompt in tokenizer.decode(prompt)) != chat


def test_an_answer_that_does_not_end_is_cut_and_judged_by_its_first_line(tokenizer):
    texts = [f"{each.answer}\n" + "on and on " * 40 for each in QUESTIONS]
    report = evaluate_questions(QUESTIONS, decoder=Knowing(tokenizer, texts), tokenizer=tokenizer, chat=False)
    assert report.total.right == 12
