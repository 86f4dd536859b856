"""The answer of /v1/chat/completions: the message of each choice, whole or in deltas, with its reasoning and tool calls."""

from collections.abc import Iterator
from typing import Any

from flyball_runtime.api.generation import Choice
from flyball_runtime.api.json_line import json_line
from flyball_runtime.api.logprobs import chat_logprobs
from flyball_runtime.api.message_formats import Parsing
from flyball_runtime.text.parsing.events import Arguments, CallStart, Content, Event, Reasoning, merged
from flyball_runtime.text.token_text import TokenText


class ParsedMessage:
    """One message while it is generated."""

    def __init__(self, parsing: Parsing) -> None:
        self._parsing = parsing
        self._parser = parsing.new_parser()
        self._num_calls = 0

    def take(self, choice: Choice) -> Iterator[Event]:
        """What came since the last call; of the calls only the first, where one is all that the client wants."""
        events = self._parser.feed(choice.take_text())
        if choice.finish_reason is not None:
            events = merged(events + self._parser.finish())
        for event in events:
            self._num_calls += isinstance(event, CallStart)
            if not (self._parsing.one_call and self._num_calls > 1 and isinstance(event, CallStart | Arguments)):
                yield event

    def finish_reason(self, reason: str | None) -> str | None:
        calls = self._num_calls > 0 and not self._parsing.named
        return "tool_calls" if calls and reason == "stop" else reason

    def delta(self, event: Event) -> dict[str, Any]:
        """The delta of the event that ``take`` yielded last."""
        if isinstance(event, Content):
            return {"content": event.text}
        if isinstance(event, Reasoning):
            return {"reasoning_content": event.text, "reasoning": event.text}
        index = self._num_calls - 1
        if isinstance(event, Arguments):
            return {"tool_calls": [{"index": index, "function": {"arguments": event.text}}]}
        return {"tool_calls": [{"index": index} | self._call(event.name)]}

    def whole(self, events: list[Event]) -> dict[str, Any]:
        """The fields of a message, from all of its events."""
        content = "".join(event.text for event in events if isinstance(event, Content))
        reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
        calls: list[dict[str, Any]] = []
        for event in events:
            if isinstance(event, CallStart):
                calls.append(self._call(event.name))
            elif isinstance(event, Arguments):
                calls[-1]["function"]["arguments"] += event.text
        message: dict[str, Any] = {"content": content or (None if calls or reasoning else "")}
        if reasoning:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        return message | ({"tool_calls": calls} if calls else {})

    def _call(self, name: str) -> dict[str, Any]:
        return {"id": self._parsing.new_call_id(), "type": "function", "function": {"name": name, "arguments": ""}}


class ChatFormat:
    """/v1/chat/completions.

    Args:
        parsing: how messages are parsed; None: their text is content.
    """

    id_prefix = "chatcmpl-"
    response_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    prompt_in_choice = False
    """Where the prompt's token ids belong; a completion may have several prompts."""

    def __init__(self, token_text: TokenText, parsing: Parsing | None) -> None:
        self.token_text = token_text
        self._parsing = parsing
        self._messages: dict[int, ParsedMessage] = {}

    def choice(self, choice: Choice) -> dict[str, Any]:
        reason: str | None = choice.finish_reason
        if (parsed := self._parsed(choice)) is None:
            fields: dict[str, Any] = {"content": choice.take_text()}
        else:
            fields = parsed.whole(list(parsed.take(choice)))
            reason = parsed.finish_reason(reason)
        message = {"role": "assistant"} | fields | {"refusal": None}
        logprobs = self.logprobs(choice)
        return {"index": choice.index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def logprobs(self, choice: Choice) -> dict[str, Any] | None:
        """Those of the tokens since the last call; None if there are none."""
        tokens = choice.take_logprobs()
        return chat_logprobs(tokens, self.token_text) if tokens else None

    def opening(self, index: int) -> bytes | None:
        return self.text(index, b'{"role":"assistant","content":""}', b"null")

    def texts(self, choice: Choice) -> list[bytes]:
        """The deltas of what came since the last call."""
        if (parsed := self._parsed(choice)) is None:
            text = choice.take_text()
            return [b'{"content":%b}' % json_line(text)] if text else []
        return [json_line(parsed.delta(event)) for event in parsed.take(choice)]

    def text(self, index: int, delta: bytes, logprobs: bytes) -> bytes:
        return self._choice(index, delta, logprobs, None)

    def finish(self, choice: Choice, logprobs: bytes) -> bytes:
        parsed, reason = self._parsed(choice), choice.finish_reason
        return self._choice(choice.index, b"{}", logprobs, reason if parsed is None else parsed.finish_reason(reason))

    def _parsed(self, choice: Choice) -> ParsedMessage | None:
        if self._parsing is None:
            return None
        if choice.index not in self._messages:
            self._messages[choice.index] = ParsedMessage(self._parsing)
        return self._messages[choice.index]

    @staticmethod
    def _choice(index: int, delta: bytes, logprobs: bytes, reason: str | None) -> bytes:
        return b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}' % (
            index,
            delta,
            logprobs,
            json_line(reason),
        )
