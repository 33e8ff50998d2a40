"""The sample corpus: stories, facts, questions and sums in Chinese and English, generated from a seed.

Pretraining text, conversations and preference pairs speak of one small world (sample_world.py), tell its stories
(sample_stories.py) and ask the same kinds of questions (sample_questions.py), so that a model of 1.6M parameters shows
within minutes whether it has learnt.

What is held out is decided by the thing itself, never by the seed: a checksum of a question's key (the two numbers of
a sum, a fact with its phrasing, a person with an object and its place) says whether it is a test question, and no
stream ever asks one. Likewise a checksum of a document's text says whether it is validation text.

Document or record number i of a stream is made from (seed, stream, i) alone: any amount is a prefix of a larger one,
and the memory needed does not grow with the amount.
"""

import filecmp
import itertools
import json
import os
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from minigpt_jax.data import sample_world as world
from minigpt_jax.data.sample_questions import (
    SITUATIONS,
    Item,
    Question,
    ask_about,
    draw_question,
    generator,
    heldout_questions,
    is_heldout,
    question_and_answer,
)
from minigpt_jax.data.sample_stories import cast_story, tell_story
from minigpt_jax.data.sample_world import LANGUAGES, Language, Templates, facts, fill, join, subject_slots, value_of

__all__ = [
    "Question", "conversations", "heldout_questions", "preference_pairs", "pretrain_texts", "validation_texts",
    "write_sample",
]  # fmt: skip

Message = dict[str, str]

# --- Pretraining documents ---

# fmt: off
_NOTES: dict[Language, str] = {
    "en": "{time}, {name} put {a_thing} {place}.", "zh": "{time}，{name}把{a_thing}放{place}。",
}
# fmt: on


def _quiz(rng: random.Random, language: Language) -> str:
    theme = draw_question(rng, language).kind if rng.random() < 0.5 else None
    items = [draw_question(rng, language, kind=theme) for _ in range(rng.randint(3, 10))]
    return "\n".join(dict.fromkeys(item.lines for item in items))


def _portrait(rng: random.Random, language: Language) -> str:
    """What is known about one person or land, in any order, sometimes followed by questions about it."""
    subject = rng.choice((*world.PEOPLE, *world.PEOPLE, *world.LANDS))
    told = [relation for relation, other in facts() if other is subject]
    told = rng.sample(told, rng.randint(2, len(told)))
    sentences: list[str] = []
    for relation in told:
        slots = subject_slots(subject, pronoun=bool(sentences) and rng.random() < 0.5)
        slots["v"] = value_of(relation, getattr(subject, relation.name))
        sentences.append(fill(rng.choice(relation.statements[language]), slots, language))
    asked = [ask_about(rng, language, relation, subject) for relation in rng.sample(told, rng.randint(0, len(told)))]
    return "\n".join([join(sentences, language), *(item.lines for item in asked if not is_heldout(item.key))])


def _story_document(rng: random.Random, language: Language) -> str:
    _, text, questions = tell_story(rng, language)
    asked = rng.sample(questions, rng.randint(0, len(questions)))
    return "\n".join([text, *(question_and_answer(question, answer, language) for question, answer in asked)])


def _notes(rng: random.Random, language: Language) -> str:
    """One to three sentences of a diary."""
    return join((fill(_NOTES[language], cast_story(rng), language) for _ in range(rng.randint(1, 3))), language)


def _sums(rng: random.Random, _: Language) -> str:
    """Bare arithmetic, a line each."""
    lines = []
    for kind in rng.choices(("add", "subtract", "compare"), k=rng.randint(4, 12)):
        a, b = draw_question(rng, "en", kind=kind).key.split("|")[1:]
        lines.append(f"{a} + {b} = {int(a) + int(b)}" if kind == "add" else f"{a} - {b} = {int(a) - int(b)}")
        if kind == "compare":
            lines[-1] = f"{a} < {b}" if rng.random() < 0.5 else f"{b} > {a}"
    return "\n".join(lines)


def _parallel(rng: random.Random, _: Language) -> str:
    """Sentences in both languages, one under the other."""
    lines = []
    for _pair in range(rng.randint(2, 6)):
        cast = cast_story(rng)
        kind = rng.choice(("place", "colour"))
        at = rng.randrange(len(SITUATIONS[kind]["en"]))
        lines += [fill(SITUATIONS[kind][language][at], cast, language) for language in LANGUAGES]
    return "\n".join(lines)


_DOCUMENTS: tuple[tuple[int, Callable[[random.Random, Language], str]], ...] = (
    (72, _quiz), (12, _portrait), (8, _story_document), (2, _notes), (4, _sums), (2, _parallel),
)  # fmt: skip
"""Each kind of document with its weight."""


def _documents(*, seed: int, target_bytes: int, validation: bool) -> Iterator[str]:
    written = 0
    for index in itertools.count():
        if written >= target_bytes:
            return
        rng = generator(seed, "validation" if validation else "pretrain", index)
        document = _document(rng)
        while is_heldout(document) != validation:
            document = _document(rng)
        yield document
        written += len(document.encode())


def _document(rng: random.Random) -> str:
    (make,) = rng.choices([make for _, make in _DOCUMENTS], [weight for weight, _ in _DOCUMENTS])
    return make(rng, _language(rng))


def _language(rng: random.Random) -> Language:
    return "zh" if rng.random() < 0.55 else "en"  # Chinese says the same in slightly fewer bytes


def pretrain_texts(*, seed: int, target_bytes: int = 1_000_000) -> Iterator[str]:
    """Documents, up to the first with which their UTF-8 bytes reach `target_bytes`."""
    return _documents(seed=seed, target_bytes=target_bytes, validation=False)


def validation_texts(*, seed: int, target_bytes: int = 50_000) -> Iterator[str]:
    """Documents of the same kind, none of which `pretrain_texts` holds for any seed."""
    return _documents(seed=seed, target_bytes=target_bytes, validation=True)


# --- Conversations and preferences ---

# fmt: off
_SYSTEM_PROMPTS: Templates = {
    "en": ("You are a helpful assistant. Answer briefly.", "You are a friendly guide to a small world."),
    "zh": ("你是一个乐于助人的助手，回答要简短。", "你是一个友好的向导，熟悉一个小小的世界。"),
}
_GREETINGS: Templates = {
    "en": ("Hello!", "Hi there!", "Good morning!", "Good evening!"),
    "zh": ("你好！", "嗨！", "早上好！", "晚上好！"),
}
_WELCOME: dict[Language, str] = {"en": "Hello! What would you like to know?", "zh": "你好！你想知道什么？"}
_THANKS: Templates = {"en": ("Thank you!", "Thanks, that helps."), "zh": ("谢谢！", "谢谢，很有帮助。")}
_FAREWELL: dict[Language, str] = {"en": "You are welcome!", "zh": "不客气！"}
_REMEMBERED: dict[Language, str] = {"en": "All right, I will remember that.", "zh": "好的，我记住了。"}
_STORY_REQUESTS: Templates = {
    "en": ("Tell me a short story about {topic}.", "Please write a little story about {topic}."),
    "zh": ("给我讲一个关于{topic}的小故事。", "请写一个小故事，主角是{topic}。"),
}
_SMALL_TALK: dict[Language, tuple[tuple[str, str], ...]] = {
    "en": (
        ("Who are you?", "I am a small language model. I know the people and lands of a small world."),
        ("What can you do?", "I can tell short stories, answer questions and do simple sums."),
        ("Are you a person?", "No, I am a small language model."),
        ("What will the weather be tomorrow?", "I do not know. I only know the small world of my stories."),
        ("Who won the football game last night?", "I do not know. I only know the small world of my stories."),
    ),
    "zh": (
        ("你是谁？", "我是一个小小的语言模型，认识一个小世界里的人和地方。"),
        ("你会做什么？", "我会讲小故事、回答问题，还会做简单的算术。"),
        ("你是人吗？", "不是，我是一个小小的语言模型。"),
        ("明天天气怎么样？", "我不知道。我只知道故事里的小世界。"),
        ("昨晚的球赛谁赢了？", "我不知道。我只知道故事里的小世界。"),
    ),
}
_FOREIGN: dict[Language, str] = {"en": "The answer is: {answer}", "zh": "答案是：{answer}"}
_RUDE: Templates = {
    "en": ("What a silly question. Find out yourself.", "I do not care. Leave me alone.",
           "You should know that. Do not waste my time."),
    "zh": ("这种问题也来问我？自己去查。", "我才不管呢，别来烦我。", "连这个都不知道，别浪费我的时间。"),
}
_RAMBLING: Templates = {
    "en": ("Well, there are many questions in the world.", "Some questions are long and some are short.",
           "I once thought about this for a whole day.", "Then again, who can really say?",
           "But let me first tell you about something else.", "It is as it is, and so it goes on and on."),
    "zh": ("嗯，世界上有很多问题。", "有的问题长，有的问题短。", "我曾经为这个想了一整天。",
           "不过话说回来，谁又说得清呢？",
           "可是我先说点别的吧。", "事情就是这样，说来说去还是这样。"),
}
# fmt: on


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _exchange(question: str, answer: str) -> list[Message]:
    return [_message("user", question), _message("assistant", answer)]


def _opening(rng: random.Random, language: Language) -> list[Message]:
    """A system message, in one conversation of six."""
    return [_message("system", rng.choice(_SYSTEM_PROMPTS[language]))] if rng.random() < 1 / 6 else []


def _asking(rng: random.Random, language: Language) -> list[Message]:
    """One to four questions, in one conversation of four between a greeting and thanks."""
    items = [draw_question(rng, language) for _ in range(rng.choice((1, 1, 1, 2, 3, 4)))]
    messages = [message for item in items for message in _exchange(item.question, item.answer)]
    if rng.random() < 0.25:
        greeting = _exchange(rng.choice(_GREETINGS[language]), _WELCOME[language])
        messages = greeting + messages + _exchange(rng.choice(_THANKS[language]), _FAREWELL[language])
    return messages


def _remembering(rng: random.Random, language: Language) -> list[Message]:
    """A situation is told first and asked about in the next turn."""
    item = draw_question(rng, language, kind=rng.choice(("place", "two_places", "colour", "who")))
    return _exchange(item.context, _REMEMBERED[language]) + _exchange(item.ask, item.answer)


def _telling(rng: random.Random, language: Language) -> list[Message]:
    """A story on request, then up to two questions about it."""
    topic, text, questions = tell_story(rng, language)
    request = rng.choice(_STORY_REQUESTS[language]).format(topic=topic)
    asked = rng.sample(questions, rng.randint(0, 2))
    return [message for pair in [(request, text), *asked] for message in _exchange(*pair)]


def _small_talk(rng: random.Random, language: Language) -> list[Message]:
    return _exchange(*rng.choice(_SMALL_TALK[language]))


_CONVERSATIONS: tuple[tuple[int, Callable[[random.Random, Language], list[Message]]], ...] = (
    (72, _asking), (12, _remembering), (12, _telling), (4, _small_talk),
)  # fmt: skip
"""Each kind of conversation with its weight."""


def conversations(*, seed: int, count: int = 2000) -> Iterator[list[Message]]:
    """`count` conversations: an optional system message, then user and assistant in turn, the assistant last."""
    for index in range(count):
        rng = generator(seed, "conversation", index)
        language = _language(rng)
        (make,) = rng.choices([make for _, make in _CONVERSATIONS], [weight for weight, _ in _CONVERSATIONS])
        yield _opening(rng, language) + make(rng, language)


def _rejected(rng: random.Random, item: Item) -> str:
    """An answer that nobody wants: false (as often as the others together), foreign, rude or rambling."""
    if rng.random() < 0.5:
        return item.wrong
    other: Language = "zh" if item.language == "en" else "en"
    foreign = _FOREIGN[other].format(answer=item.foreign)
    rambling = join([*rng.sample(_RAMBLING[item.language], 3), item.answer], item.language)
    return rng.choice((foreign, rng.choice(_RUDE[item.language]), rambling))


def preference_pairs(*, seed: int, count: int = 1000) -> Iterator[dict[str, list[Message]]]:
    """`count` pairs on one prompt: `chosen` is right and brief; `rejected` is false, rude, rambling or foreign."""
    for index in range(count):
        rng = generator(seed, "preference", index)
        language = _language(rng)
        item = draw_question(rng, language)
        rejected = _rejected(rng, item)
        prompt = [*_opening(rng, language), _message("user", item.question)]
        yield {
            "chosen": [*prompt, _message("assistant", item.answer)],
            "rejected": [*prompt, _message("assistant", rejected)],
        }


# --- Files ---


def write_sample(directory: Path, *, seed: int, target_bytes: int = 1_000_000) -> dict[str, Path]:
    """Writes the corpus as JSONL files, each whole or not at all; one that is already right is left alone.

    Returns:
        The file of each stage: pretrain, pretrain_val, sft, dpo.
    """
    records: dict[str, Iterable[object]] = {
        "pretrain": ({"text": text} for text in pretrain_texts(seed=seed, target_bytes=target_bytes)),
        "pretrain_val": ({"text": text} for text in validation_texts(seed=seed)),
        "sft": ({"conversations": messages} for messages in conversations(seed=seed)),
        "dpo": preference_pairs(seed=seed),
    }
    directory.mkdir(parents=True, exist_ok=True)
    paths = {stage: directory / f"{stage}.jsonl" for stage in records}
    for stage, path in paths.items():
        unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with unfinished.open("w", encoding="utf-8", newline="\n") as file:
                file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records[stage])
                file.flush()
                os.fsync(file.fileno())
            if not (path.is_file() and filecmp.cmp(unfinished, path, shallow=False)):
                os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)
    return paths
