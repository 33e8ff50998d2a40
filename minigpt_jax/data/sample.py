"""The sample corpus: stories, facts, questions and sums in Chinese and English, generated from a seed.

Pretraining text, conversations and preference pairs speak of one small world (sample_world.py) and ask the same kinds
of questions, so that a model of 1.6M parameters shows within minutes whether it has learnt.

What is held out is decided by the thing itself, never by the seed: a checksum of a question's key (the two numbers of
a sum, a fact with its phrasing, a person with an object and its place) says whether it is a test question, and no
stream ever asks one. Likewise a checksum of a document's text says whether it is validation text.

Document or record number i of a stream is made from (seed, stream, i) alone: any amount is a prefix of a larger one,
and the memory needed does not grow with the amount.
"""

import filecmp
import functools
import itertools
import json
import os
import random
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from minigpt_jax.data import sample_world as world
from minigpt_jax.data.sample_world import Land, Language, Person, Relation, Table, Templates
from minigpt_jax.errors import UserError

Message = dict[str, str]

_LANGUAGES: tuple[Language, Language] = ("en", "zh")
_HELDOUT_ONE_IN = 8


@dataclass(frozen=True)
class Question:
    """A held-out question: `prompt` stops where the answer begins; `answer` is the rest of that line, stripped."""

    prompt: str
    answer: str
    language: Language
    kind: str


def _is_heldout(key: str) -> bool:
    return zlib.crc32(key.encode()) % _HELDOUT_ONE_IN == 0


def _rng(seed: int, stream: str, index: int) -> random.Random:
    return random.Random(f"{seed}/{stream}/{index}")  # a string is hashed with SHA-512: alike on every machine


# --- Words ---


class _Word(NamedTuple):
    en: str
    zh: str


class _Noun(NamedTuple):
    en: str
    zh: str
    measure: str

    def counted(self, colour: _Word | None = None) -> _Word:
        """`a red kite`, `一只红色的风筝`."""
        english = f"{colour.en} {self.en}" if colour else self.en
        chinese = f"{colour.zh}的{self.zh}" if colour else self.zh
        return _Word(f"{'an' if english[0] in 'aeiou' else 'a'} {english}", f"一{self.measure}{chinese}")

    def plural(self) -> _Word:
        if self.en.endswith("y") and self.en[-2] not in "aeiou":
            return _Word(self.en[:-1] + "ies", self.zh)
        return _Word(self.en + ("es" if self.en.endswith(("x", "s", "ch", "sh", "ato")) else "s"), self.zh)


def _words(rng: random.Random, table: Table, count: int) -> list[_Word]:
    return [_Word(*entry) for entry in rng.sample(list(table.items()), count)]


def _noun(word: _Word) -> _Noun:
    return _Noun(word.en, word.zh[1:], word.zh[0])


def _nouns(rng: random.Random, table: Table, count: int) -> list[_Noun]:
    return [_noun(word) for word in _words(rng, table, count)]


def _say(value: object, language: Language) -> str:
    """`value` in `language` when it has two; numbers and plain strings as they are."""
    return str(getattr(value, language, value))


def _fill(template: str, slots: dict[str, object], language: Language) -> str:
    return template.format_map({name: _say(value, language) for name, value in slots.items()})


def _sentence(text: str, language: Language) -> str:
    """`text` as a full answer; the stop follows the script, or for bare numbers the language."""
    if text.isascii() and (language == "en" or text[0].isalpha()):
        return f"{text[0].upper()}{text[1:]}."
    return f"{text}。"


def _join(parts: Iterable[str], language: Language) -> str:
    return (" " if language == "en" else "").join(parts)


def _prompt(question: str, language: Language) -> str:
    return f"Question: {question}\nAnswer:" if language == "en" else f"问：{question}\n答："


def _asked_and_answered(question: str, answer: str, language: Language) -> str:
    return _prompt(question, language) + (" " if language == "en" else "") + answer


# --- Questions ---


class _Item(NamedTuple):
    """A question before it is laid out; `foreign` is the answer in the other language, `wrong` a false one."""

    kind: str
    language: Language
    key: str
    context: str
    ask: str
    answer: str
    foreign: str
    wrong: str

    @property
    def question(self) -> str:
        return _join(filter(None, (self.context, self.ask)), self.language)

    @property
    def lines(self) -> str:
        return _asked_and_answered(self.question, self.answer, self.language)


def _item(
    rng: random.Random,
    language: Language,
    kind: str,
    slots: dict[str, object],
    *,
    key: tuple[object, ...],
    answer: object,
    wrong: object,
    template: str | None = None,
    asks: Templates | None = None,
    by_phrasing: bool = False,
) -> _Item:
    """One question of `kind`.

    `key` must follow from the wording alone, else one wording could be both shown and held out. By default all
    phrasings of a key are held out, in both languages; with `by_phrasing` each phrasing on its own.
    """
    template = template or kind
    phrasings = (asks or world.ASKS[template])[language]
    phrasing = rng.randrange(len(phrasings))
    contexts = world.SITUATIONS.get(template)
    other: Language = "zh" if language == "en" else "en"
    return _Item(
        kind=kind,
        language=language,
        key="|".join(_say(part, "en") for part in (kind, *key, *((phrasing, language) if by_phrasing else ()))),
        context=_fill(rng.choice(contexts[language]), slots, language) if contexts else "",
        ask=_fill(phrasings[phrasing], slots, language),
        answer=_sentence(_say(answer, language), language),
        foreign=_sentence(_say(answer, other), other),
        wrong=_sentence(_say(wrong, language), language),
    )


def _place(rng: random.Random, language: Language) -> _Item:
    person, (thing,), (place, other) = (
        rng.choice(world.PEOPLE), _nouns(rng, world.THINGS, 1), _words(rng, world.PLACES, 2)
    )  # fmt: skip
    slots: dict[str, object] = {"name": person, "thing": thing, "place": place}
    return _item(rng, language, "place", slots, key=(person, thing, place), answer=place, wrong=other)


def _two_places(rng: random.Random, language: Language) -> _Item:
    things, places, asked = _nouns(rng, world.THINGS, 2), _words(rng, world.PLACES, 2), rng.randrange(2)
    slots: dict[str, object] = {"name": rng.choice(world.PEOPLE), "thing": things[asked]}
    slots |= {"thing1": things[0], "thing2": things[1], "place1": places[0], "place2": places[1]}
    return _item(
        rng, language, "two_places", slots, key=(*things, *places, asked), answer=places[asked], wrong=places[1 - asked]
    )


def _colour(rng: random.Random, language: Language) -> _Item:
    person, (thing,), (colour, other) = (
        rng.choice(world.PEOPLE), _nouns(rng, world.THINGS, 1), _words(rng, world.COLOURS, 2)
    )  # fmt: skip
    slots: dict[str, object] = {"name": person, "thing": thing, "colour": colour, "a_thing": thing.counted(colour)}
    return _item(rng, language, "colour", slots, key=(person, thing, colour), answer=colour, wrong=other)


def _who(rng: random.Random, language: Language) -> _Item:
    people, things, asked = rng.sample(world.PEOPLE, 2), _nouns(rng, world.THINGS, 2), rng.randrange(2)
    slots: dict[str, object] = {"name1": people[0], "name2": people[1], "thing": things[asked]}
    slots |= {"thing1": things[0].counted(), "thing2": things[1].counted()}
    return _item(
        rng, language, "who", slots, key=(*people, *things, asked), answer=people[asked], wrong=people[1 - asked]
    )


def _fact(rng: random.Random, language: Language) -> _Item:
    return _about(rng, language, *rng.choice(_facts()))


def _about(rng: random.Random, language: Language, relation: Relation, subject: Person | Land) -> _Item:
    """A question about one fact."""
    value = _value(relation, getattr(subject, relation.name))
    wrong = _value(relation, rng.choice([word for word in relation.values if _value(relation, word) != value]))
    slots = _subject(subject, pronoun=False)
    key = (relation.name, subject)
    return _item(
        rng, language, "fact", slots, key=key, answer=value, wrong=wrong, asks=relation.questions, by_phrasing=True
    )


@functools.cache
def _facts() -> tuple[tuple[Relation, Person | Land], ...]:
    """Every fact of the world: what is said, about whom."""
    people = itertools.product(world.PERSON_RELATIONS, world.PEOPLE)
    return (*people, *itertools.product(world.LAND_RELATIONS, world.LANDS))


def _value(relation: Relation, word: str) -> _Word:
    """A fact's value as it is said: `a cat`, `the piano`, `Lindel`."""
    value = _Word(word, relation.values[word])
    if relation.name in ("pet", "flag"):
        return _noun(value).counted()
    return _Word(f"the {word}", value.zh[1:]) if relation.name == "instrument" else value


def _subject(subject: Person | Land, *, pronoun: bool) -> dict[str, object]:
    """Template slots for the subject of a fact: the name, or a pronoun for it."""
    if isinstance(subject, Person) and pronoun:
        she = subject.pronoun == "she"
        name, possessive = _Word(subject.pronoun, "她" if she else "他"), "her" if she else "his"
    else:
        name, possessive = _Word(subject.en, subject.zh), f"{subject.en}'s"
    capital = name._replace(en=name.en.capitalize())
    return {"s": name, "S": capital, "poss": possessive, "Poss": possessive[0].upper() + possessive[1:]}


def _sum(rng: random.Random, language: Language, *, kind: str) -> _Item:
    a, b = rng.randint(0, 10), rng.randint(0, 10)
    a, result = (a, a + b) if kind == "add" else (a + b, a)
    (fruit,) = _nouns(rng, world.FRUITS, 1)
    slots: dict[str, object] = {"a": a, "b": b, "name": rng.choice(world.PEOPLE), "measure": fruit.measure}
    slots |= {"fruit": fruit, "fruits": f"{a} {fruit.en if a == 1 else fruit.plural().en}"}
    in_words = min(a, b) > 0 and rng.random() < 0.3
    answer, wrong = (
        _Word(str(number), f"{number}{fruit.measure}") if in_words else number
        for number in (result, _other_number(rng, result))
    )
    template = f"{kind}_fruits" if in_words else kind
    return _item(rng, language, kind, slots, key=(a, b), answer=answer, wrong=wrong, template=template)


def _other_number(rng: random.Random, number: int) -> int:
    return rng.choice([other for other in range(max(0, number - 3), number + 4) if other != number])


def _compare(rng: random.Random, language: Language) -> _Item:
    a, b = rng.sample(range(31), 2)
    smaller, larger = sorted((a, b))
    template = rng.choice(("larger", "smaller"))
    answer, wrong = (larger, smaller) if template == "larger" else (smaller, larger)
    return _item(
        rng, language, "compare", {"a": a, "b": b}, key=(smaller, larger), answer=answer, wrong=wrong, template=template
    )


def _order(rng: random.Random, language: Language) -> _Item:
    number, template = rng.randint(1, 60), rng.choice(("after", "before"))
    answer, wrong = (number + 1, number - 1) if template == "after" else (number - 1, number + 1)
    return _item(
        rng, language, "order", {"a": number}, key=(template, number), answer=answer, wrong=wrong, template=template,
        by_phrasing=True,
    )  # fmt: skip


def _count(rng: random.Random, language: Language) -> _Item:
    (noun,) = _nouns(rng, world.ANIMALS | world.FRUITS, 1)
    number = rng.randint(2, 9)
    slots: dict[str, object] = {"noun": noun, "nouns": noun.plural(), "measure": noun.measure}
    slots["list"] = _Word(", ".join([noun.en] * number), "、".join([noun.zh] * number))
    answer, wrong = (_Word(str(n), f"{n}{noun.measure}") for n in (number, _other_number(rng, number)))
    return _item(rng, language, "count", slots, key=(noun, number), answer=answer, wrong=wrong)


def _opposite(rng: random.Random, language: Language) -> _Item:
    pairs = [_Word(*both) for english, chinese in world.OPPOSITES for both in zip(english, chinese, strict=True)]
    at = rng.randrange(len(pairs))
    word, answer, wrong = pairs[at], pairs[at ^ 1], rng.choice(pairs[: at & ~1] + pairs[(at | 1) + 1 :])
    return _item(rng, language, "opposite", {"x": word}, key=(word,), answer=answer, wrong=wrong, by_phrasing=True)


def _category(rng: random.Random, language: Language) -> _Item:
    (english, chinese, table), (*other, _) = rng.sample(world.CATEGORIES, 2)
    (noun,) = _nouns(rng, table, 1)
    word = _Word(noun.counted().en, noun.zh)
    answer, wrong = _Word(english, chinese), _Word(*other)
    return _item(rng, language, "category", {"x": word}, key=(noun,), answer=answer, wrong=wrong, by_phrasing=True)


def _translate(rng: random.Random, language: Language) -> _Item:
    noun, other = _nouns(rng, world.NOUNS, 2)
    slots: dict[str, object] = {"x": noun}
    answer, wrong = _Word(noun.zh, noun.en), _Word(other.zh, other.en)
    return _item(rng, language, "translate", slots, key=(noun,), answer=answer, wrong=wrong, by_phrasing=True)


_KINDS: dict[str, tuple[int, Callable[[random.Random, Language], _Item]]] = {
    "fact": (6, _fact),
    "place": (2, _place),
    "two_places": (2, _two_places),
    "colour": (2, _colour),
    "who": (2, _who),
    "add": (3, functools.partial(_sum, kind="add")),
    "subtract": (2, functools.partial(_sum, kind="subtract")),
    "compare": (2, _compare),
    "order": (2, _order),
    "count": (1, _count),
    "opposite": (2, _opposite),
    "category": (2, _category),
    "translate": (2, _translate),
}
"""Each kind of question with its weight in the corpus."""


def _question(rng: random.Random, language: Language, *, kind: str | None = None, heldout: bool = False) -> _Item:
    """A question of `kind` (of any when None) from the training side of the split, or from the held-out one."""
    if kind is None:
        (kind,) = rng.choices(list(_KINDS), [weight for weight, _ in _KINDS.values()])
    while True:
        item = _KINDS[kind][1](rng, language)
        if _is_heldout(item.key) == heldout:
            return item


def heldout_questions(*, seed: int = 0, count: int = 200) -> list[Question]:
    """`count` different questions that no stream of any seed asks, evenly over kinds and languages.

    Raises:
        UserError: there are not that many.
    """
    rng = _rng(seed, "heldout", 0)
    found: dict[str, Question] = {}
    cells = list(itertools.product(_KINDS, _LANGUAGES))
    while len(found) < count:
        for kind, language in list(cells):
            items = (_question(rng, language, kind=kind, heldout=True) for _ in range(1000))
            fresh = next((item for item in items if _prompt(item.question, language) not in found), None)
            if fresh is None:
                cells.remove((kind, language))
            elif len(found) < count:
                prompt = _prompt(fresh.question, language)
                found[prompt] = Question(prompt, fresh.answer, language, kind)
        if not cells:
            raise UserError(f"the sample corpus has no more than {len(found)} held-out questions; ask for fewer")
    return list(found.values())


# --- Pretraining documents ---


def _quiz(rng: random.Random, language: Language) -> str:
    theme = _question(rng, language).kind if rng.random() < 0.5 else None
    items = [_question(rng, language, kind=theme) for _ in range(rng.randint(3, 10))]
    return "\n".join(dict.fromkeys(item.lines for item in items))


def _portrait(rng: random.Random, language: Language) -> str:
    """What is known about one person or land, in any order, sometimes followed by questions about it."""
    subject = rng.choice((*world.PEOPLE, *world.PEOPLE, *world.LANDS))
    told = [relation for relation, other in _facts() if other is subject]
    told = rng.sample(told, rng.randint(2, len(told)))
    sentences: list[str] = []
    for relation in told:
        slots = _subject(subject, pronoun=bool(sentences) and rng.random() < 0.5)
        slots["v"] = _value(relation, getattr(subject, relation.name))
        sentences.append(_fill(rng.choice(relation.statements[language]), slots, language))
    asked = [_about(rng, language, relation, subject) for relation in rng.sample(told, rng.randint(0, len(told)))]
    return "\n".join([_join(sentences, language), *(item.lines for item in asked if not _is_heldout(item.key))])


def _story(rng: random.Random, language: Language) -> tuple[str, str, list[tuple[str, str]]]:
    """A story: whom it is about, its text, and questions on it with their answers."""
    template = rng.choice(world.STORIES[language])
    slots = _cast(rng)
    told, *asked = template.replace("\n|", "|").split("\nQ ")
    steps = [_capital(_fill(rng.choice(step.split("|")).strip(), slots, language)) for step in told.split("\n")]
    pairs = [_fill(line, slots, language).split(" = ") for line in asked]
    topic = slots["name" if "{name}" in template else "hungry_animal"]
    return (
        _say(topic, language), _join(steps, language), [(question, _capital(answer)) for question, answer in pairs]
    )  # fmt: skip


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _cast(rng: random.Random) -> dict[str, object]:
    """Who and what fills the slots of a story. What the world fixes (homes, favourite food) holds here too."""
    hero = rng.choice(world.PEOPLE)
    # Of the other gender, so that every pronoun is clear, and from another town.
    friend = rng.choice([p for p in world.PEOPLE if p.pronoun != hero.pronoun and p.home != hero.home])
    (thing,), (colour,) = _nouns(rng, world.THINGS, 1), _words(rng, world.COLOURS, 1)
    (pet,), (animal, animal2) = _nouns(rng, world.PETS, 1), _nouns(rng, world.WILD_ANIMALS, 2)
    slots: dict[str, object] = {
        "name": hero,
        "friend": friend,
        "town": _Word(hero.home, world.TOWNS[hero.home]),
        "ftown": _Word(friend.home, world.TOWNS[friend.home]),
        "food": _Word(hero.food, world.FOODS[hero.food]),
        "ffood": _Word(friend.food, world.FOODS[friend.food]),
        "thing": thing,
        "measure": thing.measure,
        "colour": colour,
        "a_thing": thing.counted(colour),
        "pet": pet,
        "pet_measure": pet.measure,
        "animal": animal,
        "animal_measure": animal.measure,
        "animal2": animal2,
        "animal2_measure": animal2.measure,
        "hungry_animal": animal.counted(_Word("hungry", "饥饿")),
        "fruits": _nouns(rng, world.FRUITS, 1)[0].plural(),
        "plants": _nouns(rng, world.VEGETABLES, 1)[0].plural(),
    }
    for prefix, person in (("", hero), ("f", friend)):
        she = person.pronoun == "she"
        for form, english in zip(
            ("he", "his", "him"), ("she", "her", "her") if she else ("he", "his", "him"), strict=True
        ):
            slots[prefix + form] = _Word(english, "她" if she else "他")
    slots["He"] = _Word(hero.pronoun.capitalize(), "")
    slots |= zip(("place", "place2", "place3"), _words(rng, world.PLACES, 3), strict=True)
    tables = {"skill": world.SKILLS, "number": world.NUMBERS, "task": world.TASKS}
    tables |= {"crossing": world.CROSSINGS, "time": world.TIMES}
    return slots | {name: _words(rng, table, 1)[0] for name, table in tables.items()}


def _story_document(rng: random.Random, language: Language) -> str:
    _, text, questions = _story(rng, language)
    asked = rng.sample(questions, rng.randint(0, len(questions)))
    return "\n".join([text, *(_asked_and_answered(question, answer, language) for question, answer in asked)])


def _notes(rng: random.Random, language: Language) -> str:
    """One to three sentences of a diary."""
    return _join((_fill(world.NOTES[language], _cast(rng), language) for _ in range(rng.randint(1, 3))), language)


def _sums(rng: random.Random, _: Language) -> str:
    """Bare arithmetic, a line each."""
    lines = []
    for kind in rng.choices(("add", "subtract", "compare"), k=rng.randint(4, 12)):
        a, b = _question(rng, "en", kind=kind).key.split("|")[1:]
        lines.append(f"{a} + {b} = {int(a) + int(b)}" if kind == "add" else f"{a} - {b} = {int(a) - int(b)}")
        if kind == "compare":
            lines[-1] = f"{a} < {b}" if rng.random() < 0.5 else f"{b} > {a}"
    return "\n".join(lines)


def _parallel(rng: random.Random, _: Language) -> str:
    """Sentences in both languages, one under the other."""
    lines = []
    for _pair in range(rng.randint(2, 6)):
        cast = _cast(rng)
        kind = rng.choice(("place", "colour"))
        at = rng.randrange(len(world.SITUATIONS[kind]["en"]))
        lines += [_fill(world.SITUATIONS[kind][language][at], cast, language) for language in _LANGUAGES]
    return "\n".join(lines)


_DOCUMENTS: tuple[tuple[int, Callable[[random.Random, Language], str]], ...] = (
    (40, _quiz), (24, _portrait), (24, _story_document), (6, _notes), (5, _sums), (6, _parallel),
)  # fmt: skip
"""Each kind of document with its weight."""


def _documents(*, seed: int, target_bytes: int, validation: bool) -> Iterator[str]:
    written = 0
    for index in itertools.count():
        if written >= target_bytes:
            return
        rng = _rng(seed, "validation" if validation else "pretrain", index)
        document = _document(rng)
        while _is_heldout(document) != validation:
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


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _exchange(question: str, answer: str) -> list[Message]:
    return [_message("user", question), _message("assistant", answer)]


def _opening(rng: random.Random, language: Language) -> list[Message]:
    """A system message, in one conversation of six."""
    return [_message("system", rng.choice(world.SYSTEM_PROMPTS[language]))] if rng.random() < 1 / 6 else []


def _asking(rng: random.Random, language: Language) -> list[Message]:
    """One to four questions, in one conversation of four between a greeting and thanks."""
    items = [_question(rng, language) for _ in range(rng.choice((1, 1, 1, 2, 3, 4)))]
    messages = [message for item in items for message in _exchange(item.question, item.answer)]
    if rng.random() < 0.25:
        greeting = _exchange(rng.choice(world.GREETINGS[language]), world.WELCOME[language])
        messages = greeting + messages + _exchange(rng.choice(world.THANKS[language]), world.FAREWELL[language])
    return messages


def _remembering(rng: random.Random, language: Language) -> list[Message]:
    """A situation is told first and asked about in the next turn."""
    item = _question(rng, language, kind=rng.choice(("place", "two_places", "colour", "who")))
    return _exchange(item.context, world.REMEMBERED[language]) + _exchange(item.ask, item.answer)


def _telling(rng: random.Random, language: Language) -> list[Message]:
    """A story on request, then up to two questions about it."""
    topic, text, questions = _story(rng, language)
    request = rng.choice(world.STORY_REQUESTS[language]).format(topic=topic)
    asked = rng.sample(questions, rng.randint(0, 2))
    return [message for pair in [(request, text), *asked] for message in _exchange(*pair)]


def _small_talk(rng: random.Random, language: Language) -> list[Message]:
    return _exchange(*rng.choice(world.SMALL_TALK[language]))


_CONVERSATIONS: tuple[tuple[int, Callable[[random.Random, Language], list[Message]]], ...] = (
    (72, _asking), (12, _remembering), (12, _telling), (4, _small_talk),
)  # fmt: skip
"""Each kind of conversation with its weight."""


def conversations(*, seed: int, count: int = 2000) -> Iterator[list[Message]]:
    """`count` conversations: an optional system message, then user and assistant in turn, the assistant last."""
    for index in range(count):
        rng = _rng(seed, "conversation", index)
        language = _language(rng)
        (make,) = rng.choices([make for _, make in _CONVERSATIONS], [weight for weight, _ in _CONVERSATIONS])
        yield _opening(rng, language) + make(rng, language)


def _rejected(rng: random.Random, item: _Item) -> str:
    """An answer that nobody wants: false (as often as the others together), foreign, rude or rambling."""
    if rng.random() < 0.5:
        return item.wrong
    other: Language = "zh" if item.language == "en" else "en"
    foreign = world.FOREIGN[other].format(answer=item.foreign)
    rambling = _join([*rng.sample(world.RAMBLING[item.language], 3), item.answer], item.language)
    return rng.choice((foreign, rng.choice(world.RUDE[item.language]), rambling))


def preference_pairs(*, seed: int, count: int = 1000) -> Iterator[dict[str, list[Message]]]:
    """`count` pairs on one prompt: `chosen` is right and brief; `rejected` is false, rude, rambling or foreign."""
    for index in range(count):
        rng = _rng(seed, "preference", index)
        language = _language(rng)
        item = _question(rng, language)
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
