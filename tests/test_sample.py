"""The sample corpus: what is held out stays out, what is asked is true, and the same seed gives the same bytes."""

import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from functools import cache

import pytest

from minigpt_jax.data import sample, sample_questions, sample_stories, sample_world
from minigpt_jax.data.sample import (
    Question,
    conversations,
    heldout_questions,
    preference_pairs,
    pretrain_texts,
    validation_texts,
    write_sample,
)
from minigpt_jax.errors import UserError

SEEDS = (0, 1, 42)
LAYOUT = re.compile(r"Question: (.+)\nAnswer: (.+)|问：(.+)\n答：(.+)")


@cache
def two_megabytes(seed: int) -> list[str]:
    return list(pretrain_texts(seed=seed, target_bytes=2_000_000))


def pretrain(seed: int) -> list[str]:
    return two_megabytes(seed)[:2000]


@cache
def sft(seed: int) -> list[list[dict[str, str]]]:
    return list(conversations(seed=seed))


@cache
def pairs(seed: int) -> list[dict[str, list[dict[str, str]]]]:
    return list(preference_pairs(seed=seed))


@cache
def heldout() -> list[Question]:
    return heldout_questions(count=1000)


def wording(question: Question) -> str:
    """The question without the layout of the prompt, as a user would put it."""
    return re.sub(r"^Question: |\nAnswer:$|^问：|\n答：$", "", question.prompt)


@cache
def asked_in_training() -> list[tuple[str, str]]:
    """Every question and answer that training data shows, from each stream."""
    shown = []
    for seed in SEEDS:
        for english, answer, chinese, chinese_answer in LAYOUT.findall("\n".join(pretrain(seed))):
            shown.append((english or chinese, answer or chinese_answer))
        for messages in (*sft(seed), *(pair["chosen"] for pair in pairs(seed))):
            for user, assistant in itertools.pairwise(messages):
                if user["role"] == "user":
                    shown.append((user["content"], assistant["content"]))
    return shown


def non_ascii_share(texts: list[str]) -> float:
    text = "".join(texts)
    return 1 - sum(map(str.isascii, text)) / len(text.encode())


# --- Determinism ---


def test_a_stream_is_a_prefix_of_any_longer_one():
    longer = pretrain(0)
    shorter = list(pretrain_texts(seed=0, target_bytes=50_000))
    assert shorter == longer[: len(shorter)]
    assert list(conversations(seed=0, count=30)) == sft(0)[:30]
    assert list(preference_pairs(seed=0, count=30)) == pairs(0)[:30]


def test_a_stream_stops_at_the_first_document_that_reaches_the_target():
    for stream in (pretrain_texts, validation_texts):
        sizes = [len(text.encode()) for text in stream(seed=3, target_bytes=20_000)]
        assert sum(sizes[:-1]) < 20_000 <= sum(sizes)
    assert list(pretrain_texts(seed=3, target_bytes=0)) == []


def test_the_bytes_do_not_depend_on_the_interpreters_hash_seed(tmp_path):
    program = "import sys, pathlib; from minigpt_jax.data.sample import *;"
    program += "write_sample(pathlib.Path(sys.argv[1]), seed=5, target_bytes=30_000)"
    digests = set()
    for hash_seed in ("1", "2"):
        directory = tmp_path / hash_seed
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        subprocess.run([sys.executable, "-c", program, str(directory)], check=True, env=environment)
        contents = [path.read_bytes() for path in sorted(directory.iterdir())]
        digests.add(hashlib.sha256(b"".join(contents)).hexdigest())
    assert len(digests) == 1


def test_other_seeds_give_other_text():
    assert not set(pretrain(0)[:50]) & set(pretrain(1)[:50])
    assert sft(0)[:50] != sft(1)[:50]
    assert pairs(0)[:50] != pairs(1)[:50]
    assert heldout_questions(seed=0) != heldout_questions(seed=1)


# --- What the text is like ---


@pytest.mark.parametrize("seed", SEEDS)
def test_each_language_has_between_35_and_65_percent_of_the_bytes(seed):
    assert 0.35 < non_ascii_share(pretrain(seed)) < 0.65
    assert 0.35 < non_ascii_share(list(validation_texts(seed=seed))) < 0.65
    assert 0.35 < non_ascii_share([message["content"] for messages in sft(seed) for message in messages]) < 0.65


def test_fewer_than_3_documents_in_1000_are_repeated_at_2_megabytes():
    documents = two_megabytes(0)
    assert 1 - len(set(documents)) / len(documents) < 0.003  # measured: 3 of 6,217


def test_documents_are_between_one_line_and_1500_characters():
    lengths = [len(document) for document in pretrain(0)]
    assert min(lengths) > 5
    assert max(lengths) <= 1500
    assert any("\n" not in document for document in pretrain(0))


def test_text_is_clean_no_slot_unfilled_no_stray_space_no_half_width_stop_after_chinese():
    for text in (*pretrain(0), *(message["content"] for messages in sft(0) for message in messages)):
        assert text == text.strip()
        assert not re.search(r"[{}|]|  | \n|[\u4e00-\u9fff] ?[,.?!:]|\bNone\b", text), text


def test_english_articles_fit_the_word_that_follows():
    text = "\n".join(pretrain(0))
    assert not re.findall(r"\b[Aa] [aeiou]\w+|\b[Aa]n (?!hour)[^aeiou\W]\w+", text)


def test_pronouns_of_a_story_tell_its_two_people_apart():
    gender = {person.en: person.pronoun for person in sample_world.PEOPLE}
    stories = [document.split("\n")[0] for document in pretrain(0) if "wanted" in document]
    casts = [{name for name in gender if re.search(rf"\b{name}\b", story)} for story in stories]
    assert stories
    assert all(len({gender[name] for name in cast}) == len(cast) for cast in casts)


def test_both_languages_tell_the_same_stories_with_as_many_questions():
    english, chinese = sample_stories.STORIES["en"], sample_stories.STORIES["zh"]
    assert len(english) == len(chinese)
    assert [story.count("\nQ ") for story in english] == [story.count("\nQ ") for story in chinese]


def test_the_memory_that_generating_needs_does_not_grow_with_the_text():
    tracemalloc.start()
    try:
        for _ in pretrain_texts(seed=7, target_bytes=300_000):
            pass
        assert tracemalloc.get_traced_memory()[1] < 150_000
    finally:
        tracemalloc.stop()


# --- Held out ---


@pytest.mark.parametrize("seed", SEEDS)
def test_no_stream_of_any_seed_contains_a_held_out_prompt(seed):
    streams = [two_megabytes(seed), list(validation_texts(seed=seed))]
    training = "\n".join(itertools.chain(*streams)) + json.dumps([sft(seed), pairs(seed)], ensure_ascii=False)
    training = training.replace('\\"', '"')
    assert [question.prompt for question in heldout() if question.prompt in training] == []


def test_nobody_asks_a_held_out_question_in_plain_words_either():
    shown = {question for question, _ in asked_in_training()}
    assert len(shown) > 5000
    assert [question for question in map(wording, heldout()) if question in shown] == []


def test_a_held_out_pair_of_numbers_is_never_calculated_in_any_layout_or_language():
    patterns = {"add": r"(\d+)(?: \+ | plus |加)(\d+)", "subtract": r"(\d+)(?: - | minus |减)(\d+)"}
    for kind, pattern in patterns.items():
        text = "\n".join(itertools.chain(*map(pretrain, SEEDS)))
        shown = set(re.findall(pattern, text))
        hidden = {numbers for q in heldout() if q.kind == kind for numbers in re.findall(pattern, q.prompt)}
        assert len(shown) > 80
        assert len(hidden) > 8
        assert not shown & hidden


def test_held_out_questions_are_distinct_and_cover_every_kind_in_both_languages():
    questions = heldout_questions()
    cells = {(question.kind, question.language) for question in questions}
    assert len({question.prompt for question in questions}) == len(questions) == 200
    assert cells == set(itertools.product(sample_questions.KINDS, ("en", "zh")))


def test_more_held_out_questions_than_there_are_is_a_clear_error(monkeypatch):
    monkeypatch.setattr(sample_questions, "KINDS", {"opposite": sample_questions.KINDS["opposite"]})
    with pytest.raises(UserError, match="no more than"):
        heldout_questions(count=500)


def test_every_fact_is_told_and_asked_in_training_in_each_language():
    text = "\n".join(itertools.chain(*map(pretrain, SEEDS)))
    shown = {question for question, _ in asked_in_training()}
    for (relation, subject), language in itertools.product(sample_world.facts(), ("en", "zh")):
        slots = sample_world.subject_slots(subject, pronoun=False)
        questions = {sample_world.fill(template, slots, language) for template in relation.questions[language]}
        slots["v"] = sample_world.value_of(relation, getattr(subject, relation.name))
        statements = [sample_world.fill(template, slots, language) for template in relation.statements[language]]
        assert questions & shown, (relation.name, subject.en, language)
        assert any(statement in text for statement in statements), (relation.name, subject.en, language)


def test_a_word_or_number_in_a_held_out_phrasing_is_asked_in_another_phrasing_in_training():
    shown = {question for question, _ in asked_in_training()}
    checked = 0
    kinds = {
        "opposite": "opposite",
        "category": "category",
        "translate": "translate",
        "after": "order",
        "before": "order",
    }
    for name, kind in kinds.items():
        questions = [wording(question) for question in heldout() if question.kind == kind]
        for templates in sample_questions.ASKS[name].values():
            patterns = [re.sub(r"\\{[ax]\\}", "(.+)", re.escape(template)) for template in templates]
            for question, pattern in itertools.product(questions, patterns):
                if found := re.fullmatch(pattern, question):
                    others = {template.format(x=found[1], a=found[1]) for template in templates}
                    assert others & shown, question
                    checked += 1
    assert checked > 50  # measured: 56


def test_validation_documents_are_in_no_training_stream():
    validation = {text for seed in SEEDS for text in validation_texts(seed=seed, target_bytes=100_000)}
    assert not validation & {text for seed in SEEDS for text in pretrain(seed)}
    assert not any(map(sample_questions.is_heldout, pretrain(0)))
    assert all(map(sample_questions.is_heldout, validation))


# --- True ---


def everything_answered() -> list[tuple[str, str]]:
    return [*asked_in_training(), *((wording(question), question.answer) for question in heldout())]


def test_sums_and_differences_are_right():
    operators = {"+": 1, "plus": 1, "加": 1, "-": -1, "minus": -1, "减": -1}
    checked = 0
    for question, answer in everything_answered():
        if found := re.search(r"(\d+) ?(\+|plus|加|-|minus|减) ?(\d+)", question):
            a, operator, b = found.groups()
            assert answer.strip(".。") == str(int(a) + operators[operator] * int(b)), question
            checked += 1
        elif found := re.search(r"has (\d+) .* (gets|gives away) (\d+)|有(\d+)\D+(又得到|送给别人)(\d+)", question):
            a, verb, b = (group for group in found.groups() if group)
            expected = int(a) + int(b) if verb in ("gets", "又得到") else int(a) - int(b)
            assert re.match(r"\d+", answer).group() == str(expected), question
            checked += 1
    assert checked > 1000


def test_bare_arithmetic_lines_are_right():
    text = "\n".join(pretrain(0))
    lines = re.findall(r"^(\d+ [+-] \d+) = (\d+)$|^(\d+ [<>] \d+)$", text, re.MULTILINE)
    assert len(lines) > 200
    for calculation, result, comparison in lines:
        assert eval(comparison) if comparison else eval(calculation) == int(result)


def test_comparisons_and_neighbours_are_right():
    truth = {"larger": max, "smaller": min, "after": lambda number: number + 1, "before": lambda number: number - 1}
    checked = dict.fromkeys(truth, 0)
    templates = {
        re.compile(re.sub(r"\\{[ab]\\}", r"(\\d+)", re.escape(template))): name
        for name in truth
        for template in itertools.chain(*sample_questions.ASKS[name].values())
    }
    for question, answer in everything_answered():
        for template, name in templates.items():
            if found := template.fullmatch(question):
                assert answer.strip(".。") == str(truth[name](*map(int, found.groups()))), question
                checked[name] += 1
    assert min(checked.values()) > 300


def test_counts_are_right():
    checked = 0
    for question, answer in everything_answered():
        if found := re.match(r"Count the \w+: ([^.]+)\.|数一数：([^。]+)。", question):
            count = len(re.split(", |、", found[1] or found[2]))
            assert re.match(r"\d+", answer).group() == str(count), question
            checked += 1
    assert checked > 300


def test_answers_about_a_situation_repeat_what_it_says():
    kinds = ("place", "two_places", "colour", "who")
    for question in heldout():
        if question.kind in kinds:
            situation = re.split(r"(?<=[.。])", wording(question))
            assert question.answer.strip(".。").lower() in "".join(situation[:-1]).lower(), question


def test_facts_are_answered_as_the_world_has_them():
    truth = {}
    for (relation, subject), language in itertools.product(sample_world.facts(), ("en", "zh")):
        for template in relation.questions[language]:
            value = sample_world.value_of(relation, getattr(subject, relation.name))
            asked = sample_world.fill(template, sample_world.subject_slots(subject, pronoun=False), language)
            truth[asked] = getattr(value, language)
    checked = [(truth[q], answer) for q, answer in everything_answered() if q in truth]
    assert len(checked) > 3000
    assert all(answer.lower() in (f"{value}.".lower(), f"{value}。") for value, answer in checked)


# --- Conversations and preferences ---


@pytest.mark.parametrize("seed", SEEDS)
def test_a_conversation_alternates_and_ends_with_the_assistant(seed):
    for messages in sft(seed):
        roles = [message["role"] for message in messages]
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns == ["user", "assistant"] * (len(turns) // 2)
        assert turns
        assert all(set(message) == {"role", "content"} and message["content"] for message in messages)


def test_conversations_include_several_turns_system_messages_and_stories():
    lengths = [len([message for message in messages if message["role"] == "user"]) for messages in sft(0)]
    assert len(sft(0)) == 2000
    assert 0.5 < sum(length > 1 for length in lengths) / len(lengths) < 0.8
    assert 0.1 < sum(messages[0]["role"] == "system" for messages in sft(0)) / len(lengths) < 0.25
    assert sum(len(messages[-1]["content"]) > 150 for messages in sft(0)) > 20


@pytest.mark.parametrize("seed", SEEDS)
def test_the_sides_of_a_preference_share_their_prompt_and_differ_in_the_answer(seed):
    assert len(pairs(seed)) == 1000
    for pair in pairs(seed):
        assert set(pair) == {"chosen", "rejected"}
        assert pair["chosen"][:-1] == pair["rejected"][:-1]
        assert pair["chosen"][-2]["role"] == "user"
        assert pair["chosen"][-1]["role"] == pair["rejected"][-1]["role"] == "assistant"
        assert pair["chosen"][-1]["content"] != pair["rejected"][-1]["content"]


def test_the_chosen_answer_is_the_one_that_pretraining_teaches():
    taught = {}
    for seed in SEEDS:
        for english, answer, chinese, chinese_answer in LAYOUT.findall("\n".join(pretrain(seed))):
            taught[english or chinese] = answer or chinese_answer
    shared = [pair for pair in pairs(0) if pair["chosen"][-2]["content"] in taught]
    assert len(shared) > 300
    for pair in shared:
        assert pair["chosen"][-1]["content"] == taught[pair["chosen"][-2]["content"]]
        assert pair["rejected"][-1]["content"] != taught[pair["chosen"][-2]["content"]]


# --- Files ---


def test_files_hold_the_streams_as_jsonl(tmp_path):
    paths = write_sample(tmp_path / "new", seed=2, target_bytes=20_000)
    records = {
        stage: [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for stage, path in paths.items()
    }
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(path.name for path in paths.values())
    assert records == {
        "pretrain": [{"text": text} for text in pretrain_texts(seed=2, target_bytes=20_000)],
        "pretrain_val": [{"text": text} for text in validation_texts(seed=2)],
        "sft": [{"conversations": messages} for messages in conversations(seed=2)],
        "dpo": list(preference_pairs(seed=2)),
    }


def test_files_that_are_right_are_left_alone_and_others_replaced(tmp_path):
    paths = write_sample(tmp_path, seed=2, target_bytes=20_000)
    before = {stage: (path.stat().st_ino, path.stat().st_mtime_ns) for stage, path in paths.items()}
    paths["sft"].write_text("something else")
    write_sample(tmp_path, seed=2, target_bytes=20_000)
    after = {stage: (path.stat().st_ino, path.stat().st_mtime_ns) for stage, path in paths.items()}
    assert {stage for stage in paths if before[stage] != after[stage]} == {"sft"}
    assert paths["sft"].read_text(encoding="utf-8").startswith('{"conversations"')


def test_a_write_that_fails_leaves_the_old_file_and_no_rubbish(tmp_path, monkeypatch):
    paths = write_sample(tmp_path, seed=2, target_bytes=20_000)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def broken(**_: object) -> Iterator[list[dict[str, str]]]:
        yield from conversations(seed=9, count=5)
        raise OSError("disk full")

    monkeypatch.setattr(sample, "conversations", broken)
    with pytest.raises(OSError, match="disk full"):
        write_sample(tmp_path, seed=2, target_bytes=20_000)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert paths["sft"] in before
