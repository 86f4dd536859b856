"""Short stories and poems from a grammar; their lengths vary on purpose, as answers of a real service do."""

import random

import words
from grammar import expand

# HERO and FRIEND are names, KIND and OTHER what they are, THING a noun phrase with its article, PLACE with
# its preposition too.
_OPENINGS = [
    "{Once upon a time|Long ago|Many years ago}, KIND named HERO lived PLACE.",
    "There once was KIND {named|called} HERO who lived PLACE.",
    "PLACE there lived KIND, and {its|the} name was HERO.",
    "HERO was KIND who lived PLACE.",
]
_WISHES = [
    "Every {morning|evening}, HERO looked at the {sky|hills|road} and wondered what was behind it.",
    "HERO was {kind|clever|patient}, but {a little lonely|never quite happy|always in a hurry}.",
    "All day long HERO {worked|sang|dreamed}, and at night HERO counted the stars.",
    "Everybody {liked|knew} HERO, but nobody knew HERO's secret.",
]
_FINDS = [
    "One {cold|bright|rainy} day, HERO found THING {under a stone|beside the road|at the bottom of a well}.",
    "One {morning|night}, there was THING in front of the door, and nobody was near.",
    "Then the wind changed, and it brought THING straight to HERO's feet.",
    "Behind an old wall, HERO discovered THING.",
]
_MEETINGS = [
    '"{What is this|Where does this come from}?" asked HERO. "{I do not know|That is a long story}," said FRIEND, '
    'OTHER who was passing by, "but I can help you."',
    "On the way, HERO met OTHER named FRIEND, who was {looking for a friend|carrying a heavy bag|lost in the fog}. "
    "They shared {a piece of bread|a cup of tea|an apple} and decided to go on together.",
    'A voice came from above. It was FRIEND, OTHER. "{Be careful|Do not be afraid}," said FRIEND. "I know the way."',
]
_TROUBLES = [
    "The road was {long|steep|dark}, and soon it began to {rain|snow|get cold}. HERO wanted to turn back, but FRIEND "
    'said, "{Just one more step|Slow and steady}, and then one more."',
    "At the river the bridge was {broken|gone}. They {waited|thought} for a long time. Then they built a raft from "
    "{old wood|fallen trees}, and the water carried them over.",
    "At the gate stood a long queue, and nobody moved. HERO saw that the first in line was {asleep|blocked by a cart}. "
    "HERO {helped|woke} the stranger gently, and the whole queue began to flow.",
    "In the night the lights went out. HERO held FRIEND's hand and counted slowly to ten. When HERO opened both eyes, "
    "the {moon|first star} was shining.",
]
_TURNS = [
    "At last they understood what it was for. It did not make anybody {rich|strong|famous}, but it {kept the old engine "
    "steady|made the people smile|showed the way home}.",
    "{High on a hill|In the middle of a field}, they found the one who had lost it. The {old woman|old man|child} "
    "laughed with joy and thanked them.",
    "HERO had been looking for a treasure. But the {real treasure|best thing} was the friend who had come along.",
]
_ENDINGS = [
    "From that day on, HERO and FRIEND were friends, and {the door was always open|they were never lonely again}.",
    "And HERO went home, {tired|wet and tired} but happy.",
    "They came home late, and {the soup was still warm|the stars were out}. That is the end of the story.",
    "And if you listen {closely|at night}, you can still hear HERO laughing in the wind.",
]

_STANZAS = [
    "I thought of THEME at the break of day,\nand the clouds of the night all drifted away.",
    "Soft as a whisper and clear as a bell,\nof THEME is the story I want to tell.",
    "The wheels may turn and the engines may spin,\nbut THEME will bring the {quiet|gentle} evening in.",
    "One word and then another, they come in a row,\nand THEME will be the river that makes them flow.",
    "When the {world|road} is dark and the {road|night} is long,\nI sing of THEME in a simple song.",
    "Some look for silver and some look for gold,\nbut give me THEME to have and to hold.",
    "The queue may be long and the answer be slow,\nwith THEME beside me I do not mind, though.",
]
_FAREWELL = "So here ends my poem, so soft and so small:\nto THEME I give it, and then to you all."


def story(rng: random.Random, hero: str | None = None, length: str = "medium") -> str:
    """One story; ``hero`` is a noun such as "fox" and gives it a title, ``length`` is short, medium or long."""
    first, second = rng.sample(words.BEINGS, 2)
    name = rng.choice(words.NAMES)
    cast = {
        "HERO": name,
        "FRIEND": rng.choice([other for other in words.NAMES if other != name]),
        "KIND": words.with_article(hero or first),
        "OTHER": words.with_article(second),
        "PLACE": rng.choice(words.PLACES),
        "THING": rng.choice(words.THINGS),
    }
    text = "\n\n".join(" ".join(rng.choice(options) for options in part) for part in _parts(rng, length))
    text = expand(text, rng)
    for role, filler in cast.items():
        text = text.replace(role, filler)
    text = "\n\n".join(part[0].upper() + part[1:] for part in text.split("\n\n"))
    return f"The story of {words.with_article(hero)}\n\n{text}" if hero else text


def _parts(rng: random.Random, length: str) -> list[list[list[str]]]:
    """The scenes, by paragraph."""
    if length == "short":
        return [[_OPENINGS, _FINDS, _MEETINGS, _ENDINGS]]
    if length == "medium":
        return [[_OPENINGS, _WISHES, _FINDS], [_MEETINGS, _TURNS, _ENDINGS]]
    return [[_OPENINGS, _WISHES, _FINDS], [_MEETINGS], [_TROUBLES, _TURNS], [_ENDINGS]]


def poem(rng: random.Random, theme: str, num_stanzas: int) -> str:
    """A poem about ``theme``: a title, and couplets of which the last one says goodbye."""
    couplets = [*rng.sample(_STANZAS, num_stanzas - 1), _FAREWELL]
    lines = expand("\n".join(couplets), rng).replace("THEME", theme).splitlines()
    return f"A poem about {theme}\n\n" + "\n".join(line[0].upper() + line[1:] for line in lines)
