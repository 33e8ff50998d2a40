"""The questions of the sample corpus: how each kind is worded and answered, and which are held out.

A checksum of a question's key decides, not the seed: no stream of any seed asks a held-out one. The key is what makes
the question: the two numbers of a sum, a person with an object and its place, a fact with its phrasing.
"""

import functools
import itertools
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from minigpt_jax.data import sample_world as world
from minigpt_jax.data.sample_world import (
    LANGUAGES,
    Land,
    Language,
    Person,
    Relation,
    Templates,
    Word,
    draw_nouns,
    draw_words,
    facts,
    fill,
    join,
    say,
    sentence,
    subject_slots,
    value_of,
)
from minigpt_jax.errors import UserError

_HELDOUT_ONE_IN = 8

# --- Wording ---

# fmt: off
SITUATIONS: dict[str, Templates] = {
    "place": {
        "en": ("{name} put the {thing} {place}.", "{name} left the {thing} {place}."),
        "zh": ("{name}把{thing}放{place}。", "{name}把{thing}留{place}。"),
    },
    "two_places": {
        "en": ("The {thing1} is {place1}, and the {thing2} is {place2}.",
               "{name} put the {thing1} {place1} and the {thing2} {place2}."),
        "zh": ("{thing1}{place1}，{thing2}{place2}。", "{name}把{thing1}放{place1}，把{thing2}放{place2}。"),
    },
    "colour": {
        "en": ("{name}'s {thing} is {colour}.", "{name} has {a_thing}."),
        "zh": ("{name}的{thing}是{colour}的。", "{name}有{a_thing}。"),
    },
    "who": {
        "en": ("{name1} has {thing1}, and {name2} has {thing2}.",
               "{name1} carries {thing1}. {name2} carries {thing2}."),
        "zh": ("{name1}有{thing1}，{name2}有{thing2}。", "{name1}拿着{thing1}。{name2}拿着{thing2}。"),
    },
    "count": {"en": ("Count the {nouns}: {list}.",), "zh": ("数一数：{list}。",)},
    "add_fruits": {
        "en": ("{name} has {fruits} and gets {b} more.",),
        "zh": ("{name}有{a}{measure}{fruit}，又得到{b}{measure}。",),
    },
    "subtract_fruits": {
        "en": ("{name} has {fruits} and gives away {b}.",),
        "zh": ("{name}有{a}{measure}{fruit}，送给别人{b}{measure}。",),
    },
}
ASKS: dict[str, Templates] = {
    "place": {
        "en": ("Where is the {thing}?", "Where can you find the {thing}?"),
        "zh": ("{thing}在哪里？", "在哪里能找到{thing}？"),
    },
    "two_places": {"en": ("Where is the {thing}?",), "zh": ("{thing}在哪里？",)},
    "colour": {
        "en": ("What colour is {name}'s {thing}?", "What is the colour of {name}'s {thing}?"),
        "zh": ("{name}的{thing}是什么颜色？", "{name}的{thing}是什么颜色的？"),
    },
    "who": {
        "en": ("Who has the {thing}?", "Who is the one with the {thing}?"),
        "zh": ("谁有{thing}？", "{thing}在谁那里？"),
    },
    "count": {"en": ("How many {nouns} are there?",), "zh": ("一共有几{measure}{noun}？",)},
    "add": {
        "en": ("What is {a} + {b}?", "What is {a} plus {b}?"),
        "zh": ("{a} + {b} 等于几？", "{a}加{b}等于几？"),
    },
    "add_fruits": {"en": ("How many does {name} have now?",), "zh": ("{name}现在有几{measure}？",)},
    "subtract_fruits": {"en": ("How many does {name} have left?",), "zh": ("{name}还剩几{measure}？",)},
    "subtract": {
        "en": ("What is {a} - {b}?", "What is {a} minus {b}?"),
        "zh": ("{a} - {b} 等于几？", "{a}减{b}等于几？"),
    },
    "larger": {
        "en": ("Which is larger, {a} or {b}?", "Which number is bigger: {a} or {b}?"),
        "zh": ("{a}和{b}哪个大？", "哪个数更大，{a}还是{b}？"),
    },
    "smaller": {
        "en": ("Which is smaller, {a} or {b}?", "Which number is less: {a} or {b}?"),
        "zh": ("{a}和{b}哪个小？", "哪个数更小，{a}还是{b}？"),
    },
    "after": {
        "en": ("What number comes after {a}?", "Which number follows {a}?"),
        "zh": ("{a}后面的数是几？", "{a}的下一个数是几？"),
    },
    "before": {
        "en": ("What number comes before {a}?", "Which number goes ahead of {a}?"),
        "zh": ("{a}前面的数是几？", "{a}的上一个数是几？"),
    },
    "opposite": {
        "en": ("What is the opposite of {x}?", 'Which word is the opposite of "{x}"?'),
        "zh": ("“{x}”的反义词是什么？", "“{x}”的反面是什么？"),
    },
    "category": {
        "en": ("What kind of thing is {x}?", "What is {x}?"),
        "zh": ("{x}是哪一类东西？", "{x}是什么？"),
    },
    "translate": {
        "en": ('How do you say "{x}" in Chinese?', "What is the Chinese word for {x}?"),
        "zh": ("“{x}”用英语怎么说？", "“{x}”的英文是什么？"),
    },
}
# fmt: on


def generator(seed: int, stream: str, index: int) -> random.Random:
    """The source of everything random in record `index` of `stream`."""
    return random.Random(f"{seed}/{stream}/{index}")  # a string is hashed with SHA-512: alike on every machine


# --- Questions ---


@dataclass(frozen=True)
class Question:
    """A held-out question, its answer and a false one."""

    question: str
    answer: str
    wrong: str
    language: Language
    kind: str

    @property
    def prompt(self) -> str:
        """The question in plain text, up to where the answer begins; the answer is the rest of that line, stripped."""
        return prompt_for(self.question, self.language)


def is_heldout(key: str) -> bool:
    """Whether the question with this key, or the document with this text, is kept out of training."""
    return zlib.crc32(key.encode()) % _HELDOUT_ONE_IN == 0


def prompt_for(question: str, language: Language) -> str:
    """The layout of a question in plain text, up to where its answer begins."""
    return f"Question: {question}\nAnswer:" if language == "en" else f"问：{question}\n答："


def question_and_answer(question: str, answer: str, language: Language) -> str:
    """The layout of a question with its answer: two lines."""
    return prompt_for(question, language) + (" " if language == "en" else "") + answer


class Item(NamedTuple):
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
        """The whole wording: the situation first when there is one."""
        return join(filter(None, (self.context, self.ask)), self.language)

    @property
    def lines(self) -> str:
        """Question and answer in their plain text layout."""
        return question_and_answer(self.question, self.answer, self.language)


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
) -> Item:
    """One question of `kind`.

    `key` must follow from the wording alone, else one wording could be both shown and held out. By default all
    phrasings of a key are held out, in both languages; with `by_phrasing` each phrasing on its own.
    """
    template = template or kind
    phrasings = (asks or ASKS[template])[language]
    phrasing = rng.randrange(len(phrasings))
    contexts = SITUATIONS.get(template)
    other: Language = "zh" if language == "en" else "en"
    return Item(
        kind=kind,
        language=language,
        key="|".join(say(part, "en") for part in (kind, *key, *((phrasing, language) if by_phrasing else ()))),
        context=fill(rng.choice(contexts[language]), slots, language) if contexts else "",
        ask=fill(phrasings[phrasing], slots, language),
        answer=sentence(say(answer, language), language),
        foreign=sentence(say(answer, other), other),
        wrong=sentence(say(wrong, language), language),
    )


def _place(rng: random.Random, language: Language) -> Item:
    person, (thing,), (place, other) = (
        rng.choice(world.PEOPLE), draw_nouns(rng, world.THINGS, 1), draw_words(rng, world.PLACES, 2)
    )  # fmt: skip
    slots: dict[str, object] = {"name": person, "thing": thing, "place": place}
    return _item(rng, language, "place", slots, key=(person, thing, place), answer=place, wrong=other)


def _two_places(rng: random.Random, language: Language) -> Item:
    things, places, asked = draw_nouns(rng, world.THINGS, 2), draw_words(rng, world.PLACES, 2), rng.randrange(2)
    slots: dict[str, object] = {"name": rng.choice(world.PEOPLE), "thing": things[asked]}
    slots |= {"thing1": things[0], "thing2": things[1], "place1": places[0], "place2": places[1]}
    return _item(
        rng, language, "two_places", slots, key=(*things, *places, asked), answer=places[asked], wrong=places[1 - asked]
    )


def _colour(rng: random.Random, language: Language) -> Item:
    person, (thing,), (colour, other) = (
        rng.choice(world.PEOPLE), draw_nouns(rng, world.THINGS, 1), draw_words(rng, world.COLOURS, 2)
    )  # fmt: skip
    slots: dict[str, object] = {"name": person, "thing": thing, "colour": colour, "a_thing": thing.counted(colour)}
    return _item(rng, language, "colour", slots, key=(person, thing, colour), answer=colour, wrong=other)


def _who(rng: random.Random, language: Language) -> Item:
    people, things, asked = rng.sample(world.PEOPLE, 2), draw_nouns(rng, world.THINGS, 2), rng.randrange(2)
    slots: dict[str, object] = {"name1": people[0], "name2": people[1], "thing": things[asked]}
    slots |= {"thing1": things[0].counted(), "thing2": things[1].counted()}
    return _item(
        rng, language, "who", slots, key=(*people, *things, asked), answer=people[asked], wrong=people[1 - asked]
    )


def _fact(rng: random.Random, language: Language) -> Item:
    return ask_about(rng, language, *rng.choice(facts()))


def ask_about(rng: random.Random, language: Language, relation: Relation, subject: Person | Land) -> Item:
    """A question about one fact."""
    word = getattr(subject, relation.name)
    value = value_of(relation, word)
    wrong = value_of(relation, rng.choice([other for other in relation.values if other != word]))
    slots = subject_slots(subject, pronoun=False)
    key = (relation.name, subject)
    return _item(
        rng, language, "fact", slots, key=key, answer=value, wrong=wrong, asks=relation.questions, by_phrasing=True
    )


def _sum(rng: random.Random, language: Language, *, kind: str) -> Item:
    a, b = rng.randint(0, 9), rng.randint(0, 9)
    a, result = (a, a + b) if kind == "add" else (a + b, a)
    (fruit,) = draw_nouns(rng, world.FRUITS, 1)
    slots: dict[str, object] = {"a": a, "b": b, "name": rng.choice(world.PEOPLE), "measure": fruit.measure}
    slots |= {"fruit": fruit, "fruits": f"{a} {fruit.en if a == 1 else fruit.plural().en}"}
    in_words = min(a, b) > 0 and rng.random() < 0.3
    answer, wrong = (
        Word(str(number), f"{number}{fruit.measure}") if in_words else number
        for number in (result, _other_number(rng, result))
    )
    template = f"{kind}_fruits" if in_words else kind
    return _item(rng, language, kind, slots, key=(a, b), answer=answer, wrong=wrong, template=template)


def _other_number(rng: random.Random, number: int) -> int:
    return rng.choice([other for other in range(max(0, number - 3), number + 4) if other != number])


def _compare(rng: random.Random, language: Language) -> Item:
    a, b = rng.sample(range(1, 21), 2)
    smaller, larger = sorted((a, b))
    template = rng.choice(("larger", "smaller"))
    answer, wrong = (larger, smaller) if template == "larger" else (smaller, larger)
    return _item(
        rng, language, "compare", {"a": a, "b": b}, key=(smaller, larger), answer=answer, wrong=wrong, template=template
    )


def _order(rng: random.Random, language: Language) -> Item:
    number, template = rng.randint(1, 20), rng.choice(("after", "before"))
    answer, wrong = (number + 1, number - 1) if template == "after" else (number - 1, number + 1)
    return _item(
        rng, language, "order", {"a": number}, key=(template, number), answer=answer, wrong=wrong, template=template,
        by_phrasing=True,
    )  # fmt: skip


def _count(rng: random.Random, language: Language) -> Item:
    (noun,) = draw_nouns(rng, world.ANIMALS | world.FRUITS, 1)
    number = rng.randint(2, 5)
    slots: dict[str, object] = {"noun": noun, "nouns": noun.plural(), "measure": noun.measure}
    slots["list"] = Word(", ".join([noun.en] * number), "、".join([noun.zh] * number))
    answer, wrong = (Word(str(n), f"{n}{noun.measure}") for n in (number, _other_number(rng, number)))
    return _item(rng, language, "count", slots, key=(noun, number), answer=answer, wrong=wrong)


def _opposite(rng: random.Random, language: Language) -> Item:
    pairs = [Word(*both) for english, chinese in world.OPPOSITES for both in zip(english, chinese, strict=True)]
    at = rng.randrange(len(pairs))
    word, answer, wrong = pairs[at], pairs[at ^ 1], rng.choice(pairs[: at & ~1] + pairs[(at | 1) + 1 :])
    return _item(rng, language, "opposite", {"x": word}, key=(word,), answer=answer, wrong=wrong, by_phrasing=True)


def _category(rng: random.Random, language: Language) -> Item:
    (english, chinese, table), (*other, _) = rng.sample(world.CATEGORIES, 2)
    (noun,) = draw_nouns(rng, table, 1)
    word = Word(noun.counted().en, noun.zh)
    answer, wrong = Word(english, chinese), Word(*other)
    return _item(rng, language, "category", {"x": word}, key=(noun,), answer=answer, wrong=wrong, by_phrasing=True)


def _translate(rng: random.Random, language: Language) -> Item:
    noun, other = draw_nouns(rng, world.THINGS | world.PETS, 2)
    slots: dict[str, object] = {"x": noun}
    answer, wrong = Word(noun.zh, noun.en), Word(other.zh, other.en)
    return _item(rng, language, "translate", slots, key=(noun,), answer=answer, wrong=wrong, by_phrasing=True)


KINDS: dict[str, tuple[int, Callable[[random.Random, Language], Item]]] = {
    "fact": (6, _fact),
    "place": (4, _place),
    "two_places": (3, _two_places),
    "colour": (3, _colour),
    "who": (3, _who),
    "add": (3, functools.partial(_sum, kind="add")),
    "subtract": (1, functools.partial(_sum, kind="subtract")),
    "compare": (2, _compare),
    "order": (1, _order),
    "count": (1, _count),
    "opposite": (2, _opposite),
    "category": (2, _category),
    "translate": (1, _translate),
}
"""Each kind of question with its weight in the corpus."""


def draw_question(rng: random.Random, language: Language, *, kind: str | None = None, heldout: bool = False) -> Item:
    """A question of `kind` (of any when None) from the training side of the split, or from the held-out one."""
    if kind is None:
        (kind,) = rng.choices(list(KINDS), [weight for weight, _ in KINDS.values()])
    while True:
        item = KINDS[kind][1](rng, language)
        if is_heldout(item.key) == heldout:
            return item


def heldout_questions(*, seed: int = 0, count: int = 200) -> list[Question]:
    """`count` different questions that no stream of any seed asks, evenly over kinds and languages.

    Raises:
        UserError: there are not that many.
    """
    rng = generator(seed, "heldout", 0)
    found: dict[str, Question] = {}
    cells = list(itertools.product(KINDS, LANGUAGES))
    while len(found) < count:
        for kind, language in list(cells):
            items = (draw_question(rng, language, kind=kind, heldout=True) for _ in range(1000))
            fresh = next((item for item in items if item.question not in found), None)
            if fresh is None:
                cells.remove((kind, language))
            elif len(found) < count:
                found[fresh.question] = Question(fresh.question, fresh.answer, fresh.wrong, language, kind)
        if not cells:
            raise UserError(f"the sample corpus has no more than {len(found)} held-out questions; ask for fewer")
    return list(found.values())
