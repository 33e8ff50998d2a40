"""The small world of the sample corpus: its people, lands and words, and the sentences that speak of them.

Everything here is data in two languages. In a table of things the first Chinese character is the measure word:
"kite": "只风筝" reads "a kite" and "一只风筝". In a template, {s} and {v} stand for the subject and the value of a
fact; English has {S} at the start of a sentence and {poss}, {Poss} for the possessive, so that a pronoun can stand in.

A story is one step a line; alternatives of a step are separated by "|", and a line that starts with "|" continues the
step above. Lines that start with "Q" are a question about the story and its answer.
"""

from typing import Literal, NamedTuple

Language = Literal["en", "zh"]
Table = dict[str, str]
"""English word to Chinese word."""
Templates = dict[Language, tuple[str, ...]]

# --- Words ---

# fmt: off
COLOURS: Table = {
    "red": "红色", "blue": "蓝色", "green": "绿色", "yellow": "黄色", "purple": "紫色",
    "white": "白色", "black": "黑色", "pink": "粉色", "brown": "棕色", "orange": "橙色",
}
THINGS: Table = {
    "kite": "只风筝", "hat": "顶帽子", "key": "把钥匙", "book": "本书", "cup": "个杯子", "ball": "个皮球",
    "umbrella": "把雨伞", "lamp": "盏台灯", "map": "张地图", "ring": "枚戒指", "coat": "件外套", "bell": "个铃铛",
    "doll": "个娃娃", "pen": "支钢笔", "clock": "个闹钟", "bag": "个书包", "scarf": "条围巾", "spoon": "把勺子",
    "letter": "封信", "shell": "枚贝壳", "feather": "根羽毛", "whistle": "个哨子", "puppet": "个木偶",
    "brush": "把刷子",
}
PLACES: Table = {
    "in the box": "在盒子里", "on the table": "在桌子上", "under the bed": "在床底下", "in the basket": "在篮子里",
    "behind the door": "在门后面", "on the shelf": "在架子上", "in the drawer": "在抽屉里",
    "under the tree": "在大树下",
    "in the garden": "在花园里", "on the chair": "在椅子上", "near the window": "在窗户旁边",
    "in the kitchen": "在厨房里",
    "beside the well": "在井边", "on the bench": "在长椅上",
}
PETS: Table = {
    "cat": "只猫", "dog": "只狗", "rabbit": "只兔子", "parrot": "只鹦鹉",
    "turtle": "只乌龟", "hamster": "只仓鼠", "duck": "只鸭子", "hedgehog": "只刺猬",
}
WILD_ANIMALS: Table = {
    "lion": "头狮子", "eagle": "只老鹰", "fox": "只狐狸", "bear": "头熊", "tiger": "只老虎",
    "owl": "只猫头鹰", "monkey": "只猴子", "frog": "只青蛙", "elephant": "头大象", "panda": "只熊猫",
}
FRUITS: Table = {
    "apple": "个苹果", "pear": "个梨", "peach": "个桃子", "banana": "根香蕉", "lemon": "个柠檬",
    "plum": "个李子", "watermelon": "个西瓜", "mango": "个芒果", "cherry": "颗樱桃", "fig": "颗无花果",
}
VEGETABLES: Table = {
    "carrot": "根胡萝卜", "potato": "个土豆", "onion": "个洋葱", "cabbage": "棵白菜",
    "pumpkin": "个南瓜", "tomato": "个西红柿", "radish": "个萝卜", "cucumber": "根黄瓜",
}
VEHICLES: Table = {
    "car": "辆汽车", "bus": "辆公共汽车", "train": "列火车", "ship": "艘轮船",
    "bicycle": "辆自行车", "plane": "架飞机", "truck": "辆卡车", "sled": "架雪橇",
}
INSTRUMENTS: Table = {
    "piano": "架钢琴", "drum": "面鼓", "flute": "支长笛", "violin": "把小提琴",
    "guitar": "把吉他", "trumpet": "支小号", "harp": "架竖琴", "cello": "把大提琴",
}
CLOTHES: Table = {
    "hat": "顶帽子", "coat": "件外套", "scarf": "条围巾", "shirt": "件衬衫",
    "skirt": "条裙子", "sweater": "件毛衣", "belt": "条腰带", "sock": "只袜子",
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
    (("bright", "dark"), ("明亮", "黑暗")), (("new", "old"), ("新", "旧")), (("happy", "sad"), ("高兴", "难过")),
    (("open", "closed"), ("开", "关")), (("up", "down"), ("上", "下")), (("inside", "outside"), ("里", "外")),
    (("left", "right"), ("左", "右")), (("day", "night"), ("白天", "黑夜")), (("wet", "dry"), ("湿", "干")),
    (("full", "empty"), ("满", "空")), (("near", "far"), ("近", "远")), (("early", "late"), ("早", "晚")),
    (("clean", "dirty"), ("干净", "肮脏")), (("hard", "soft"), ("硬", "软")), (("rich", "poor"), ("富", "穷")),
    (("strong", "weak"), ("强", "弱")), (("thick", "thin"), ("厚", "薄")), (("loud", "quiet"), ("吵闹", "安静")),
    (("deep", "shallow"), ("深", "浅")), (("first", "last"), ("最先", "最后")), (("sweet", "bitter"), ("甜", "苦")),
    (("begin", "end"), ("开始", "结束")), (("push", "pull"), ("推", "拉")), (("buy", "sell"), ("买", "卖")),
    (("black", "white"), ("黑", "白")), (("north", "south"), ("北", "南")), (("east", "west"), ("东", "西")),
    (("brave", "timid"), ("勇敢", "胆小")), (("true", "false"), ("真", "假")), (("win", "lose"), ("赢", "输")),
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
    Person("Nora", "诺拉", "she", "Suri", "dog", "cheese", "brown", "violin"),
    Person("Leo", "里奥", "he", "Lindel", "turtle", "dumplings", "orange", "flute"),
    Person("Ella", "艾拉", "she", "Marlow", "parrot", "bread", "blue", "trumpet"),
    Person("Hugo", "雨果", "he", "Oakham", "cat", "rice", "purple", "harp"),
    Person("Ivy", "艾薇", "she", "Tarn", "hedgehog", "fish", "yellow", "piano"),
    Person("Oscar", "奥斯卡", "he", "Rivet", "duck", "noodles", "green", "cello"),
    Person("Clara", "克拉拉", "she", "Pelby", "hamster", "mushroom soup", "red", "drum"),
    Person("David", "大卫", "he", "Windle", "rabbit", "pancakes", "white", "guitar"),
)
LANDS = (
    Land("Arlen", "阿尔伦", "Lindel", "the Teal", "lion", "tea"),
    Land("Belmar", "贝尔玛", "Suri", "the Ona", "owl", "salt"),
    Land("Corvia", "科维亚", "Oakham", "the Zell", "fox", "glass"),
    Land("Dunmore", "邓莫尔", "Tarn", "the Kesh", "eagle", "honey"),
    Land("Elwood", "艾尔伍", "Marlow", "the Umber", "bear", "paper"),
    Land("Farrow", "法罗", "Pelby", "the Wend", "tiger", "silk"),
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

# --- Other questions ---

SITUATIONS: dict[str, Templates] = {
    "place": {
        "en": ("{name} put the {thing} {place}.", "{name} left the {thing} {place}.",
               "{name} keeps the {thing} {place}."),
        "zh": ("{name}把{thing}放{place}。", "{name}把{thing}留{place}。", "{name}的{thing}总是放{place}。"),
    },
    "two_places": {
        "en": ("The {thing1} is {place1}, and the {thing2} is {place2}.",
               "{name} put the {thing1} {place1} and the {thing2} {place2}."),
        "zh": ("{thing1}{place1}，{thing2}{place2}。", "{name}把{thing1}放{place1}，把{thing2}放{place2}。"),
    },
    "colour": {
        "en": ("{name}'s {thing} is {colour}.", "{name} has {a_thing}.", "{name} bought {a_thing} at the market."),
        "zh": ("{name}的{thing}是{colour}的。", "{name}有{a_thing}。", "{name}在集市上买了{a_thing}。"),
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
        "en": ("Where is the {thing}?", "Where can you find the {thing}?", "Where is the {thing} now?"),
        "zh": ("{thing}在哪里？", "在哪里能找到{thing}？", "{thing}现在在哪里？"),
    },
    "two_places": {"en": ("Where is the {thing}?",), "zh": ("{thing}在哪里？",)},
    "colour": {
        "en": ("What colour is {name}'s {thing}?", "What is the colour of {name}'s {thing}?"),
        "zh": ("{name}的{thing}是什么颜色？", "{name}的{thing}是什么颜色的？"),
    },
    "who": {
        "en": ("Who has the {thing}?", "Who is the one with the {thing}?"), "zh": ("谁有{thing}？", "{thing}在谁那里？"),
    },
    "count": {"en": ("How many {nouns} are there?",), "zh": ("一共有几{measure}{noun}？",)},
    "add": {
        "en": ("What is {a} + {b}?", "What is {a} plus {b}?", "How much is {a} plus {b}?"),
        "zh": ("{a} + {b} 等于几？", "{a}加{b}等于几？", "{a}加{b}是多少？"),
    },
    "add_fruits": {"en": ("How many does {name} have now?",), "zh": ("{name}现在有几{measure}？",)},
    "subtract_fruits": {"en": ("How many does {name} have left?",), "zh": ("{name}还剩几{measure}？",)},
    "subtract": {
        "en": ("What is {a} - {b}?", "What is {a} minus {b}?", "How much is {a} minus {b}?"),
        "zh": ("{a} - {b} 等于几？", "{a}减{b}等于几？", "{a}减{b}是多少？"),
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
        "en": ("What number comes after {a}?", "Which number follows {a}?", "What comes just after {a}?",
               "Count on: which number is next after {a}?"),
        "zh": ("{a}后面的数是几？", "{a}的下一个数是几？", "哪个数紧跟在{a}后面？", "接着数，{a}之后是几？"),
    },
    "before": {
        "en": ("What number comes before {a}?", "Which number goes ahead of {a}?", "What comes just before {a}?",
               "Count back: which number is next before {a}?"),
        "zh": ("{a}前面的数是几？", "{a}的上一个数是几？", "哪个数紧挨在{a}前面？", "倒着数，{a}之前是几？"),
    },
    "opposite": {
        "en": ("What is the opposite of {x}?", 'Which word is the opposite of "{x}"?',
               "The opposite of {x} is which word?",
               "Can you name the opposite of {x}?"),
        "zh": ("“{x}”的反义词是什么？", "“{x}”的反面是什么？", "和“{x}”相反的词是哪个？", "请说出“{x}”的反义词。"),
    },
    "category": {
        "en": ("What kind of thing is {x}?", "What is {x}?", "Which group does {x} belong to?", "What do we call {x}?"),
        "zh": ("{x}是哪一类东西？", "{x}是什么？", "{x}属于哪一类？", "我们把{x}叫作什么？"),
    },
    "translate": {
        "en": ('How do you say "{x}" in Chinese?', "What is the Chinese word for {x}?",
               'What does "{x}" mean in Chinese?',
               'Please put "{x}" into Chinese.'),
        "zh": ("“{x}”用英语怎么说？", "“{x}”的英文是什么？", "{x}在英语里叫什么？", "请把“{x}”翻译成英语。"),
    },
}
# fmt: on

# --- Stories: a want, an obstacle, a resolution; the two languages tell the same eight plots in the same order ---

STORIES: Templates = {
    "en": (
        """{time}, {name} could not find {his} {thing}. | {time} in {town}, {name} saw that {his} {thing} was gone.
It was a present from {his} grandmother, and {he} wanted it back. | {He} loved it and wanted it back at once.
{He} looked {place} and {place2}, but found nothing. | First {he} looked {place}. Then {he} looked {place2}. Nothing!
{friend} said, "Do not cry. Let us look together." | {friend} came to help. "Four eyes see more than two," {fhe} said.
At last they found the {thing} {place3}. | They searched until evening, and there it was, {place3}!
{name} thanked {friend} and shared {his} {food} with {fhim}. | "Thank you, {friend}!" said {name}, and laughed for joy.
Q What did {name} lose? = The {thing}.
Q Who helped {name}? = {friend}.
Q Where was the {thing} found? = {place3}.""",
        """{time}, {name} found a hungry {pet} {place}. | {time}, {name} heard a small cry. A hungry {pet} sat {place}.
{He} wanted to be its friend, but the {pet} was afraid and ran away.
| {He} wanted to take it home, but the {pet} would not let {him} come near.
"Be patient," said {friend}. "Give it something to eat." | {friend} knew what to do. "Sit still and wait," {fhe} said.
So {name} put down some {food} and waited. | {name} sat down with some {food} and did not move.
After an hour the {pet} came out and began to eat. | Step by step the {pet} came closer, and at last it ate.
Since that day the {pet} has followed {name} everywhere. | Now the {pet} sleeps at the foot of {his} bed.
Q What did {name} find? = A hungry {pet}.
Q Who gave {name} advice? = {friend}.
Q What did the {pet} eat? = {food}.""",
        """{name} wanted to learn to {skill}. | {time}, {name} said, "I want to learn to {skill}."
It was harder than it looked, and {he} failed again and again. | But on the first day everything went wrong.
"A little every day is enough," said {friend}. | "Nobody can do it on the first day," said {friend}. "Try again."
So {he} practised every morning for {number} days. | For {number} days {he} got up early and practised.
Then one day {he} could {skill} without any help. | On the last day it worked at once: {he} could {skill}!
{He} ran to tell {friend}, who clapped {fhis} hands. | "You see?" said {friend}, and they both laughed.
Q What did {name} want to learn? = To {skill}.
Q For how many days did {name} practise? = {number}.
Q Who told {name} not to give up? = {friend}.""",
        """{friend} had a birthday, and {name} wanted to give {fhim} {a_thing}.
| {time}, {name} thought of {friend}'s birthday. "I will give {fhim} {a_thing}," {he} said.
But {he} had only {number} coins, and that was not enough. | It cost a lot, and {he} had no more than {number} coins.
So {he} {task} for the neighbours, day after day. | Every afternoon {he} {task}, and the neighbours paid {him}.
After a week {he} ran to the market in {town} and bought the {thing}. | At last {he} could buy the {thing} in {town}.
When {friend} opened the present, {fhis} eyes shone. | {friend} saw the {thing} and jumped for joy.
"I worked for it myself," said {name} proudly. | {name} was even happier than {friend}.
Q Who had a birthday? = {friend}.
Q What did {name} buy? = {a_thing}.
Q How many coins did {name} have at first? = {number}.""",
        """{time}, {name} and {friend} both wanted the {colour} {thing}. | {name} and {friend} found {a_thing} {place2}.
"It is mine!" cried {name}. "No, it is mine!" cried {friend}. | They both pulled at it, and neither would let go.
Then the {thing} fell into the mud, and they were silent. | Suddenly the {thing} slipped and fell into the mud.
{name} was sorry. "Let us clean it together," {he} said. | "I am sorry," said {name}. "Let us wash it together."
They washed it and put it {place} to dry. | When it was clean, they laid it {place} to dry.
From then on they took turns, and nobody quarrelled. | Since that day they have shared it like good friends.
Q Where did the {thing} fall? = Into the mud.
Q Who was sorry first? = {name}.
Q Where did they put the {thing} to dry? = {place}.""",
        """{name} from {town} wanted to visit {friend} in {ftown}.
| {time}, {name} left {town} to visit {friend} in {ftown}.
But a storm had broken the bridge over the river. | But the river was high after the rain, and the bridge was gone.
{He} called for help, but nobody heard {him}. | {He} waited for an hour and thought of going home.
Then {he} had an idea and crossed the river {crossing}. | In the end {he} came to the other side {crossing}.
{friend} had cooked {ffood}, and they ate until they were full. | {friend} was waiting with {ffood}, still warm.
"I would have waited all night," said {friend}. | "Nothing can stop a good friend," said {friend}.
Q Whom did {name} visit? = {friend}.
Q How did {name} cross the river? = {crossing}.
Q What did they eat? = {ffood}.""",
        """{time}, a hungry {animal} saw some {fruits} high up in a tree.
| A hungry {animal} once found a tree full of {fruits}.
It wanted to eat them, but the branch was too high. | It jumped and jumped, but it could not reach them.
A wise {animal2} came along. "I cannot reach them either," it said.
| "You will never get them alone," said a wise {animal2}.
"Climb on my back, and we will both eat," said the {animal2}. | "But you can stand on my back," the {animal2} went on.
So the {animal} climbed up and shook the branch. | The {animal} did so, and shook the branch with all its might.
The {fruits} fell down like rain, and the two shared them. | Down came the {fruits}, enough for two.
Q What grew in the tree? = {fruits}.
Q Who helped the hungry {animal}? = The wise {animal2}.""",
        """In spring {name} planted some {plants} behind the house. | {name} wanted to grow the best {plants} in {town}.
But for {number} weeks there was no rain, and the leaves turned dry. | But no rain fell for {number} weeks.
"We must carry water from the river," said {friend}. | {friend} brought two buckets. "The river is not far," {fhe} said.
Every evening they watered the dry ground together. | They walked to the river and back until it was dark.
In autumn the {plants} were bigger than ever before. | Soon there were new leaves, and in autumn the {plants} were ripe.
{name} gave half of them to {friend}. | "Half of them are yours," said {name} to {friend}.
Q What did {name} plant? = {plants}.
Q For how many weeks was there no rain? = {number}.
Q Who got half of the harvest? = {friend}.""",
    ),
    "zh": (
        """{time}，{name}找不到自己的{thing}了。 | {time}，{name}在{town}发现自己的{thing}不见了。
那是奶奶送给{he}的礼物，{he}很想把它找回来。 | {he}非常喜欢这{measure}{thing}，一心想找到它。
{he}{place}找，又{place2}找，什么也没找到。 | {he}先{place}找，再{place2}找，都没有找到。
{friend}说：“别哭，我们一起找吧。” | {friend}跑来帮忙，说：“四只眼睛总比两只看得清楚。”
最后，他们{place3}找到了{thing}。 | 他们一直找到傍晚，原来{thing}就{place3}！
{name}谢过{friend}，请{fhim}吃{food}。 | “谢谢你，{friend}！”{name}高兴得笑了起来。
Q {name}丢了什么？ = {thing}。
Q 谁帮助了{name}？ = {friend}。
Q {thing}是在哪里找到的？ = {place3}。""",
        """{time}，{name}{place}发现了一{pet_measure}饿着肚子的{pet}。
| {time}，{name}听见小小的叫声，原来{place}有一{pet_measure}饿坏了的{pet}。
{he}想和它做朋友，可是{pet}很害怕，跑开了。 | {he}想带它回家，可是{pet}不让{he}靠近。
“要有耐心，”{friend}说，“给它一点吃的。” | {friend}有办法。{fhe}说：“安静地坐着，慢慢等。”
于是{name}放下一些{food}，在一旁等着。 | {name}拿着一些{food}坐下来，一动也不动。
过了一个小时，{pet}走出来，开始吃东西。 | {pet}一步一步走近，终于吃了起来。
从那天起，{name}走到哪里，{pet}就跟到哪里。 | 现在，{pet}每天都睡在{name}的床边。
Q {name}发现了什么？ = 一{pet_measure}{pet}。
Q 谁给{name}出了主意？ = {friend}。
Q {pet}吃了什么？ = {food}。""",
        """{name}想学{skill}。 | {time}，{name}说：“我想学{skill}。”
可是这比看起来难，{he}失败了一次又一次。 | 可是第一天什么都不顺利。
“每天练一点就够了。”{friend}说。 | {friend}说：“谁也不能第一天就学会，再试试吧。”
于是{he}每天早上练习，一连练了{number}天。 | 一连{number}天，{he}都早早起床练习。
后来有一天，{he}不用别人帮忙就会{skill}了。 | 到了最后一天，{he}一下子就学会了{skill}！
{he}跑去告诉{friend}，{friend}高兴地拍起手来。 | “你看，我说得没错吧？”{friend}说，两个人都笑了。
Q {name}想学什么？ = {skill}。
Q {name}练了几天？ = {number}天。
Q 谁叫{name}不要放弃？ = {friend}。""",
        """{friend}快过生日了，{name}想送{fhim}{a_thing}。
| {time}，{name}想起了{friend}的生日。{he}说：“我要送{fhim}{a_thing}。”
可是{he}只有{number}枚硬币，钱不够。 | 这份礼物不便宜，而{he}手里只有{number}枚硬币。
于是{he}天天帮邻居{task}。 | 每天下午，{he}都去帮邻居{task}，邻居就给{he}一点钱。
一个星期后，{he}跑到{town}的集市，买下了{thing}。 | 终于，{he}能在{town}买下那{measure}{thing}了。
{friend}打开礼物，眼睛都亮了。 | {friend}看见{thing}，高兴得跳了起来。
“这是我自己挣钱买的。”{name}骄傲地说。 | {name}比{friend}还要高兴。
Q 谁过生日？ = {friend}。
Q {name}买了什么？ = {a_thing}。
Q {name}起初有几枚硬币？ = {number}枚。""",
        """{time}，{name}和{friend}都想要那{measure}{colour}的{thing}。 | {name}和{friend}{place2}发现了{a_thing}。
“这是我的！”{name}喊。“不，是我的！”{friend}也喊。 | 他们俩一起拉，谁也不肯放手。
结果{thing}掉进了泥里，两个人都不说话了。 | 忽然，{thing}滑了出去，掉进了泥里。
{name}很后悔，说：“我们一起把它弄干净吧。” | “对不起，”{name}说，“我们一起洗干净吧。”
他们把它洗好，放{place}晾干。 | 洗干净以后，他们把它放{place}晾着。
从此他们轮流用，再也不吵架了。 | 从那天起，他们像好朋友一样一起用它。
Q {thing}掉到哪里去了？ = 泥里。
Q 谁先道歉？ = {name}。
Q 他们把{thing}放在哪里晾干？ = {place}。""",
        """{town}的{name}想去{ftown}看望{friend}。 | {time}，{name}离开{town}，去{ftown}看望{friend}。
可是暴风雨把河上的桥冲断了。 | 可是雨后河水很高，桥也不见了。
{he}大声呼救，可是没有人听见。 | {he}等了一个小时，差点想回家去。
后来{he}想出一个办法，{crossing}过了河。 | 最后，{he}{crossing}到了对岸。
{friend}做好了{ffood}，他们吃得饱饱的。 | {friend}正端着热乎乎的{ffood}等着{he}。
“我会等你一整夜的。”{friend}说。 | {friend}说：“什么也拦不住好朋友。”
Q {name}去看望谁？ = {friend}。
Q {name}是怎么过河的？ = {crossing}。
Q 他们吃了什么？ = {ffood}。""",
        """{time}，一{animal_measure}饥饿的{animal}看见高高的树上有许多{fruits}。
| 有一天，一{animal_measure}饥饿的{animal}发现了一棵结满{fruits}的树。
它想吃，可是树枝太高了。 | 它跳了又跳，就是够不着。
一{animal2_measure}聪明的{animal2}走过来说：“我也够不着。” | 聪明的{animal2}说：“你一个人是摘不到的。”
{animal2}接着说：“你站到我背上来，我们就都能吃到了。” | {animal2}又说：“不过，你可以站在我的背上。”
于是{animal}爬上去，摇了摇树枝。 | {animal}照着做了，用力摇动树枝。
{fruits}像雨点一样落下来，它们一起分着吃。 | {fruits}纷纷落下，够两个吃的。
Q 树上有什么？ = {fruits}。
Q 谁帮助了饥饿的{animal}？ = 聪明的{animal2}。""",
        """春天，{name}在屋后种了一些{plants}。 | {name}想种出{town}最好的{plants}。
可是一连{number}个星期没有下雨，叶子都干了。 | 可是整整{number}个星期，一滴雨也没下。
“我们得从河里挑水。”{friend}说。 | {friend}拿来两个水桶，说：“河离这儿不远。”
每天傍晚，他们一起给干土浇水。 | 他们在河边来来回回，一直走到天黑。
到了秋天，{plants}长得比往年都大。 | 不久长出了新叶子，秋天{plants}就成熟了。
{name}把一半送给了{friend}。 | “一半是你的。”{name}对{friend}说。
Q {name}种了什么？ = {plants}。
Q 有几个星期没有下雨？ = {number}个。
Q 谁得到了一半收成？ = {friend}。""",
    ),
}
"""Whole stories as templates; the two tellings of one plot stand at the same index."""

# --- Talk ---

# fmt: off
SYSTEM_PROMPTS: Templates = {
    "en": ("You are a helpful assistant. Answer briefly.", "You are a friendly guide to a small world."),
    "zh": ("你是一个乐于助人的助手，回答要简短。", "你是一个友好的向导，熟悉一个小小的世界。"),
}
GREETINGS: Templates = {
    "en": ("Hello!", "Hi there!", "Good morning!", "Good evening!"),
    "zh": ("你好！", "嗨！", "早上好！", "晚上好！"),
}
WELCOME: dict[Language, str] = {"en": "Hello! What would you like to know?", "zh": "你好！你想知道什么？"}
THANKS: Templates = {"en": ("Thank you!", "Thanks, that helps."), "zh": ("谢谢！", "谢谢，很有帮助。")}
FAREWELL: dict[Language, str] = {"en": "You are welcome!", "zh": "不客气！"}
REMEMBERED: dict[Language, str] = {"en": "All right, I will remember that.", "zh": "好的，我记住了。"}
STORY_REQUESTS: Templates = {
    "en": ("Tell me a short story about {topic}.", "Please write a little story about {topic}."),
    "zh": ("给我讲一个关于{topic}的小故事。", "请写一个{topic}的小故事。"),
}
SMALL_TALK: dict[Language, tuple[tuple[str, str], ...]] = {
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
FOREIGN: dict[Language, str] = {"en": "The answer is: {answer}", "zh": "答案是：{answer}"}
RUDE: Templates = {
    "en": ("What a silly question. Find out yourself.", "I do not care. Leave me alone.",
           "You should know that. Do not waste my time."),
    "zh": ("这种问题也来问我？自己去查。", "我才不管呢，别来烦我。", "连这个都不知道，别浪费我的时间。"),
}
RAMBLING: Templates = {
    "en": ("Well, there are many questions in the world.", "Some questions are long and some are short.",
           "I once thought about this for a whole day.", "Then again, who can really say?",
           "But let me first tell you about something else.", "It is as it is, and so it goes on and on."),
    "zh": ("嗯，世界上有很多问题。", "有的问题长，有的问题短。", "我曾经为这个想了一整天。",
           "不过话说回来，谁又说得清呢？",
           "可是我先说点别的吧。", "事情就是这样，说来说去还是这样。"),
}
NOTES: dict[Language, str] = {
    "en": "{time}, {name} put {a_thing} {place}.", "zh": "{time}，{name}把{a_thing}放{place}。",
}
# fmt: on
