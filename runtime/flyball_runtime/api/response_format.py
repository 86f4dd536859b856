"""The answer of /v1/responses: items of reasoning, text and function calls, and the events that stream them."""

import uuid
from collections.abc import Iterator
from typing import Any

from flyball_runtime.api.chat_format import ParsedMessage
from flyball_runtime.api.event_stream import EventStream
from flyball_runtime.api.generation import Choice, Generation, TokenUsage
from flyball_runtime.api.json_line import json_line
from flyball_runtime.api.message_formats import Parsing
from flyball_runtime.core.errors import RequestError
from flyball_runtime.text.parsing.events import Arguments, CallStart, Content, Event

ResponseEvent = dict[str, Any]


class ResponseItems:
    """Makes items of the events of one message. Each method yields the events of the stream; items change as they go on."""

    def __init__(self, parsing: Parsing) -> None:
        self.items: list[dict[str, Any]] = []
        self._new_call_id = parsing.new_call_id
        self._is_open = False

    def add(self, event: Event) -> Iterator[ResponseEvent]:
        if isinstance(event, CallStart):
            yield from self._open(
                {"type": "function_call", "call_id": self._new_call_id(), "name": event.name, "arguments": ""}, "fc"
            )
        elif isinstance(event, Arguments):
            self._item["arguments"] += event.text
            yield self._of_item("response.function_call_arguments.delta", delta=event.text)
        else:
            yield from self._add_text(event.text, "message" if isinstance(event, Content) else "reasoning")

    def close(self, *, cut_off: bool) -> Iterator[ResponseEvent]:
        """The end of the output, which has a message if it has nothing else."""
        if not self.items:
            yield from self._add_text("", "message")
        yield from self._done("incomplete" if cut_off else "completed")

    @property
    def _item(self) -> dict[str, Any]:
        return self.items[-1]

    def _open(self, fields: dict[str, Any], prefix: str) -> Iterator[ResponseEvent]:
        yield from self._done("completed")
        self.items.append({"id": f"{prefix}_{uuid.uuid4().hex}", "status": "in_progress"} | fields)
        self._is_open = True
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": self._item}

    def _add_text(self, text: str, kind: str) -> Iterator[ResponseEvent]:
        if not self._is_open or self._item["type"] != kind:
            if kind == "message":
                fields: dict[str, Any] = {"type": kind, "role": "assistant", "content": []}
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            else:
                fields = {"type": kind, "summary": [], "content": []}
                part = {"type": "reasoning_text", "text": ""}
            yield from self._open(fields, "msg" if kind == "message" else "rs")
            self._item["content"].append(part)
            yield self._of_item("response.content_part.added", content_index=0, part=part)
        self._item["content"][0]["text"] += text
        if text:
            yield self._of_text("delta", delta=text)

    def _done(self, status: str) -> Iterator[ResponseEvent]:
        if not self._is_open:
            return
        self._is_open = False
        self._item["status"] = status
        if self._item["type"] == "function_call":
            fields = {"arguments": self._item["arguments"], "name": self._item["name"]}
            yield self._of_item("response.function_call_arguments.done", **fields)
        else:
            (part,) = self._item["content"]
            yield self._of_text("done", text=part["text"])
            yield self._of_item("response.content_part.done", content_index=0, part=part)
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": self._item}

    def _of_text(self, what: str, **fields: Any) -> ResponseEvent:
        if self._item["type"] == "reasoning":
            return self._of_item(f"response.reasoning_text.{what}", content_index=0, **fields)
        return self._of_item(f"response.output_text.{what}", content_index=0, logprobs=[], **fields)

    def _of_item(self, type: str, **fields: Any) -> ResponseEvent:
        return {"type": type, "item_id": self._item["id"], "output_index": len(self.items) - 1} | fields


class ResponseFrame:
    """What surrounds the items of a response.

    Args:
        echoed: the fields that repeat the request's.
    """

    def __init__(self, *, unique: str, created: int, model: str, echoed: dict[str, Any]) -> None:
        head = {"id": f"resp_{unique}", "object": "response", "created_at": created, "model": model}
        self._fields = head | echoed | {"error": None, "incomplete_details": None}

    def begun(self) -> dict[str, Any]:
        return self._fields | {"status": "in_progress", "output": [], "usage": None}

    def ended(self, items: list[dict[str, Any]], usage: TokenUsage, *, cut_off: bool) -> dict[str, Any]:
        why = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        how = why if cut_off else {"status": "completed"}
        return self._fields | how | {"output": items, "usage": _usage(usage)}

    def failed(self, items: list[dict[str, Any]], message: str) -> dict[str, Any]:
        error = {"code": "server_error", "message": message}
        return self._fields | {"status": "failed", "error": error, "output": items, "usage": None}


def _usage(usage: TokenUsage) -> dict[str, Any]:
    """Reasoning is not counted by itself; it is a part of the output tokens."""
    return {
        "input_tokens": usage.num_prompt,
        "input_tokens_details": {"cached_tokens": usage.num_cached},
        "output_tokens": usage.num_output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.num_prompt + usage.num_output,
    }


def whole_response(generation: Generation, frame: ResponseFrame, parsing: Parsing) -> dict[str, Any]:
    """The response to a generation that has ended."""
    (choice,) = generation.choices
    items = ResponseItems(parsing)
    cut_off = choice.finish_reason == "length"
    for event in ParsedMessage(parsing).take(choice):
        _run(items.add(event))
    _run(items.close(cut_off=cut_off))
    return frame.ended(items.items, generation.usage, cut_off=cut_off)


def _run(events: Iterator[ResponseEvent]) -> None:
    for _ in events:
        pass


class ResponseStream(EventStream):
    """The events of a response, numbered. The last one says how it ended, and has all of it."""

    def __init__(self, generation: Generation, frame: ResponseFrame, parsing: Parsing) -> None:
        super().__init__(generation)
        self._frame = frame
        self._message = ParsedMessage(parsing)
        self._items = ResponseItems(parsing)
        self._cut_off = False
        self._num_events = 0

    def events_of(self, choice: Choice) -> bytes:
        self._cut_off = choice.finish_reason == "length"
        parts = list(self._message.take(choice))
        opening = self._opening() if parts else b""
        return opening + b"".join(self._encoded(event) for part in parts for event in self._items.add(part))

    def closing(self, usage: TokenUsage) -> bytes:
        opening = self._opening()
        body = b"".join(map(self._encoded, self._items.close(cut_off=self._cut_off)))
        response = self._frame.ended(self._items.items, usage, cut_off=self._cut_off)
        return opening + body + self._encoded({"type": f"response.{response['status']}", "response": response})

    def failed(self, failure: RequestError) -> bytes:
        response = self._frame.failed(self._items.items, failure.message)
        return self._encoded({"type": "response.failed", "response": response})

    def _opening(self) -> bytes:
        kinds = () if self._num_events else ("response.created", "response.in_progress")
        return b"".join(self._encoded({"type": kind, "response": self._frame.begun()}) for kind in kinds)

    def _encoded(self, event: ResponseEvent) -> bytes:
        numbered = event | {"sequence_number": self._num_events}
        self._num_events += 1
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), json_line(numbered))
