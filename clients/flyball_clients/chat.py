"""`flyball chat`: a conversation with a served model, in the terminal."""

import argparse
import asyncio
import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from typing import Any

import aiohttp
import msgspec
from msgspec import Struct
from rich.console import Console
from rich.text import Text

from flyball_clients.endpoint import Endpoint
from flyball_clients.errors import ConfigError, EndpointError
from flyball_clients.stream import Chunk, find_model, open_session, stream_chunks

_HELP = "/reset deletes the conversation, /quit or Ctrl-D exits, Ctrl-C stops an answer."

# Escape and other control characters are removed, because a model's output must not control the terminal.
_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}

MIN_SPAN_S = 0.1
"""If first and last token are closer than this, their rate shows how a proxy or a socket buffered them, not the speed of the
model."""


class Answer(Struct):
    """An answer as it grows, and its timing in seconds from sending."""

    text: str = ""
    num_tokens: int = 0
    ttft_s: float | None = None
    last_token_s: float = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """Speed after the first token. None for fewer than two tokens, or if they arrived together."""
        if self.ttft_s is None or self.num_tokens < 2 or self.last_token_s - self.ttft_s < MIN_SPAN_S:
            return None
        return (self.num_tokens - 1) / (self.last_token_s - self.ttft_s)

    def add(self, chunk: Chunk, seconds: float) -> None:
        if chunk.carries_token:
            self.text += chunk.text
            self.num_tokens += 1
            self.ttft_s = seconds if self.ttft_s is None else self.ttft_s
            self.last_token_s = seconds
        if chunk.usage is not None:
            self.num_tokens = chunk.usage.completion_tokens

    def __str__(self) -> str:
        parts = [f"{self.num_tokens} token{'' if self.num_tokens == 1 else 's'}"]
        if self.ttft_s is not None:
            parts.append(f"TTFT {self.ttft_s * 1000:.0f} ms")
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:.1f} tok/s")
        return ", ".join(parts)


class Conversation:
    """The messages so far, and the model that answers them.

    Args:
        options: further fields of each request, like temperature.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        endpoint: Endpoint,
        model: str,
        *,
        system: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.messages: list[dict[str, str]] = []
        self._session = session
        self._endpoint = endpoint
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._options = options or {}

    def reset(self) -> None:
        """Delete all messages but the system message."""
        self.messages.clear()

    async def ask(self, question: str, write: Callable[[str], None]) -> Answer:
        """Send ``question``, call ``write`` with each piece of the answer, and keep both as messages.

        When cancelled, the request is aborted and the part that came is remembered; after an error, nothing is.

        Raises:
            EndpointError: the answer did not come, or not to its end.
        """
        self.messages.append({"role": "user", "content": question})
        answer = Answer()
        try:
            await self._stream(answer, write)
        except EndpointError:
            self.messages.pop()
            raise
        except asyncio.CancelledError:
            self._remember(answer)
            raise
        self._remember(answer)
        return answer

    def _remember(self, answer: Answer) -> None:
        self.messages.append({"role": "assistant", "content": answer.text})

    async def _stream(self, answer: Answer, write: Callable[[str], None]) -> None:
        sent = time.perf_counter()
        async with aclosing(stream_chunks(self._session, self._endpoint, "chat", self._body())) as chunks:
            async for chunk in chunks:
                answer.add(chunk, time.perf_counter() - sent)
                if chunk.text:
                    write(chunk.text)

    def _body(self) -> bytes:
        return msgspec.json.encode(
            {
                "model": self.model,
                "messages": self._system + self.messages,
                "stream": True,
                "stream_options": {"include_usage": True},
                **self._options,
            }
        )


def run_command(args: argparse.Namespace) -> None:
    """Answer once or hold a conversation. Raises ConfigError and EndpointError."""
    prompt = _one_prompt(args)
    with asyncio.Runner() as runner, _connected(runner, args) as conversation:
        if prompt is None:
            _talk(runner, conversation)
        else:
            _answer(runner, conversation, prompt)


def _one_prompt(args: argparse.Namespace) -> str | None:
    """Return the only question, or None for a conversation."""
    if args.prompt is None and sys.stdin.isatty():
        return None
    try:
        prompt = sys.stdin.read() if args.prompt is None else str(args.prompt)
    except UnicodeDecodeError as exc:
        raise ConfigError(f"stdin is not {exc.encoding} text: {exc.reason} at byte {exc.start}.") from exc
    if not prompt.strip():
        raise ConfigError("the prompt is empty; give some text, or leave it out in a terminal to start a conversation.")
    return prompt


@contextlib.contextmanager
def _connected(runner: asyncio.Runner, args: argparse.Namespace) -> Iterator[Conversation]:
    endpoint, options = Endpoint.resolve(args.base_url, args.api_key_env), _options(args)
    session = runner.run(_open(endpoint, args.timeout))
    try:
        card = runner.run(find_model(session, endpoint, args.model))
        yield Conversation(session, endpoint, card.id, system=args.system, options=options)
    finally:
        runner.run(session.close())


async def _open(endpoint: Endpoint, timeout_s: float) -> aiohttp.ClientSession:
    return open_session(endpoint, timeout_s)  # aiohttp needs a running loop


def _talk(runner: asyncio.Runner, conversation: Conversation) -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # line editing and history where the platform has them
    _note(f"{conversation.model}. {_HELP}")
    while (question := _read_question()) is not None:
        if question == "/reset":
            conversation.reset()
            _note("the conversation is deleted.")
        elif question.startswith("/") and " " not in question:
            _note(f"{question} is not a command: {_HELP}")
        elif question:
            _answer_or_explain(runner, conversation, question)


def _read_question() -> str | None:
    """Return a line without surrounding blanks, or None to exit."""
    try:
        question = input("> ").strip()
    except EOFError:
        print()
        return None
    except KeyboardInterrupt:
        print()
        return ""
    return None if question in ("/quit", "/exit") else question


def _answer_or_explain(runner: asyncio.Runner, conversation: Conversation, question: str) -> None:
    try:
        _answer(runner, conversation, question)
    except EndpointError as exc:
        print(f"flyball chat: {exc}", file=sys.stderr)
    except KeyboardInterrupt:
        _note("\nstopped.")


def _answer(runner: asyncio.Runner, conversation: Conversation, question: str) -> None:
    """Stream an answer to stdout; Ctrl-C aborts its request and raises KeyboardInterrupt."""
    answer = runner.run(conversation.ask(question, _write))
    print()
    _note(str(answer))


def _write(text: str) -> None:
    sys.stdout.write(text.translate(_CONTROLS))
    sys.stdout.flush()


def _note(text: str) -> None:
    Console(stderr=True, soft_wrap=True).print(Text(text, style="dim"))


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the request fields that flags set; the server has defaults for the others."""
    if args.temperature is not None and not 0 <= args.temperature <= 2:
        raise ConfigError(f"--temperature is {args.temperature}; it must be from 0 to 2.")
    if args.max_tokens is not None and args.max_tokens < 1:
        raise ConfigError(f"--max-tokens is {args.max_tokens}; it must be at least 1.")
    if not (math.isfinite(args.timeout) and args.timeout > 0):
        raise ConfigError(f"--timeout is {args.timeout}; it must be a number of seconds above 0.")
    wanted = {"temperature": args.temperature, "max_tokens": args.max_tokens}
    return {name: value for name, value in wanted.items() if value is not None}
