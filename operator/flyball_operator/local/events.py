"""The lines that a person should see, kept and passed on."""

import logging
import time
from collections import deque
from collections.abc import Callable

from flyball_operator.local.snapshot import Event

log = logging.getLogger("flyball_operator.local")

MAX_KEPT = 200


def to_log(event: Event) -> None:
    log.info("%s", event.text)


class Events:
    """Call it with a line: it is kept, and given to the listener."""

    def __init__(self, listener: Callable[[Event], None] = to_log) -> None:
        self._listener = listener
        self._kept: deque[Event] = deque(maxlen=MAX_KEPT)

    def __call__(self, text: str) -> None:
        event = Event(time.time(), text)
        self._kept.append(event)
        self._listener(event)

    @property
    def kept(self) -> tuple[Event, ...]:
        return tuple(self._kept)
