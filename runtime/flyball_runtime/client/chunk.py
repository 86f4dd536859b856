"""One event of a streamed answer."""

from typing import Any

import msgspec
from msgspec import Struct, field

from flyball_runtime.client.errors import BadAnswer, ServerError


class Usage(Struct, frozen=True):
    """Token counts of one request, by the server's own tokenizer."""

    prompt_tokens: int
    completion_tokens: int = 0


class _Delta(Struct):
    """Answer text under ``content``; servers stream a reasoning model's thoughts under either of the other two names."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    role: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class Chunk(Struct):
    """A completions or chat chunk; fields that nobody here reads are skipped while decoding."""

    choices: list[_Choice] = field(default_factory=list)
    usage: Usage | None = None
    error: Any = None

    @property
    def text(self) -> str:
        """Answer text of this chunk, may be empty."""
        return "".join(choice.text or (choice.delta and choice.delta.content) or "" for choice in self.choices)

    @property
    def finished(self) -> bool:
        return any(choice.finish_reason for choice in self.choices)

    @property
    def carries_token(self) -> bool:
        """Whether a token came with it: any text, or emptiness that is neither an opening nor an ending.

        Empty text in mid-stream is a token whose bytes do not yet make a character. The role that opens a chat answer
        and a closing ``finish_reason`` without text carry none.
        """
        return any(_carries_token(choice) for choice in self.choices)


def _carries_token(choice: _Choice) -> bool:
    delta = choice.delta
    if delta is None:
        return bool(choice.text) or choice.finish_reason is None
    if delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls:
        return True
    return delta.role is None and choice.finish_reason is None


_decoder = msgspec.json.Decoder(Chunk)


def decode_chunk(data: bytes) -> Chunk:
    """Raises BadAnswer for what is not a chunk, ServerError for an error object."""
    try:
        chunk = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise BadAnswer(f"the stream holds {data[:80]!r}, which is not a completion chunk: {exc}") from exc
    if chunk.error is not None:
        raise ServerError(error_message(data))
    return chunk


def error_message(body: bytes) -> str:
    """The message inside an OpenAI error object, or the start of whatever else the body is."""
    try:
        answer = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body[:200].decode(errors="replace").strip() or "no body"
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    message = error.get("message") if isinstance(error, dict) else None
    return str(message or error)[:500]
