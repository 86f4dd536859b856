"""The parts of a message, in the order in which a model writes them."""

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model writes for itself before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins. The next ``Arguments`` belong to it."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the arguments of the latest call: JSON, as far as the model writes JSON."""

    text: str


Event = Content | Reasoning | CallStart | Arguments


def merged(events: Iterable[Event]) -> list[Event]:
    """The same events, neighbours of one kind in one and without empty ones."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, CallStart):
            joined.append(event)
        elif isinstance(last, type(event)) and not isinstance(last, CallStart):
            joined[-1] = replace(last, text=last.text + event.text)
        elif event.text:
            joined.append(event)
    return joined
