"""OpenAI's answers as bytes: whole responses and stream chunks, for chats and for plain completions.

A stream writes one chunk per step and request, so a chunk is its constant bytes around the JSON of its text.
"""

from typing import Any

import msgspec

from flyball_runtime.api.choice import Choice
from flyball_runtime.api.generation import Usage

encode = msgspec.json.encode

DONE = b"data: [DONE]\n\n"


# Line ends to some readers of lines (Python's str.splitlines), though not to server-sent events; JSON may escape them.
_LINE_ENDS = {char: f"\\u{char:04x}".encode() for char in (0x85, 0x2028, 0x2029)}


def encode_text(text: str) -> bytes:
    """JSON of a text, on one line whatever the reader takes for a line end."""
    body = encode(text)
    if not text.isascii():
        for char, escape in _LINE_ENDS.items():
            body = body.replace(chr(char).encode(), escape)
    return body


def usage_dict(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.num_prompt,
        "completion_tokens": usage.num_output,
        "total_tokens": usage.num_prompt + usage.num_output,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached},
    }


class ChatFormat:
    """/v1/chat/completions."""

    id_prefix = "chatcmpl-"
    response_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(self, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.take_text(), "refusal": None}
        return {"index": choice.index, "message": message, "logprobs": None, "finish_reason": choice.finish_reason}

    def opening(self, index: int) -> bytes | None:
        return self._delta(index, b'{"role":"assistant","content":""}', None)

    def text(self, index: int, text: str) -> bytes:
        return self._delta(index, b'{"content":%b}' % encode_text(text), None)

    def finish(self, index: int, reason: str) -> bytes:
        return self._delta(index, b"{}", reason)

    @staticmethod
    def _delta(index: int, delta: bytes, reason: str | None) -> bytes:
        return b'{"index":%d,"delta":%b,"logprobs":null,"finish_reason":%b}' % (index, delta, encode(reason))


class CompletionFormat:
    """/v1/completions."""

    id_prefix = "cmpl-"
    response_object = "text_completion"
    chunk_object = "text_completion"

    def choice(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": choice.take_text(),
            "logprobs": None,
            "finish_reason": choice.finish_reason,
        }

    def opening(self, index: int) -> bytes | None:
        return None

    def text(self, index: int, text: str) -> bytes:
        return self._choice(index, text, None)

    def finish(self, index: int, reason: str) -> bytes:
        return self._choice(index, "", reason)

    @staticmethod
    def _choice(index: int, text: str, reason: str | None) -> bytes:
        return b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":%b}' % (index, encode_text(text), encode(reason))


Format = ChatFormat | CompletionFormat


class Envelope:
    """What surrounds the choices of one HTTP request: id, object, creation time, model."""

    def __init__(self, format: Format, *, unique: str, created: int, model: str) -> None:
        self._fields = {"id": format.id_prefix + unique, "created": created, "model": model}
        chunk_fields = encode(self._fields | {"object": format.chunk_object})
        self._chunk_head = b"data: " + chunk_fields.removesuffix(b"}") + b',"choices":['
        self._response_object = format.response_object

    def response(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        return self._fields | {"object": self._response_object, "choices": choices, "usage": usage_dict(usage)}

    def chunk(self, choice: bytes, usage: Usage | None = None) -> bytes:
        """One SSE event. ``choice`` may be empty, in the closing usage chunk."""
        tail = b"]}\n\n" if usage is None else b'],"usage":%b}\n\n' % encode(usage_dict(usage))
        return self._chunk_head + choice + tail
