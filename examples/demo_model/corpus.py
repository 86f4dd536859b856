"""Conversations to train on, made from the families of questions. Same seed, same text."""

import random
from collections.abc import Iterator

import families
import stories
from grammar import expand

Message = dict[str, str]

_SYSTEM = [
    "You are a helpful assistant.",
    "You are the demo model of Flyball.",
    "Answer in simple English.",
    "You are a friendly assistant. Be brief.",
    "You are a helpful and honest assistant that knows about serving language models.",
    "You are a storyteller.",
    "Be polite.",
]
_NUM_EXCHANGES = [1] * 55 + [2] * 22 + [3] * 12 + [4] * 5 + [6] * 4 + [10] * 2


def conversation(rng: random.Random) -> list[Message]:
    """One conversation of one to ten exchanges, at times with a system prompt."""
    messages: list[Message] = []
    if rng.random() < 0.2:
        messages.append({"role": "system", "content": rng.choice(_SYSTEM)})
    speaker = families.Speaker(rng)
    for _ in range(rng.choice(_NUM_EXCHANGES)):
        exchange = families.exchange(speaker)
        messages.append({"role": "user", "content": exchange.question})
        messages.append({"role": "assistant", "content": expand(exchange.answer, rng)})
    return messages


def conversations(seed: int) -> Iterator[list[Message]]:
    """Conversations without end."""
    rng = random.Random(seed)
    while True:
        yield conversation(rng)


def document(rng: random.Random) -> str:
    """A plain text, for prompts that come without a chat template: a story or one concept."""
    if rng.random() < 0.5:
        return stories.story(rng, length=rng.choice(["short", "medium", "long"]))
    about = rng.choice(families.KNOWLEDGE["concept"])
    return expand(" ".join(about["what"] + about["why"]), rng)


def documents(seed: int) -> Iterator[str]:
    """Plain texts without end."""
    rng = random.Random(seed)
    while True:
        yield document(rng)
