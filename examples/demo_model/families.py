"""The families of questions. Each is a function that makes one exchange: a question, and the answer that belongs to it.

Ways to ask are in asks.toml, facts in concepts.toml, fixed answers in smalltalk.toml, words to fill in in words.toml.
"""

import calendar
import random
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import stories
import words
from grammar import expand
from noise import noisy

_HERE = Path(__file__).parent


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads((_HERE / name).read_text(encoding="utf-8"))


class Asks(NamedTuple):
    """Ways to ask the same thing: those to train on, and those kept back for evaluate.py."""

    seen: list[str]
    held_out: list[str]


KNOWLEDGE = _read("concepts.toml")
ASKS = {kind: Asks(**ways) for kind, ways in _read("asks.toml").items()}
_SMALLTALK = [
    (Asks(seen=entry["asks"][:-1], held_out=entry["asks"][-1:]), entry["answer"])
    for entry in _read("smalltalk.toml")["exchange"]
]


@dataclass
class Speaker:
    """Who asks: the source of chance, whether to use the words kept from training, and what was said so far."""

    rng: random.Random
    held_out: bool = False
    topic: dict[str, Any] | None = None  # the last concept, until somebody asks for more about it
    name: str | None = None  # once it was told

    def ask(self, asks: Asks, **fillers: str) -> str:
        """One way to ask, typed as people type; ``@`` in it stands for ``fillers["verbatim"]``."""
        verbatim = fillers.pop("verbatim", "")
        question = expand(self.rng.choice(asks.held_out if self.held_out else asks.seen), self.rng)
        for slot, filler in fillers.items():
            question = question.replace(slot, filler)
        return noisy(question, self.rng).replace("@", verbatim)


class Exchange(NamedTuple):
    """``answer`` is grammar (grammar.py): any expansion of it is right."""

    question: str
    answer: str
    mentions: str = ""  # what a story or a poem must be about


def concept(speaker: Speaker) -> Exchange:
    """What is X? Why X? In short, in detail."""
    rng = speaker.rng
    speaker.topic = about = rng.choice(KNOWLEDGE["concept"])
    asks, sentences = rng.choices(
        [
            (ASKS["what"], about["what"]),
            (ASKS["why"], about["why"]),
            (ASKS["short"], about["what"][:1]),
            (ASKS["detail"], about["what"] + about["why"]),
        ],
        weights=[50, 20, 10, 20],
    )[0]
    names = about["names"]
    name = rng.choice([names[0], *names])
    if rng.random() < 0.3:
        name = name.removeprefix("a ").removeprefix("an ").removeprefix("the ")
    return Exchange(speaker.ask(asks, NAME=name), " ".join(sentences))


def more(speaker: Speaker) -> Exchange:
    """Why? Tell me more: about the last concept."""
    if speaker.topic is None:
        return concept(speaker)
    sentences, speaker.topic = speaker.topic["why"], None
    return Exchange(speaker.ask(ASKS["more"]), " ".join(sentences))


def comparison(speaker: Speaker) -> Exchange:
    """What is the difference between X and Y?"""
    about = speaker.rng.choice(KNOWLEDGE["comparison"])
    pair = [speaker.rng.choice(names) for names in about["pair"]]
    speaker.rng.shuffle(pair)
    return Exchange(speaker.ask(ASKS["compare"], FIRST=pair[0], SECOND=pair[1]), " ".join(about["answer"]))


def smalltalk(speaker: Speaker) -> Exchange:
    """Greetings, lists, and how to use Flyball."""
    asks, answer = speaker.rng.choice(_SMALLTALK)
    return Exchange(speaker.ask(asks), answer)


def story(speaker: Speaker) -> Exchange:
    """Tell me a story, perhaps of a given length, perhaps about a given being."""
    rng = speaker.rng
    length, size = rng.choice([("short", "short "), ("medium", ""), ("medium", ""), ("long", "long ")])
    hero = rng.choice(words.BEINGS)
    question = speaker.ask(ASKS["story"], SIZE=size, verbatim=f"\0{hero}\0")
    asked_for = "\0" in question
    if size and size.strip() not in question.lower():
        length = "medium"
    question = question.replace(f"\0{hero}\0", rng.choice([words.with_article(hero)] * 4 + [hero]))
    told = stories.story(rng, hero if asked_for else None, length)
    return Exchange(question, told, mentions=hero if asked_for else "")


def poem(speaker: Speaker) -> Exchange:
    """Write a poem about X."""
    size, num_stanzas = speaker.rng.choice([("short ", 2), ("", 3), ("", 3), ("", 4), ("long ", 6)])
    beings = [words.with_article(being) for being in words.BEINGS]
    theme = speaker.rng.choice(words.THEMES + words.TECHNICAL_THEMES + beings)
    question = speaker.ask(ASKS["poem"], SIZE=size, verbatim=theme)
    return Exchange(question, stories.poem(speaker.rng, theme, num_stanzas), mentions=theme)


def counting(speaker: Speaker) -> Exchange:
    """Count from 3 to 17, count to 10, count down from 12: never beyond 20."""
    rng = speaker.rng
    kind = rng.choice(["count", "count", "count_to", "count_down"])
    first, last = sorted(rng.sample(range(21), 2)) if kind == "count" else (1, rng.randint(2, 20))
    question = speaker.ask(ASKS[kind], FIRST=str(first), LAST=str(last))
    return Exchange(question, _numbers(last, first) if kind == "count_down" else _numbers(first, last))


def _numbers(first: int, last: int) -> str:
    step = 1 if last >= first else -1
    return ", ".join(map(str, range(first, last + step, step))) + "."


def arithmetic(speaker: Speaker) -> Exchange:
    """Sums up to ten plus ten, the differences that undo them, and products up to five times five."""
    rng = speaker.rng
    sign, word = rng.choice([("+", "plus"), ("+", "plus"), ("-", "minus"), ("*", "times")])
    largest = 5 if sign == "*" else 10
    first, second = rng.randint(0, largest), rng.randint(0, largest)
    if sign == "-":
        first += second
    result = {"+": first + second, "-": first - second, "*": first * second}[sign]
    term = f"{first} {rng.choice([sign, word])} {second}"
    if rng.random() < 0.15:
        term = f"{first}{sign}{second}"
    return Exchange(speaker.ask(ASKS["sum"], verbatim=term, TERM="@"), f"{first} {sign} {second} = {result}.")


_ORDERED = {"day": list(calendar.day_name), "month": list(calendar.month_name)[1:]}


def order(speaker: Speaker) -> Exchange:
    """Which day comes after Monday? Which month comes before May?"""
    rng = speaker.rng
    kind, items = rng.choice(list(_ORDERED.items()))
    at, (word, offset) = rng.randrange(len(items)), rng.choice([("after", 1), ("before", -1)])
    found = items[(at + offset) % len(items)]
    question = speaker.ask(ASKS["order"], verbatim=kind, WORD=word, ITEM=items[at])
    return Exchange(question, f"{found} comes {word} {items[at]}.")


def introduction(speaker: Speaker) -> Exchange:
    """My name is Ada. What is my name?"""
    if speaker.name is None and speaker.rng.random() < 0.8:
        speaker.name = speaker.rng.choice(words.NAMES)
        answer = f"Nice to meet you, {speaker.name}! What would you like to know?"
        return Exchange(speaker.ask(ASKS["my_name"], verbatim=speaker.name), answer)
    answer = f"Your name is {speaker.name}." if speaker.name else "You have not told me your name yet."
    return Exchange(speaker.ask(ASKS["who_am_i"]), answer)


UNKNOWN_ANSWER = (
    "{I am sorry, I do not know that.|That is outside of what I know.} I only know about serving language models and "
    "Flyball, and I can tell stories, write poems, count and add small numbers."
)


def unknown(speaker: Speaker) -> Exchange:
    """Anything else: say so, and say what I do know."""
    rng = speaker.rng
    topic = " ".join(words.foreign(rng) for _ in range(rng.choice([1, 1, 1, 2])))
    return Exchange(speaker.ask(ASKS["unknown"], verbatim=topic, OTHER=words.foreign(rng)), UNKNOWN_ANSWER)


FAMILIES: dict[Callable[[Speaker], Exchange], int] = {
    concept: 40,
    more: 5,
    comparison: 4,
    smalltalk: 16,
    story: 6,
    poem: 4,
    counting: 9,
    arithmetic: 12,
    order: 4,
    introduction: 4,
    unknown: 8,
}
"""Every family with its share."""


def exchange(speaker: Speaker) -> Exchange:
    """One exchange of a family drawn by its share."""
    return speaker.rng.choices(list(FAMILIES), weights=list(FAMILIES.values()))[0](speaker)
