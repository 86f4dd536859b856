"""The answer of /v1/messages: blocks of thinking, text and tool calls, and the events that stream them."""

from collections.abc import Iterator
from typing import Any

import msgspec

from flyball_protocol.errors import MESSAGES_PATH
from flyball_runtime.api.chat_format import ParsedMessage
from flyball_runtime.api.errors import error_json
from flyball_runtime.api.event_stream import EventStream
from flyball_runtime.api.generation import Choice, Generation, TokenUsage
from flyball_runtime.api.json_line import json_line
from flyball_runtime.api.message_formats import Parsing
from flyball_runtime.core.errors import RequestError
from flyball_runtime.text.parsing.events import Arguments, CallStart, Content, Event

MessageEvent = dict[str, Any]


class MessageBlocks:
    """Makes blocks of the events of one message. Each method yields the events of the stream; blocks change as they go on."""

    def __init__(self, parsing: Parsing) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._new_call_id = parsing.new_call_id
        self._arguments = ""
        self._is_open = False

    def add(self, event: Event) -> Iterator[MessageEvent]:
        if isinstance(event, CallStart):
            yield from self._open({"type": "tool_use", "id": self._new_call_id(), "name": event.name, "input": {}})
        elif isinstance(event, Arguments):
            self._arguments += event.text
            yield self._delta({"type": "input_json_delta", "partial_json": event.text})
        else:
            yield from self._add_text(event.text, "text" if isinstance(event, Content) else "thinking")

    def close(self) -> Iterator[MessageEvent]:
        """The end of the last block."""
        if not self._is_open:
            return
        self._is_open = False
        if self._block["type"] == "tool_use":
            self._take_arguments()
        yield {"type": "content_block_stop", "index": len(self.blocks) - 1}

    def stop_reason(self, choice: Choice) -> dict[str, Any]:
        """Why the message ended, in both fields that say it."""
        if choice.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if choice.stop_string is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_string}
        calls = any(block["type"] == "tool_use" for block in self.blocks)
        return {"stop_reason": "tool_use" if calls else "end_turn", "stop_sequence": None}

    @property
    def _block(self) -> dict[str, Any]:
        return self.blocks[-1]

    def _open(self, block: dict[str, Any]) -> Iterator[MessageEvent]:
        yield from self.close()
        self.blocks.append(block)
        self._is_open = True
        yield {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": block}

    def _add_text(self, text: str, kind: str) -> Iterator[MessageEvent]:
        if not self._is_open or self._block["type"] != kind:
            yield from self._open({"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {}))
        self._block[kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _delta(self, delta: dict[str, Any]) -> MessageEvent:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}

    def _take_arguments(self) -> None:
        """Put the arguments of the call into its block. If they are no JSON object, the call is shown as text."""
        arguments, self._arguments = self._arguments, ""
        try:
            self._block["input"] = msgspec.json.decode(arguments or "{}", type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            self.blocks[-1] = {"type": "text", "text": f"{self._block['name']}({arguments})"}


class MessageFrame:
    """What surrounds the blocks of a message."""

    def __init__(self, *, unique: str, model: str) -> None:
        self._fields = {"id": f"msg_{unique}", "type": "message", "role": "assistant", "model": model}

    def message(self, blocks: list[dict[str, Any]], stop: dict[str, Any], usage: TokenUsage) -> dict[str, Any]:
        return self._fields | {"content": blocks} | stop | {"usage": _usage(usage)}


def _usage(usage: TokenUsage) -> dict[str, int]:
    """Anthropic's ``input_tokens`` are those that the cache did not have."""
    return {
        "input_tokens": usage.num_prompt - usage.num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached,
        "output_tokens": usage.num_output,
    }


def whole_message(generation: Generation, frame: MessageFrame, parsing: Parsing) -> dict[str, Any]:
    """The message of a generation that has ended."""
    (choice,) = generation.choices
    blocks = MessageBlocks(parsing)
    for part in ParsedMessage(parsing).take(choice):
        list(blocks.add(part))
    list(blocks.close())
    return frame.message(blocks.blocks, blocks.stop_reason(choice), generation.usage)


class MessageStream(EventStream):
    """The events of a message. The last but one says why it ended; a failure is an ``error`` event, without those."""

    def __init__(self, generation: Generation, frame: MessageFrame, parsing: Parsing) -> None:
        super().__init__(generation)
        self._frame = frame
        self._message = ParsedMessage(parsing)
        self._blocks = MessageBlocks(parsing)
        self._has_begun = False

    def events_of(self, choice: Choice) -> bytes:
        parts = list(self._message.take(choice))
        opening = self._opening() if parts else b""
        return opening + b"".join(_encoded(event) for part in parts for event in self._blocks.add(part))

    def closing(self, usage: TokenUsage) -> bytes:
        (choice,) = self._generation.choices
        events = [*self._blocks.close()]
        events += [
            {"type": "message_delta", "delta": self._blocks.stop_reason(choice), "usage": _usage(usage)},
            {"type": "message_stop"},
        ]
        return self._opening() + b"".join(map(_encoded, events))

    def failed(self, failure: RequestError) -> bytes:
        return b"event: error\ndata: %b\n\n" % error_json(failure, MESSAGES_PATH)

    def _opening(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        message = self._frame.message([], {"stop_reason": None, "stop_sequence": None}, self._generation.usage)
        return _encoded({"type": "message_start", "message": message})


def _encoded(event: MessageEvent) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), json_line(event))
