"""Tool calls in the formats of Hermes (also Qwen), Llama 3 and Mistral.

A call is announced when its name is known and its arguments begin. They are passed on as they come, so a model that writes
no JSON there leaves that to the client, as OpenAI's API does. Before a call is announced, what does not have its form is
content, its marker included. White space around calls is dropped.
"""

import contextlib
import re

from flyball_runtime.text.parsing.events import Arguments, CallStart, Content
from flyball_runtime.text.parsing.source import Parser, Reading, Source, Unexpected

_NAME = re.compile(r"[\w.-]")


class CallParser(Parser):
    """What the formats have in common: content between calls, and a call as a JSON object.

    Args:
        anywhere: calls may come behind content. Otherwise an output that does not begin with one has none.
    """

    def __init__(self, *, anywhere: bool = True) -> None:
        super().__init__()
        self._anywhere = anywhere
        self._has_calls = False

    def give_up(self, source: Source) -> None:
        """What has been read is content, but for the white space behind the last call."""
        text = source.take()
        if not (source.ended and self._has_calls and text.isspace()):
            self.emit(Content(text))

    def content_until(self, source: Source, marker: str) -> Reading[bool]:
        """Pass on content up to the marker, which is read; white space alone stays with it. Return whether there was one."""
        yield from source.skip_space()
        if (yield from source.literal(marker)):
            return True
        if not (yield from source.peek()):
            self.give_up(source)
            return False
        if not self._anywhere:
            yield from source.rest(lambda text: self.emit(Content(text)))
            return False
        return (yield from source.until(marker, lambda text: self.emit(Content(text))))

    def begin(self, source: Source, name: str) -> None:
        source.take()
        self._has_calls = True
        self.emit(CallStart(name))

    def stream(self, source: Source) -> Reading[None]:
        """Pass on the arguments, an object."""
        if (yield from source.peek()) != "{":
            raise Unexpected
        yield from source.nested(lambda: self.emit(Arguments(source.take())))

    def call(self, source: Source) -> Reading[None]:
        """An object with ``name`` and ``arguments`` (or ``parameters``), and no other keys than ``id`` and ``type``.

        Arguments that come before the name are announced with it. They may be a text with JSON in it.
        """
        name, waiting, begun = "", "", False
        yield from source.expect("{")
        while True:
            key = yield from self._key(source)
            if key == "name" and not name:
                name = yield from source.json_string()
            elif key in ("arguments", "parameters") and not begun and not waiting:
                if name and (yield from source.peek()) == "{":
                    self.begin(source, name)
                    begun = True
                    yield from self.stream(source)
                else:
                    waiting = yield from self._value(source)
            elif key in ("id", "type"):
                yield from source.json_string()
            else:
                raise Unexpected
            if name and waiting and not begun:
                self.begin(source, name)
                begun = True
                self.emit(Arguments(waiting))
            yield from source.skip_space()
            if not (yield from source.literal(",")):
                break
        if not begun:
            raise Unexpected
        yield from source.expect("}")
        source.take()

    @staticmethod
    def _key(source: Source) -> Reading[str]:
        yield from source.skip_space()
        key = yield from source.json_string()
        yield from source.skip_space()
        yield from source.expect(":")
        yield from source.skip_space()
        return key

    @staticmethod
    def _value(source: Source) -> Reading[str]:
        """Arguments that cannot be passed on yet: an object, the text of one, or null for none."""
        first, begin = (yield from source.peek()), source.at
        if first == '"':
            return (yield from source.json_string())
        if first == "{":
            yield from source.nested(lambda: None)
            return source.text[begin : source.at]
        yield from source.expect("null")
        return "{}"

    def call_list(self, source: Source) -> Reading[None]:
        """Calls in brackets."""
        yield from source.expect("[")
        while True:
            yield from source.skip_space()
            yield from self.call(source)
            yield from source.skip_space()
            if not (yield from source.literal(",")):
                break
        yield from source.expect("]")
        source.take()


class Hermes(CallParser):
    """``<tool_call>{"name": ..., "arguments": ...}</tool_call>``."""

    markers = ("<tool_call>", "</tool_call>")

    def read(self, source: Source) -> Reading[None]:
        opening, closing = self.markers
        while (yield from self.content_until(source, opening)):
            try:
                yield from source.skip_space()
                yield from self.call(source)
                yield from source.skip_space()
                if (yield from source.literal(closing)):
                    source.take()
            except Unexpected:
                self.give_up(source)


class Llama3Json(CallParser):
    """``{"name": ..., "parameters": ...}`` at the start or behind ``<|python_tag|>``; more calls after a semicolon."""

    markers = ("<|python_tag|>",)

    def read(self, source: Source) -> Reading[None]:
        (tag,) = self.markers
        while True:
            try:
                yield from source.skip_space()
                yield from source.literal(tag)
                yield from source.skip_space()
                yield from self.call(source)
                yield from source.skip_space()
                if (yield from source.literal(";")):
                    yield from source.skip_space()
            except Unexpected:
                self.give_up(source)
                if not (yield from self.content_until(source, tag)):
                    return


class Mistral(CallParser):
    """``[TOOL_CALLS]`` before a list of calls (the older form), or before each ``name{...}`` (the newer one)."""

    markers = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")

    def read(self, source: Source) -> Reading[None]:
        while (yield from self.content_until(source, "[TOOL_CALLS]")):
            try:
                yield from source.skip_space()
                first = yield from source.peek()
                yield from (self.call_list(source) if first == "[" else self._named(source))
            except Unexpected:
                self.give_up(source)

    def _named(self, source: Source) -> Reading[None]:
        name = yield from source.matching(_NAME)
        if (yield from source.literal("[CALL_ID]")):
            yield from source.matching(_NAME)
        yield from source.literal("[ARGS]")
        yield from source.skip_space()
        if (yield from source.peek()) != "{":
            raise Unexpected
        self.begin(source, name)
        yield from self.stream(source)


class CallList(CallParser):
    """A list of calls and nothing else, which a grammar may force."""

    def read(self, source: Source) -> Reading[None]:
        with contextlib.suppress(Unexpected):
            yield from source.skip_space()
            yield from self.call_list(source)
        yield from source.skip_space()
        self.give_up(source)
        yield from source.rest(lambda text: self.emit(Content(text)))


class ForcedCall(CallParser):
    """The arguments of one call and nothing else, which a grammar may force."""

    def __init__(self, name: str) -> None:
        self._name = name
        super().__init__()

    def read(self, source: Source) -> Reading[None]:
        yield from source.peek()
        self.begin(source, self._name)
        yield from source.rest(lambda text: self.emit(Arguments(text)))
