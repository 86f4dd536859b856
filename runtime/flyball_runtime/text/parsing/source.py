"""Text that arrives in pieces, and what reads it: generators that yield while they wait for more of it."""

import json
import re
from collections.abc import Callable, Generator
from typing import TypeVar

from flyball_runtime.text.parsing.events import Event, merged

T = TypeVar("T")

Reading = Generator[None, None, T]
"""Yields when all text that there is has been read, and returns what was read."""

_SPACE = " \t\r\n"
_STRING_END = re.compile(r'["\\]')


class Unexpected(Exception):
    """The text is not what the format says. Nothing from the unexpected character on has been read."""


class Source:
    """The text since the last ``take``, and how far it has been read.

    What has been read can be taken as a whole until then, so that text which turns out to be nothing else becomes content.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False

    def take(self) -> str:
        """What has been read since the last call."""
        taken, self.text, self.at = self.text[: self.at], self.text[self.at :], 0
        return taken

    def peek(self) -> Reading[str]:
        """The next character, or an empty text at the end."""
        while self.at == len(self.text) and not self.ended:
            yield
        return self.text[self.at : self.at + 1]

    def skip_space(self) -> Reading[None]:
        while (yield from self.peek()) and self.text[self.at] in _SPACE:
            self.at += 1

    def literal(self, word: str) -> Reading[bool]:
        """Read ``word`` if it comes next, else nothing. Return whether it did."""
        while not (comes := self.text.startswith(word, self.at)):
            if self.ended or not word.startswith(self.text[self.at : self.at + len(word)]):
                break
            yield
        self.at += len(word) * comes
        return comes

    def expect(self, word: str) -> Reading[None]:
        """Raise Unexpected unless ``word`` comes next."""
        if not (yield from self.literal(word)):
            raise Unexpected

    def matching(self, allowed: re.Pattern[str]) -> Reading[str]:
        """Read the characters that match. Raise Unexpected if there are none, or nothing follows them."""
        begin = self.at
        while (char := (yield from self.peek())) and allowed.match(char):
            self.at += 1
        if self.at == begin or not char:
            raise Unexpected
        return self.text[begin : self.at]

    def json_string(self) -> Reading[str]:
        """Read a text in JSON, and return it decoded. Raise Unexpected if it is none, or not complete."""
        begin = self.at
        yield from self.expect('"')
        while True:
            if (found := _STRING_END.search(self.text, self.at)) is None:
                self.at = len(self.text)
                if not (yield from self.peek()):
                    raise Unexpected
                continue
            self.at = found.end()
            if found[0] == '"':
                return _decoded(self.text[begin : self.at])
            if not (yield from self.peek()):  # the character behind a backslash
                raise Unexpected
            self.at += 1

    def nested(self, arrived: Callable[[], None]) -> Reading[None]:
        """Read a list or an object up to the bracket that closes it, or to the end of the text.

        Only brackets and the ends of texts are looked at: what a model writes between them is not checked.

        Args:
            arrived: called when some of it has been read; it may take it.
        """
        depth, in_string, escaped = 0, False, False
        while (yield from self.peek()):
            for at in range(self.at, len(self.text)):
                char = self.text[at]
                if escaped:
                    escaped = False
                elif in_string:
                    in_string, escaped = char != '"', char == "\\"
                elif char == '"':
                    in_string = True
                elif char in "{}[]":
                    depth += 1 if char in "{[" else -1
                    if depth == 0:
                        self.at = at + 1
                        return arrived()
            self.at = len(self.text)
            arrived()

    def until(self, marker: str, pass_on: Callable[[str], None], *, drops: str = "") -> Reading[bool]:
        """Pass on the text before ``marker``, then read the marker. Return False if there is none up to the end.

        Args:
            drops: characters that are not passed on where the marker comes right behind them.
        """
        while (found := self.text.find(marker, self.at)) < 0 and not self.ended:
            self.at = len(self._sure(marker).rstrip(drops))
            pass_on(self.take())
            yield
        self.at = len(self.text) if found < 0 else found
        before = self.take()
        pass_on(before if found < 0 else before.rstrip(drops))
        if found >= 0:
            self.at = len(marker)
        return found >= 0

    def rest(self, pass_on: Callable[[str], None]) -> Reading[None]:
        """Pass on everything to the end."""
        while True:
            more = yield from self.peek()
            self.at = len(self.text)
            pass_on(self.take())
            if not more:
                return

    def _sure(self, marker: str) -> str:
        """The text without an ending that the marker begins with."""
        for length in range(min(len(marker) - 1, len(self.text)), 0, -1):
            if self.text.endswith(marker[:length]):
                return self.text[:-length]
        return self.text


def _decoded(string: str) -> str:
    try:
        text = str(json.loads(string, strict=False))
        text.encode()  # half of a surrogate pair could not be sent
    except ValueError:
        raise Unexpected from None
    return text


class Parser:
    """Runs ``read``, which a format defines, on text that arrives in pieces."""

    markers: tuple[str, ...] = ()
    """Texts that the format needs even where they are special tokens of the vocabulary."""

    def __init__(self) -> None:
        self._source = Source()
        self._events: list[Event] = []
        self._reading = self.read(self._source)

    def read(self, source: Source) -> Reading[None]:
        """Read ``source`` to its end and ``emit`` events."""
        raise NotImplementedError

    def emit(self, event: Event) -> None:
        self._events.append(event)

    def feed(self, text: str) -> list[Event]:
        """The events that are sure with this piece."""
        self._source.text += text
        return self._resume() if text else []

    def finish(self) -> list[Event]:
        """The events that waited for the end of the text."""
        self._source.ended = True
        return self._resume()

    def _resume(self) -> list[Event]:
        next(self._reading, None)
        events, self._events = self._events, []
        return merged(events)
