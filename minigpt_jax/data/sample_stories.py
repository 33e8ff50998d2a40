"""The stories of the sample corpus: eight plots, told in both languages in the same order.

Each has a want, an obstacle and a resolution. A story is one step a line; alternatives of a step are separated by "|",
and a line that starts with "|" continues the step above. Lines that start with "Q" are a question and its answer.
"""

import random

from minigpt_jax.data import sample_world as world
from minigpt_jax.data.sample_world import (
    Language,
    Table,
    Templates,
    Word,
    capitalised,
    draw_nouns,
    draw_words,
    fill,
    join,
    say,
)

# fmt: off
_SMALL_ANIMALS: Table = {
    "fox": "只狐狸", "frog": "只青蛙", "rabbit": "只兔子",
    "turtle": "只乌龟", "hamster": "只仓鼠", "hedgehog": "只刺猬",
}
_LARGE_ANIMALS: Table = {"bear": "头熊", "lion": "头狮子", "tiger": "只老虎", "elephant": "头大象", "panda": "只熊猫"}
# fmt: on
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
一{animal2_measure}聪明的{animal2}走过来说：“我也够不着。” | 聪明的{animal2}说：“光靠你自己是摘不到的。”
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


def tell_story(rng: random.Random, language: Language) -> tuple[str, str, list[tuple[str, str]]]:
    """A story: whom it is about, its text, and questions on it with their answers."""
    template = rng.choice(STORIES[language])
    slots = cast_story(rng)
    told, *asked = template.replace("\n|", "|").split("\nQ ")
    steps = [capitalised(fill(rng.choice(step.split("|")).strip(), slots, language)) for step in told.split("\n")]
    pairs = [fill(line, slots, language).split(" = ") for line in asked]
    topic = slots["name" if "{name}" in template else "hungry_animal"]
    return (
        say(topic, language), join(steps, language), [(question, capitalised(answer)) for question, answer in pairs]
    )  # fmt: skip


def cast_story(rng: random.Random) -> dict[str, object]:
    """Who and what fills the slots of a story. What the world fixes (homes, favourite food) holds here too."""
    hero = rng.choice(world.PEOPLE)
    # Of the other gender, so that every pronoun is clear, and from another town.
    friend = rng.choice([p for p in world.PEOPLE if p.pronoun != hero.pronoun and p.home != hero.home])
    (thing,), (colour,) = draw_nouns(rng, world.THINGS, 1), draw_words(rng, world.COLOURS, 1)
    (pet,), (animal,), (animal2,) = (
        draw_nouns(rng, table, 1) for table in (world.PETS, _SMALL_ANIMALS, _LARGE_ANIMALS)
    )
    slots: dict[str, object] = {
        "name": hero,
        "friend": friend,
        "town": Word(hero.home, world.TOWNS[hero.home]),
        "ftown": Word(friend.home, world.TOWNS[friend.home]),
        "food": Word(hero.food, world.FOODS[hero.food]),
        "ffood": Word(friend.food, world.FOODS[friend.food]),
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
        "hungry_animal": animal.counted(Word("hungry", "饥饿")),
        "fruits": draw_nouns(rng, world.FRUITS, 1)[0].plural(),
        "plants": draw_nouns(rng, world.VEGETABLES, 1)[0].plural(),
    }
    for prefix, person in (("", hero), ("f", friend)):
        she = person.pronoun == "she"
        for form, english in zip(
            ("he", "his", "him"), ("she", "her", "her") if she else ("he", "his", "him"), strict=True
        ):
            slots[prefix + form] = Word(english, "她" if she else "他")
    slots["He"] = Word(hero.pronoun.capitalize(), "")
    slots |= zip(("place", "place2", "place3"), draw_words(rng, world.PLACES, 3), strict=True)
    tables = {"skill": world.SKILLS, "number": world.NUMBERS, "task": world.TASKS}
    tables |= {"crossing": world.CROSSINGS, "time": world.TIMES}
    return slots | {name: draw_words(rng, table, 1)[0] for name, table in tables.items()}
