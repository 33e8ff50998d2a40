"""Multiple choice: exact on models that are known; intervals, verdicts, few-shot examples and prompts that are cut."""

from dataclasses import replace

import pytest
from known_scorers import PrefixScorer, TableScorer

from minigpt_jax.accuracy import Accuracy, accuracy_of
from minigpt_jax.data.exams import Item
from minigpt_jax.errors import UserError
from minigpt_jax.evaluation_tables import exam_table
from minigpt_jax.multiple_choice import Prompts, choose_examples, evaluate_choices, example_pool
from minigpt_jax.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer()
CITY = Item("What is the capital of France?", ("Rome", "Paris", "Oslo"), 1, "geography", "a.jsonl", "a.jsonl:1")
SUM = Item("二加二等于几？", ("三", "四"), 1, "算术", "b.csv", "b.csv:2")


def outcome_of(item, scorer, *, ask="text", chat=False, max_seq_len=512, **options):
    prompts = Prompts(TOKENIZER, ask=ask, chat=chat)
    report = evaluate_choices([item], prompts, scorer=scorer, max_seq_len=max_seq_len, batch_size=4, **options)
    return report.outcomes[0]


class Reading(TableScorer):
    """Remembers the rows that it was given."""

    def score(self, tokens, counts):
        self.rows = list(zip(tokens.tolist(), counts.tolist(), strict=True))
        return super().score(tokens, counts)


def decoded(ids):
    return TOKENIZER.decode(ids)


# --- Accuracy ---


@pytest.mark.parametrize(
    ("right", "asked", "low", "high"),
    # The proportions p at which |right / asked - p| is 1.96 standard errors of p, solved with 40 digits.
    [(0, 10, 0.0, 0.277532800), (5, 10, 0.236593091, 0.763406909), (10, 10, 0.722467200, 1.0),
     (50, 200, 0.195081680, 0.314340983)],
)  # fmt: skip
def test_the_interval_is_wilsons(right, asked, low, high):
    assert Accuracy(right, asked).ci95 == pytest.approx((low, high), abs=1e-9)


@pytest.mark.parametrize(
    ("right", "verdict"),
    [(50, "not distinguishable from chance"), (62, "not distinguishable from chance"), (63, "above chance"),
     (37, "below chance")],
)  # fmt: skip
def test_chance_within_the_interval_is_said(right, verdict):
    assert Accuracy(right, 200, chance=0.25).verdict == verdict


@pytest.mark.parametrize(
    ("right", "asked", "choices", "verdict"),
    [
        (1, 1, 5, "not distinguishable from chance"),  # p = 0.4, though chance lies outside the interval
        (4, 4, 2, "not distinguishable from chance"),  # 0.125
        (0, 4, 2, "not distinguishable from chance"),
        (6, 6, 2, "above chance"),  # 0.03125
        (0, 6, 2, "below chance"),
        (4, 4, 4, "above chance"),  # 0.0078
    ],
)
def test_few_items_are_judged_by_the_exact_test(right, asked, choices, verdict):
    assert Accuracy(right, asked, chance=1 / choices).verdict == verdict


def test_chance_is_the_mean_over_the_items():
    found = accuracy_of([(True, 1 / 2), (False, 1 / 4), (True, 1 / 4)])
    assert (found.right, found.asked, found.share, found.chance) == (2, 3, 2 / 3, 1 / 3)


def test_without_chance_nothing_is_said_about_it():
    found = accuracy_of([(True, None), (False, None)])
    assert (found.chance, found.verdict) == (None, "")
    assert set(found.to_json()) == {"items", "accuracy", "ci95"}


# --- Likelihood ---


def test_a_choice_costs_the_sum_of_its_own_tokens():
    found = outcome_of(CITY, TableScorer(lambda id: id % 7))
    for choice, log_likelihood in zip(CITY.choices, found.log_likelihoods, strict=True):
        assert log_likelihood == -sum(id % 7 for id in TOKENIZER.encode(" " + choice))
    assert found.answer_bytes == (4, 5, 4)


def test_the_likeliest_choice_is_the_answer():
    right, wrong = (set(TOKENIZER.encode(" " + CITY.choices[number])) for number in (1, 0))
    assert outcome_of(CITY, TableScorer(lambda id: 1.0 if id in right - wrong else 9.0)).is_right
    assert not outcome_of(CITY, TableScorer(lambda id: 1.0 if id in wrong - right else 9.0)).is_right


def test_of_equally_likely_choices_the_first_is_taken():
    scorer = TableScorer(lambda _: 0.0)
    assert outcome_of(replace(CITY, answer=0), scorer).is_right
    assert not outcome_of(CITY, scorer).is_right


def test_by_byte_a_long_answer_may_win_that_by_sum_loses():
    item = replace(CITY, choices=("no", "one long information of many bytes"), answer=1)
    found = outcome_of(item, TableScorer(lambda _: 1.0))
    assert found.log_likelihoods == (-1.0, -float(len(TOKENIZER.encode(" one long information of many bytes"))))
    assert (found.is_right, found.is_right_by_byte) == (False, True)
    short = outcome_of(replace(item, answer=0), TableScorer(lambda _: 1.0))
    assert (short.is_right, short.is_right_by_byte) == (True, False)


def test_neither_batch_size_nor_order_changes_an_outcome():
    items = [CITY, SUM, replace(CITY, question="Q " * 70), replace(SUM, question="问" * 40)]
    prompts = Prompts(TOKENIZER, ask="text", chat=False)

    def outcomes(items, batch_size):
        return evaluate_choices(items, prompts, scorer=PrefixScorer(), max_seq_len=512, batch_size=batch_size).outcomes

    expected = outcomes(items, 1)
    assert outcomes(items[::-1], 3)[::-1] == expected
    assert outcomes(items, 100) == expected


# --- Prompts ---


def test_a_question_alone_is_asked_in_its_language():
    prompts = Prompts(TOKENIZER, ask="text", chat=False)
    assert decoded(prompts.context(CITY, [])) == "<|im_start|>Question: What is the capital of France?\nAnswer:"
    assert [decoded(ids) for ids in prompts.continuations(CITY)] == [" Rome", " Paris", " Oslo"]
    assert decoded(prompts.context(SUM, [])) == "<|im_start|>问：二加二等于几？\n答："
    assert [decoded(ids) for ids in prompts.continuations(SUM)] == ["三", "四"]


def test_by_letter_all_choices_are_shown():
    prompts = Prompts(TOKENIZER, ask="letter", chat=False)
    shown = "<|im_start|>Question: What is the capital of France?\nA. Rome\nB. Paris\nC. Oslo\nAnswer:"
    assert decoded(prompts.context(CITY, [])) == shown
    assert [decoded(ids) for ids in prompts.continuations(CITY)] == [" A", " B", " C"]
    assert [decoded(ids) for ids in prompts.continuations(SUM)] == ["A", "B"]


def test_examples_come_first_with_their_answers():
    prompts = Prompts(TOKENIZER, ask="letter", chat=False)
    text = decoded(prompts.context(CITY, [SUM]))
    assert text.startswith("<|im_start|>问：二加二等于几？\nA. 三\nB. 四\n答：B\n\nQuestion: What is")
    assert decoded(Prompts(TOKENIZER, ask="text", chat=False).context(SUM, [CITY])) == (
        "<|im_start|>Question: What is the capital of France?\nAnswer: Paris\n\n问：二加二等于几？\n答："
    )


def test_in_a_chat_examples_are_earlier_turns():
    prompts = Prompts(TOKENIZER, ask="text", chat=True)
    text = decoded(prompts.context(SUM, [CITY]))
    turns = ["user\nWhat is the capital of France?", "assistant\nParis", "user\n二加二等于几？", "assistant\n"]
    assert [turn.removesuffix("<|im_end|>\n") for turn in text.split("<|im_start|>")][-4:] == turns
    assert [decoded(ids) for ids in prompts.continuations(CITY)] == ["Rome", "Paris", "Oslo"]


def test_examples_are_of_the_items_subject_where_there_are_enough():
    others = [replace(CITY, subject=subject, where=str(number)) for number, subject in enumerate("abab")]
    asked = replace(CITY, subject="b")
    assert [each.where for each in choose_examples(asked, others, 2)] == ["1", "3"]
    assert [each.where for each in choose_examples(asked, others, 3)] == ["0", "1", "2"]


def test_an_item_is_never_its_own_example():
    elsewhere = replace(CITY, choices=CITY.choices[::-1], source="other.jsonl", where="other.jsonl:7")
    assert example_pool([elsewhere, SUM], [CITY], count=1) == [SUM]
    seen = Reading(lambda _: 1.0)
    outcome_of(CITY, seen, examples=[elsewhere, SUM], few_shot=1)
    assert all(
        decoded(tokens).startswith("<|im_start|>问：二加二等于几？\n答：四\n\nQuestion:") for tokens, _ in seen.rows
    )
    with pytest.raises(UserError, match=r"--few-shot 2 takes as many items .* it has 1"):
        example_pool([elsewhere, SUM], [CITY], count=2)


def test_a_long_prompt_loses_its_beginning_alike_for_all_choices():
    item = replace(CITY, choices=("yes", "one long information of many bytes"), answer=0, question="word " * 50)
    prompts = Prompts(TOKENIZER, ask="text", chat=False)
    context = prompts.context(item, [])
    longest = max(map(len, prompts.continuations(item)))
    seen = Reading(lambda _: 1.0)
    found = outcome_of(item, seen, max_seq_len=30)
    assert found.was_cut
    kept = context[-(31 - longest) :]
    assert all(tokens[: len(kept)] == kept and not any(counts[: len(kept) - 1]) for tokens, counts in seen.rows)
    assert found.log_likelihoods == tuple(-float(len(ids)) for ids in prompts.continuations(item))
    assert not outcome_of(item, TableScorer(lambda _: 1.0), max_seq_len=len(context) + longest - 1).was_cut


def test_a_choice_that_no_row_holds_is_refused():
    item = replace(CITY, choices=("yes", "word " * 40))
    with pytest.raises(UserError, match=r"a.jsonl:1: a choice has \d+ tokens; --max-seq-len 16 is too small"):
        outcome_of(item, TableScorer(lambda _: 1.0), max_seq_len=16)


# --- The table ---


def test_the_table_says_accuracy_chance_and_what_was_cut():
    items = [replace(CITY, answer=number % 2, subject="ab"[number % 2]) for number in range(40)]
    items += [replace(SUM, answer=0, question="问 " * 40)]
    prompts = Prompts(TOKENIZER, ask="text", chat=False)
    report = evaluate_choices(items, prompts, scorer=TableScorer(lambda _: 0.0), max_seq_len=40, batch_size=16)
    table = exam_table(report, ask="text")
    assert table.figures["accuracy"] == 21 / 41
    assert table.figures["chance"] == pytest.approx((40 / 3 + 1 / 2) / 41)
    assert table.figures["cut_prompts"] == 1
    assert [table.figures[name] for name in ("loss", "perplexity", "bits_per_byte")] == [None] * 3
    shares = {name: row["accuracy"] for name, row in table.figures["by_subject"].items()}
    assert shares == {"a": 1.0, "b": 0.0, "算术": 1.0}
    assert {name: row["items"] for name, row in table.figures["by_language"].items()} == {"en": 40, "zh": 1}
    assert table.lines[-2].startswith("chance is 33.7%: above chance; by byte above chance")
    assert table.lines[-1] == "prompts that were longer than --max-seq-len and lost their beginning: 1"
