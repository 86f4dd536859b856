"""The families of questions. Each is a function that makes one exchange: a question, and the answer that belongs to it.

Every list of ways to ask comes in two parts, ``Asks(seen, held_out)``: training uses the first, evaluate.py the second.
"""

import calendar
import random
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import stories
import words
from grammar import expand
from noise import noisy

_HERE = Path(__file__).parent
KNOWLEDGE: dict[str, Any] = tomllib.loads((_HERE / "concepts.toml").read_text(encoding="utf-8"))
_SMALLTALK: dict[str, Any] = tomllib.loads((_HERE / "smalltalk.toml").read_text(encoding="utf-8"))


class Asks(NamedTuple):
    """Ways to ask the same thing."""

    seen: list[str]
    held_out: list[str]


@dataclass
class Speaker:
    """Who asks: the source of chance, whether in training's words, and what was said so far."""

    rng: random.Random
    held_out: bool = False
    topic: dict[str, Any] | None = None  # the concept of the last exchange
    name: str | None = None
    said: list[str] = field(default_factory=list)

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


WHAT = Asks(
    [
        *[
            "what is NAME",
            "what is NAME",
            "what's NAME",
            "what are NAME",
            "what does NAME mean",
            "explain NAME",
            "NAME",
        ],
        *["tell me about NAME", "tell me something about NAME", "{can|could} you explain NAME{| to me}", "define NAME"],
        *["describe NAME", "what is meant by NAME", "i want to know what NAME is", "how does NAME work", "whats NAME"],
        *[
            "how would you explain NAME",
            "give me an explanation of NAME",
            "i do not understand NAME",
            "what about NAME",
        ],
        *["do you know what NAME is", "what do you know about NAME", "what do people mean by NAME", "how do NAME work"],
        *["in simple words, what is NAME", "what is this thing called NAME", "talk about NAME", "teach me about NAME"],
    ],
    ["can you tell me what NAME is", "help me understand NAME", "please explain what NAME means", "so what is NAME"],
)
SHORT = Asks(
    [
        *["explain NAME in one sentence", "NAME in one sentence", "briefly, what is NAME", "what is NAME in short"],
        *["give me a short definition of NAME", "one sentence about NAME", "define NAME in one sentence"],
    ],
    ["what is NAME in one sentence", "describe NAME in one sentence"],
)
WHY = Asks(
    [
        *["why is NAME important", "why does NAME matter", "why do we need NAME", "what is NAME good for", "why NAME"],
        *["why should i care about NAME", "what is the {use|benefit|point} of NAME", "why would i use NAME"],
        *["why is NAME useful", "what are the benefits of NAME", "what does NAME help with", "why do i need NAME"],
    ],
    ["why is NAME so important", "why do people need NAME", "tell me why NAME matters"],
)
DETAIL = Asks(
    [
        *["explain NAME in detail", "tell me everything about NAME", "give me a long explanation of NAME"],
        *["explain what NAME is and why it matters", "what is NAME and why does it matter"],
        *["what is NAME and why is it important", "a detailed explanation of NAME", "tell me all about NAME"],
    ],
    ["explain NAME in all details", "what is NAME and why do we need it"],
)
MORE = Asks(
    [
        *["why", "tell me more", "go on", "more", "why is that important", "why does that matter", "why is that"],
        *[
            "why does it matter",
            "and why",
            "can you say more",
            "why is it important",
            "continue",
            "what is it good for",
        ],
    ],
    ["why is it useful", "tell me more about it"],
)
COMPARE = Asks(
    [
        *["what is the difference between FIRST and SECOND", "compare FIRST and SECOND", "FIRST or SECOND"],
        *["how does FIRST differ from SECOND", "FIRST versus SECOND", "FIRST vs SECOND", "difference FIRST SECOND"],
        *["explain the difference between FIRST and SECOND", "how is FIRST different from SECOND"],
    ],
    ["tell me the difference between FIRST and SECOND", "what is different between FIRST and SECOND"],
)


def concept(speaker: Speaker) -> Exchange:
    """What is X? Why X? In short, in detail."""
    rng = speaker.rng
    speaker.topic = about = rng.choice(KNOWLEDGE["concept"])
    asks, sentences = rng.choices(
        [
            (WHAT, about["what"]),
            (WHY, about["why"]),
            (SHORT, about["what"][:1]),
            (DETAIL, about["what"] + about["why"]),
        ],
        weights=[50, 20, 10, 20],
    )[0]
    names = about["names"]
    name = rng.choice([names[0], *names])
    if rng.random() < 0.3:
        name = name.removeprefix("a ").removeprefix("an ").removeprefix("the ")
    return Exchange(speaker.ask(asks, NAME=name), " ".join(sentences))


def more(speaker: Speaker) -> Exchange:
    """Why? Tell me more: about the concept of the last exchange."""
    if speaker.topic is None:
        return concept(speaker)
    sentences, speaker.topic = speaker.topic["why"], None
    return Exchange(speaker.ask(MORE), " ".join(sentences))


def comparison(speaker: Speaker) -> Exchange:
    """What is the difference between X and Y?"""
    about = speaker.rng.choice(KNOWLEDGE["comparison"])
    pair = [speaker.rng.choice(names) for names in about["pair"]]
    speaker.rng.shuffle(pair)
    return Exchange(speaker.ask(COMPARE, FIRST=pair[0], SECOND=pair[1]), " ".join(about["answer"]))


def smalltalk(speaker: Speaker) -> Exchange:
    """Greetings, lists, and how to use Flyball."""
    entry = speaker.rng.choice(_SMALLTALK["exchange"])
    return Exchange(speaker.ask(Asks(entry["asks"][:-1], entry["asks"][-1:])), entry["answer"])


STORY = Asks(
    [
        *[
            "tell me {a|another} SIZEstory{ about @| with @|}",
            "write {a|me a} SIZEstory{ about @|}",
            "SIZEstory{ about @|}",
        ],
        *[
            "{can|could} you tell me a SIZEstory{ about @|}",
            "i want to hear a SIZEstory{ about @|}",
            "once upon a time",
        ],
        *["make up a SIZEstory{ about @|}", "do you know a SIZEstory{ about @|}", "tell a SIZEstory{ about @|}"],
    ],
    ["please tell me a SIZEstory about @"],
)


def story(speaker: Speaker) -> Exchange:
    """Tell me a story, perhaps of a given length, perhaps about a given being."""
    rng = speaker.rng
    length, size = rng.choice([("short", "short "), ("medium", ""), ("medium", ""), ("long", "long ")])
    hero = words.pick(words.BEINGS, rng, share_invented=0.1)
    question = speaker.ask(STORY, SIZE=size, verbatim=f"\0{hero}\0")
    asked_for = "\0" in question
    if size and size.strip() not in question.lower():
        length = "medium"
    question = question.replace(f"\0{hero}\0", rng.choice([words.with_article(hero)] * 4 + [hero]))
    return Exchange(question, stories.story(rng, hero if asked_for else None, length))


POEM = Asks(
    [
        *["write a SIZEpoem about @", "write me a SIZEpoem about @", "a SIZEpoem about @", "SIZEpoem about @"],
        *["can you write a SIZEpoem about @", "i would like a SIZEpoem about @", "make a SIZEpoem about @"],
    ],
    ["please write a SIZEpoem about @"],
)


def poem(speaker: Speaker) -> Exchange:
    """Write a poem about X."""
    size, num_stanzas = speaker.rng.choice([("short ", 2), ("", 3), ("", 3), ("", 4), ("long ", 6)])
    beings = [words.with_article(being) for being in words.BEINGS]
    theme = words.pick(words.THEMES + words.TECHNICAL_THEMES + beings, speaker.rng)
    question = speaker.ask(POEM, SIZE=size, verbatim=theme)
    return Exchange(question, stories.poem(speaker.rng, theme, num_stanzas))


COUNT = Asks(
    [
        *[
            "count from FIRST to LAST",
            "count from FIRST to LAST",
            "can you count from FIRST to LAST",
            "count FIRST to LAST",
        ],
        *["list the numbers from FIRST to LAST", "count from FIRST up to LAST", "say the numbers from FIRST to LAST"],
        *["write the numbers from FIRST to LAST", "count FIRST - LAST", "the numbers FIRST to LAST"],
    ],
    ["please count from FIRST to LAST"],
)
COUNT_TO = Asks(
    ["count to LAST", "can you count to LAST", "count up to LAST", "please count to LAST"], ["now count to LAST"]
)


def counting(speaker: Speaker) -> Exchange:
    """Count from 3 to 17, count to 10, and backwards."""
    rng = speaker.rng
    if rng.random() < 0.3:
        last = rng.randint(2, 30)
        return Exchange(speaker.ask(COUNT_TO, LAST=str(last)), _numbers(1, last))
    first = rng.randint(0, 90)
    last = first + rng.choice([-1, 1, 1, 1]) * rng.randint(1, 25)
    last = max(0, min(last, 100))
    return Exchange(speaker.ask(COUNT, FIRST=str(first), LAST=str(last)), _numbers(first, last))


def _numbers(first: int, last: int) -> str:
    step = 1 if last >= first else -1
    return ", ".join(map(str, range(first, last + step, step))) + "."


SUM = Asks(
    [
        *["what is TERM", "what is TERM", "how much is TERM", "TERM", "TERM =", "calculate TERM", "compute TERM"],
        *["what's TERM", "can you compute TERM", "tell me TERM", "how much does TERM make", "solve TERM"],
    ],
    ["what do you get for TERM", "please calculate TERM"],
)


def arithmetic(speaker: Speaker) -> Exchange:
    """Sums and differences up to 20, products up to ten times ten."""
    rng = speaker.rng
    sign, word = rng.choice([("+", "plus"), ("+", "plus"), ("-", "minus"), ("*", "times")])
    first, second = (
        (rng.randint(0, 10), rng.randint(0, 10)) if sign == "*" else (rng.randint(0, 20), rng.randint(0, 20))
    )
    if sign == "-":
        first, second = max(first, second), min(first, second)
    result = {"+": first + second, "-": first - second, "*": first * second}[sign]
    term = f"{first} {rng.choice([sign, word])} {second}"
    if rng.random() < 0.15:
        term = f"{first}{sign}{second}"
    return Exchange(speaker.ask(SUM, verbatim=term, TERM="@"), f"{first} {sign} {second} = {result}.")


ORDER = Asks(
    [
        "which @ comes WORD ITEM",
        "what comes WORD ITEM",
        "what @ is WORD ITEM",
        "which @ is WORD ITEM",
        "the @ WORD ITEM",
    ],
    ["tell me which @ comes WORD ITEM", "what @ comes WORD ITEM"],
)
_ORDERED = {"day": list(calendar.day_name), "month": list(calendar.month_name)[1:]}


def order(speaker: Speaker) -> Exchange:
    """Which day comes after Monday? Which month comes before May?"""
    rng = speaker.rng
    kind, items = rng.choice(list(_ORDERED.items()))
    at, (word, offset) = rng.randrange(len(items)), rng.choice([("after", 1), ("before", -1)])
    found = items[(at + offset) % len(items)]
    return Exchange(speaker.ask(ORDER, verbatim=kind, WORD=word, ITEM=items[at]), f"{found} comes {word} {items[at]}.")


REPEAT = Asks(["repeat after me: @", "say @", "repeat: @", "please say @", "echo @", "repeat @"], ["can you repeat: @"])


def repeat(speaker: Speaker) -> Exchange:
    """Say what I say: known words, invented ones and numbers."""
    rng = speaker.rng
    pool = words.NAMES + words.BEINGS + words.THEMES + words.UNKNOWN
    said = " ".join(words.pick(pool, rng, share_invented=0.4) for _ in range(rng.randint(1, 5)))
    if rng.random() < 0.2:
        said += f" {rng.randint(0, 999)}"
    question = expand(rng.choice(REPEAT.held_out if speaker.held_out else REPEAT.seen), rng)
    return Exchange(question.replace("@", said), said)


MY_NAME = Asks(
    ["my name is @", "i am @", "hi, i am @", "call me @", "hello, my name is @", "i'm @"], ["you can call me @"]
)
WHO_AM_I = Asks(
    ["what is my name", "do you know my name", "who am i", "do you remember my name", "what's my name", "say my name"],
    ["can you tell me my name"],
)


def introduction(speaker: Speaker) -> Exchange:
    """My name is Ada. What is my name?"""
    if speaker.name is None and speaker.rng.random() < 0.8:
        speaker.name = words.name(speaker.rng)
        answer = f"Nice to meet you, {speaker.name}! What would you like to know?"
        return Exchange(speaker.ask(MY_NAME, verbatim=speaker.name), answer)
    answer = f"Your name is {speaker.name}." if speaker.name else "You have not told me your name yet."
    return Exchange(speaker.ask(WHO_AM_I), answer)


UNKNOWN = Asks(
    [
        *["what is @", "what is @", "who is @", "who was @", "tell me about @", "explain @", "what are @", "define @"],
        *["how do i learn @", "where is @", "what is the capital of @", "why is @ important", "how does @ work", "@"],
        *["how old is @", "what do you think about @", "what is the best @", "how many people live in @", "why @"],
        *["what happened in @", "write code in @", "translate @ into French", "when was @ invented", "do you like @"],
        *["what does @ mean", "i need help with @", "give me a recipe for @", "how much does @ cost", "can you fix @"],
        *["what is the difference between @ and OTHER", "who won @", "recommend me @", "how far is it to @"],
        *["how do you make @", "describe @", "what is the history of @", "where can i buy @", "explain @ in detail"],
    ],
    ["who invented @", "can you tell me something about @", "what is the price of @", "help me understand @"],
)
UNKNOWN_ANSWER = (
    "{I am sorry, I do not know that.|That is outside of what I know.} I only know about serving language models and "
    "Flyball, and I can tell stories, write poems, count and add small numbers."
)


def unknown(speaker: Speaker) -> Exchange:
    """Anything else: say so, and say what I do know."""
    rng = speaker.rng
    pool = words.UNKNOWN + words.THEMES
    topic = " ".join(words.pick(pool, rng, share_invented=0.4) for _ in range(rng.choice([1, 1, 1, 2])))
    other = words.pick(pool, rng)
    return Exchange(speaker.ask(UNKNOWN, verbatim=topic, OTHER=other), UNKNOWN_ANSWER)


FAMILIES: dict[Callable[[Speaker], Exchange], int] = {
    concept: 42,
    more: 6,
    comparison: 4,
    smalltalk: 14,
    story: 8,
    poem: 4,
    counting: 4,
    arithmetic: 6,
    order: 2,
    repeat: 4,
    introduction: 3,
    unknown: 9,
}
"""Every family with its share in percent or so."""


def exchange(speaker: Speaker) -> Exchange:
    """One exchange of a family drawn by its share."""
    return speaker.rng.choices(list(FAMILIES), weights=list(FAMILIES.values()))[0](speaker)
