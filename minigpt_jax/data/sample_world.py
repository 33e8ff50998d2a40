"""The small world of the sample corpus: its people, lands and words, and the sentences that speak of them.

Almost everything here is data in two languages. In a table of things the first Chinese character is the measure word:
"kite": "只风筝" reads "a kite" and "一只风筝". In a template, {s} and {v} stand for the subject and the value of a
fact; English has {S} at the start of a sentence and {poss}, {Poss} for the possessive, so that a pronoun can stand in.
"""

import functools
import itertools
import random
from collections.abc import Iterable
from typing import Literal, NamedTuple

Language = Literal["en", "zh"]
Table = dict[str, str]
"""English word to Chinese word."""
Templates = dict[Language, tuple[str, ...]]

LANGUAGES: tuple[Language, Language] = ("en", "zh")

# --- Words ---

# fmt: off
COLOURS: Table = {
    "red": "红色", "blue": "蓝色", "green": "绿色", "yellow": "黄色", "purple": "紫色", "white": "白色",
    "black": "黑色", "pink": "粉色",
}
THINGS: Table = {
    "kite": "只风筝", "hat": "顶帽子", "key": "把钥匙", "book": "本书", "cup": "个杯子", "ball": "个皮球",
    "umbrella": "把雨伞", "lamp": "盏台灯", "map": "张地图", "ring": "枚戒指",
}
PLACES: Table = {
    "in the box": "在盒子里", "on the table": "在桌子上", "under the bed": "在床底下", "behind the door": "在门后面",
    "under the tree": "在大树下", "in the garden": "在花园里",
}
PETS: Table = {
    "cat": "只猫", "dog": "只狗", "rabbit": "只兔子", "parrot": "只鹦鹉",
    "turtle": "只乌龟", "hamster": "只仓鼠", "duck": "只鸭子", "hedgehog": "只刺猬",
}
WILD_ANIMALS: Table = {
    "lion": "头狮子", "eagle": "只老鹰", "fox": "只狐狸", "bear": "头熊", "tiger": "只老虎", "owl": "只猫头鹰",
    "monkey": "只猴子", "frog": "只青蛙",
}
FRUITS: Table = {
    "apple": "个苹果", "pear": "个梨", "peach": "个桃子", "banana": "根香蕉", "lemon": "个柠檬", "plum": "个李子",
}
VEGETABLES: Table = {
    "carrot": "根胡萝卜", "potato": "个土豆", "onion": "个洋葱", "cabbage": "棵白菜", "pumpkin": "个南瓜",
}
VEHICLES: Table = {
    "car": "辆汽车", "bus": "辆公共汽车", "train": "列火车", "ship": "艘轮船", "bicycle": "辆自行车",
}
INSTRUMENTS: Table = {
    "piano": "架钢琴", "drum": "面鼓", "flute": "支长笛", "violin": "把小提琴",
    "guitar": "把吉他", "trumpet": "支小号", "harp": "架竖琴", "cello": "把大提琴",
}
CLOTHES: Table = {
    "hat": "顶帽子", "coat": "件外套", "scarf": "条围巾", "shirt": "件衬衫",
}
ANIMALS: Table = PETS | WILD_ANIMALS
CATEGORIES: tuple[tuple[str, str, Table], ...] = (
    ("an animal", "动物", ANIMALS), ("a fruit", "水果", FRUITS), ("a vegetable", "蔬菜", VEGETABLES),
    ("a vehicle", "交通工具", VEHICLES), ("a musical instrument", "乐器", INSTRUMENTS),
    ("a piece of clothing", "衣物", CLOTHES),
)
NOUNS: Table = THINGS | ANIMALS | FRUITS | VEGETABLES | VEHICLES | INSTRUMENTS | CLOTHES
OPPOSITES: tuple[tuple[tuple[str, str], tuple[str, str]], ...] = (
    (("hot", "cold"), ("热", "冷")), (("big", "small"), ("大", "小")), (("long", "short"), ("长", "短")),
    (("high", "low"), ("高", "低")), (("fast", "slow"), ("快", "慢")), (("heavy", "light"), ("重", "轻")),
    (("new", "old"), ("新", "旧")), (("happy", "sad"), ("高兴", "难过")), (("open", "closed"), ("开", "关")),
    (("day", "night"), ("白天", "黑夜")),
)
TIMES: Table = {
    "One sunny morning": "一个晴朗的早晨", "One rainy afternoon": "一个下雨的午后", "Early on Monday": "星期一一大早",
    "Late on Tuesday": "星期二傍晚", "On a windy Wednesday": "一个刮风的星期三", "On Thursday morning": "星期四上午",
    "On Friday afternoon": "星期五下午", "On a quiet Sunday": "一个安静的星期天",
    "One cold winter day": "一个寒冷的冬日",
    "In the middle of summer": "盛夏的一天", "On the first day of spring": "春天的第一天",
    "One foggy day": "一个有雾的日子",
}
NUMBERS: Table = {
    "three": "三", "four": "四", "five": "五", "six": "六", "seven": "七", "eight": "八", "nine": "九",
}
SKILLS: Table = {
    "swim": "游泳", "ride a bicycle": "骑自行车", "skate": "滑冰", "bake bread": "烤面包", "fly a kite": "放风筝",
    "climb trees": "爬树", "draw horses": "画马", "dance": "跳舞", "cook soup": "做汤", "fish": "钓鱼",
}
TASKS: Table = {
    "swept the street": "扫街", "carried water": "挑水", "picked plums": "摘李子", "washed windows": "擦窗户",
    "watched the sheep": "放羊", "painted fences": "刷篱笆", "chopped wood": "劈柴", "fed the chickens": "喂鸡",
}
CROSSINGS: Table = {
    "in a fisherman's boat": "坐着渔夫的小船", "on a raft of logs": "划着木筏", "on the back of a horse": "骑着一匹马",
    "over a fallen tree": "踩着一棵倒下的大树", "by holding on to a long rope": "拉着一根长绳子",
}

# --- The world ---

TOWNS: Table = {
    "Lindel": "林德尔", "Tarn": "塔恩", "Oakham": "奥卡姆", "Pelby": "佩尔比",
    "Rivet": "里维特", "Suri": "苏里", "Windle": "温德尔", "Marlow": "马洛",
}
FOODS: Table = {
    "noodles": "面条", "dumplings": "饺子", "pancakes": "煎饼", "cheese": "奶酪",
    "mushroom soup": "蘑菇汤", "rice": "米饭", "bread": "面包", "fish": "鱼",
}
RIVERS: Table = {
    "the Ona": "奥纳河", "the Teal": "蒂尔河", "the Umber": "安博河",
    "the Wend": "文德河", "the Zell": "泽尔河", "the Kesh": "凯什河",
}
PRODUCTS: Table = {"honey": "蜂蜜", "salt": "盐", "silk": "丝绸", "glass": "玻璃", "tea": "茶叶", "paper": "纸"}


class Person(NamedTuple):
    """Somebody of the world; the last five are facts."""

    en: str
    zh: str
    pronoun: str
    home: str
    pet: str
    food: str
    colour: str
    instrument: str


class Land(NamedTuple):
    """A land of the world; the last four are facts."""

    en: str
    zh: str
    capital: str
    river: str
    flag: str
    product: str


PEOPLE = (
    Person("Mina", "米娜", "she", "Lindel", "cat", "noodles", "red", "piano"),
    Person("Tom", "汤姆", "he", "Tarn", "dog", "bread", "green", "drum"),
    Person("Anna", "安娜", "she", "Oakham", "rabbit", "dumplings", "blue", "flute"),
    Person("Jack", "杰克", "he", "Pelby", "parrot", "cheese", "yellow", "violin"),
    Person("Lucy", "露西", "she", "Rivet", "turtle", "rice", "purple", "guitar"),
    Person("Peter", "彼得", "he", "Suri", "hamster", "fish", "white", "trumpet"),
    Person("Rosa", "罗莎", "she", "Windle", "duck", "pancakes", "black", "harp"),
    Person("Sam", "山姆", "he", "Marlow", "hedgehog", "mushroom soup", "pink", "cello"),
)
LANDS = (
    Land("Arlen", "阿尔伦", "Lindel", "the Teal", "lion", "tea"),
    Land("Belmar", "贝尔玛", "Suri", "the Ona", "owl", "salt"),
    Land("Corvia", "科维亚", "Oakham", "the Zell", "fox", "glass"),
    Land("Dunmore", "邓莫尔", "Tarn", "the Kesh", "eagle", "honey"),
)


class Relation(NamedTuple):
    """A kind of fact: the attribute that holds it, the words it can take, and how it is said and asked."""

    name: str
    values: Table
    statements: Templates
    questions: Templates


PERSON_RELATIONS = (
    Relation("home", TOWNS, {
        "en": ("{S} lives in {v}.", "{Poss} home is in {v}.", "{S} has a house in the town of {v}.",
               "The town where {s} lives is called {v}."),
        "zh": ("{s}住在{v}。", "{s}的家在{v}。", "{s}在{v}有一座房子。", "{s}住的小镇叫{v}。"),
    }, {
        "en": ("Where does {s} live?", "Which town does {s} live in?", "In which town is {poss} home?",
               "What is the name of the town where {s} lives?", "{S} lives in which town?"),
        "zh": ("{s}住在哪里？", "{s}住在哪个小镇？", "{s}的家在哪里？", "{s}住的小镇叫什么名字？",
               "请问{s}的家在哪个小镇？"),
    }),
    Relation("pet", PETS, {
        "en": ("{S} has {v}.", "{Poss} pet is {v}.", "{S} keeps {v} as a pet.", "The pet that {s} looks after is {v}."),
        "zh": ("{s}养了{v}。", "{s}的宠物是{v}。", "{s}家里养着{v}。", "陪着{s}的宠物是{v}。"),
    }, {
        "en": ("What pet does {s} have?", "What animal does {s} keep?", "What is {poss} pet?",
               "Which animal lives with {s}?", "Which pet does {s} look after?"),
        "zh": ("{s}养了什么宠物？", "{s}的宠物是什么？", "{s}家里养着什么动物？", "{s}照顾的是什么动物？",
               "陪着{s}的是什么动物？"),
    }),
    Relation("food", FOODS, {
        "en": ("{Poss} favourite food is {v}.", "{S} likes {v} best of all.", "{S} loves to eat {v}.",
               "What {s} likes to eat most is {v}."),
        "zh": ("{s}最爱吃{v}。", "{s}最喜欢的食物是{v}。", "{s}晚饭常常吃{v}。", "对{s}来说，最好吃的是{v}。"),
    }, {
        "en": ("What is {poss} favourite food?", "What does {s} like to eat most?", "Which food does {s} like best?",
               "What food does {s} love?", "What would {s} choose for dinner?"),
        "zh": ("{s}最爱吃什么？", "{s}最喜欢的食物是什么？", "{s}晚饭想吃什么？", "哪种食物{s}最喜欢？",
               "请问{s}爱吃什么？"),
    }),
    Relation("colour", COLOURS, {
        "en": ("{Poss} favourite colour is {v}.", "{S} likes {v} more than any other colour.",
               "The colour {s} likes best is {v}.", "When {s} paints, the colour is always {v}."),
        "zh": ("{s}最喜欢的颜色是{v}。", "{s}最喜欢{v}。", "在所有颜色里，{s}最爱{v}。", "{s}画画时总是选{v}。"),
    }, {
        "en": ("What is {poss} favourite colour?", "Which colour does {s} like best?",
               "What colour does {s} like most?",
               "Which colour does {s} choose for painting?", "Of all colours, which one does {s} prefer?"),
        "zh": ("{s}最喜欢的颜色是什么？", "{s}最喜欢什么颜色？", "在所有颜色里，{s}最爱哪一种？",
               "{s}画画时选什么颜色？",
               "请问{s}喜欢哪种颜色？"),
    }),
    Relation("instrument", INSTRUMENTS, {
        "en": ("{S} plays {v}.", "{Poss} instrument is {v}.", "{S} practises {v} every day.",
               "The instrument {s} plays is {v}."),
        "zh": ("{s}的乐器是{v}。", "{s}每天练习{v}。", "{s}最拿手的乐器是{v}。", "{s}在乐队里负责{v}。"),
    }, {
        "en": ("What instrument does {s} play?", "What is {poss} instrument?", "Which instrument does {s} practise?",
               "What does {s} play in the band?", "Which instrument do you hear at {poss} house?"),
        "zh": ("{s}的乐器是什么？", "{s}每天练习什么乐器？", "{s}最拿手的乐器是什么？", "{s}在乐队里负责什么乐器？",
               "请问{s}会哪种乐器？"),
    }),
)
LAND_RELATIONS = (
    Relation("capital", TOWNS, {
        "en": ("The capital of {s} is {v}.", "{v} is the capital of {s}.", "{S} has its capital at {v}."),
        "zh": ("{s}的首都是{v}。", "{v}是{s}的首都。", "{s}把{v}定为首都。"),
    }, {
        "en": ("What is the capital of {s}?", "Which town is the capital of {s}?",
               "What is the name of {poss} capital?",
               "Can you name the capital of {s}?", "{S} has its capital at which town?"),
        "zh": ("{s}的首都是哪里？", "{s}的首都叫什么名字？", "哪座城是{s}的首都？", "请问{s}的首都在哪里？",
               "{s}以哪座城为首都？"),
    }),
    Relation("river", RIVERS, {
        "en": ("The longest river in {s} is {v}.", "The great river of {s} is called {v}.",
               "The river that flows through {s} is {v}."),
        "zh": ("{s}最长的河是{v}。", "流过{s}的大河叫{v}。", "{s}有一条大河，名叫{v}。"),
    }, {
        "en": ("What is the longest river in {s}?", "Which river flows through {s}?", "What is the great river of {s}?",
               "Can you name the river of {s}?", "What is {poss} river called?"),
        "zh": ("{s}最长的河是哪条？", "流过{s}的是哪条河？", "{s}的大河叫什么名字？", "请问{s}有什么河？",
               "哪条河流过{s}？"),
    }),
    Relation("flag", WILD_ANIMALS, {
        "en": ("The flag of {s} shows {v}.", "The animal on {poss} flag is {v}.", "On the flag of {s} there is {v}."),
        "zh": ("{s}的旗子上画着{v}。", "{s}旗子上的动物是{v}。", "在{s}的旗子上能看到{v}。"),
    }, {
        "en": ("What does the flag of {s} show?", "Which animal is on {poss} flag?",
               "What animal does {poss} flag show?",
               "What can you see on the flag of {s}?", "Can you name the animal on the flag of {s}?"),
        "zh": ("{s}的旗子上画着什么？", "{s}旗子上的动物是什么？", "在{s}的旗子上能看到什么？",
               "请问{s}的旗子上是什么动物？",
               "哪种动物在{s}的旗子上？"),
    }),
    Relation("product", PRODUCTS, {
        "en": ("{S} is famous for its {v}.", "The best {v} comes from {s}.", "People in {s} are proud of their {v}."),
        "zh": ("{s}以{v}闻名。", "最好的{v}来自{s}。", "{s}的人为自己的{v}骄傲。"),
    }, {
        "en": ("What is {s} famous for?", "What comes from {s}?", "What are people in {s} proud of?",
               "Which product made {s} famous?", "What do traders buy in {s}?"),
        "zh": ("{s}以什么闻名？", "{s}出产什么？", "{s}的人为什么东西骄傲？", "商人去{s}买什么？",
               "请问{s}有什么特产？"),
    }),
)
# fmt: on

# --- Speaking of it ---


class Word(NamedTuple):
    """A word or phrase in both languages."""

    en: str
    zh: str


class Noun(NamedTuple):
    """A noun that can be counted."""

    en: str
    zh: str
    measure: str

    def counted(self, colour: Word | None = None) -> Word:
        """`a red kite`, `一只红色的风筝`."""
        english = f"{colour.en} {self.en}" if colour else self.en
        chinese = f"{colour.zh}的{self.zh}" if colour else self.zh
        return Word(f"{'an' if english[0] in 'aeiou' else 'a'} {english}", f"一{self.measure}{chinese}")

    def plural(self) -> Word:
        """`kites`, `boxes`, `cherries`; the same in Chinese."""
        if self.en.endswith("y") and self.en[-2] not in "aeiou":
            return Word(self.en[:-1] + "ies", self.zh)
        return Word(self.en + ("es" if self.en.endswith(("x", "s", "ch", "sh", "ato")) else "s"), self.zh)


def draw_words(rng: random.Random, table: Table, count: int) -> list[Word]:
    """`count` different entries of `table`."""
    return [Word(*entry) for entry in rng.sample(list(table.items()), count)]


def noun_from(word: Word) -> Noun:
    """An entry of a table of things, parted from its measure word."""
    return Noun(word.en, word.zh[1:], word.zh[0])


def draw_nouns(rng: random.Random, table: Table, count: int) -> list[Noun]:
    """`count` different things of `table`."""
    return [noun_from(word) for word in draw_words(rng, table, count)]


def say(value: object, language: Language) -> str:
    """`value` in `language` when it has two; numbers and plain strings as they are."""
    return str(getattr(value, language, value))


def fill(template: str, slots: dict[str, object], language: Language) -> str:
    """`template` with each slot said in `language`."""
    return template.format_map(_Spoken(slots, language))


class _Spoken:
    """Slots as a mapping to text, said only when a template uses them."""

    def __init__(self, slots: dict[str, object], language: Language):
        self.slots = slots
        self.language = language

    def __getitem__(self, name: str) -> str:
        return say(self.slots[name], self.language)


def sentence(text: str, language: Language) -> str:
    """`text` as a full answer; the stop follows the script, or for bare numbers the language."""
    if text.isascii() and (language == "en" or text[0].isalpha()):
        return f"{capitalised(text)}."
    return f"{text}。"


def join(parts: Iterable[str], language: Language) -> str:
    """Sentences one after the other; Chinese needs no space between."""
    return (" " if language == "en" else "").join(parts)


def capitalised(text: str) -> str:
    """`text` with a capital at its start; Chinese stays as it is."""
    return text[0].upper() + text[1:]


@functools.cache
def facts() -> tuple[tuple[Relation, Person | Land], ...]:
    """Every fact of the world: what is said, about whom."""
    people = itertools.product(PERSON_RELATIONS, PEOPLE)
    return (*people, *itertools.product(LAND_RELATIONS, LANDS))


def value_of(relation: Relation, word: str) -> Word:
    """A fact's value as it is said: `a cat`, `the piano`, `Lindel`."""
    value = Word(word, relation.values[word])
    if relation.name in ("pet", "flag"):
        return noun_from(value).counted()
    return Word(f"the {word}", value.zh[1:]) if relation.name == "instrument" else value


def subject_slots(subject: Person | Land, *, pronoun: bool) -> dict[str, object]:
    """Template slots for the subject of a fact: the name, or a pronoun for it."""
    if isinstance(subject, Person) and pronoun:
        she = subject.pronoun == "she"
        name, possessive = Word(subject.pronoun, "她" if she else "他"), "her" if she else "his"
    else:
        name, possessive = Word(subject.en, subject.zh), f"{subject.en}'s"
    capital = name._replace(en=name.en.capitalize())
    return {"s": name, "S": capital, "poss": possessive, "Poss": capitalised(possessive)}
