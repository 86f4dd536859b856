"""The lines that a person should see, kept and passed on."""

import logging
import time
from collections import deque
from collections.abc import Callable

from flyball_operator.local.snapshot import Event
from flyball_protocol.quoting import lines

log = logging.getLogger("flyball_operator.local")

MAX_KEPT = 200


def to_log(event: Event) -> None:
    log.info("%s", event.text)


class Events:
    """Call it with a line, or some: they are kept, and given to the listener, without control characters and cut."""

    def __init__(self, listener: Callable[[Event], None] = to_log) -> None:
        self._listener = listener
        self._kept: deque[Event] = deque(maxlen=MAX_KEPT)

    def __call__(self, text: str) -> None:
        event = Event(time.time(), lines(text))
        self._kept.append(event)
        self._listener(event)

    @property
    def kept(self) -> tuple[Event, ...]:
        return tuple(self._kept)
