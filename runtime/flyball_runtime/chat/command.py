"""`flyball chat` from parsed flags to exit code."""

import argparse
import asyncio
import contextlib
import math
import sys
from collections.abc import Iterator
from typing import Any

import aiohttp
from rich.console import Console
from rich.text import Text

from flyball_runtime.chat.conversation import Conversation
from flyball_runtime.client.endpoint import Endpoint
from flyball_runtime.client.errors import EndpointError
from flyball_runtime.client.models import find_model
from flyball_runtime.client.stream import open_session
from flyball_runtime.core.errors import ConfigError

EXIT_OK = 0
EXIT_NO_ANSWER = 1
EXIT_CONFIG_ERROR = 2
EXIT_INTERRUPTED = 130

_HELP = "/reset forgets the conversation, /quit or Ctrl-D leaves, Ctrl-C stops an answer."

# A model's output must not steer the terminal: escape and other control characters are dropped.
_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def run_command(args: argparse.Namespace) -> int:
    """Answer once or hold a conversation, and return the exit code. Errors go to stderr."""
    try:
        prompt = _one_prompt(args)
        with asyncio.Runner() as runner, _connected(runner, args) as conversation:
            if prompt is None:
                _talk(runner, conversation)
            else:
                _answer(runner, conversation, prompt)
        return EXIT_OK
    except ConfigError as exc:
        return _complain(exc, EXIT_CONFIG_ERROR)
    except EndpointError as exc:
        return _complain(exc, EXIT_NO_ANSWER)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _one_prompt(args: argparse.Namespace) -> str | None:
    """The only question there will be, or None to talk."""
    if args.prompt is None and sys.stdin.isatty():
        return None
    try:
        prompt = sys.stdin.read() if args.prompt is None else str(args.prompt)
    except UnicodeDecodeError as exc:
        raise ConfigError(f"stdin is not {exc.encoding} text: {exc.reason} at byte {exc.start}.") from exc
    if not prompt.strip():
        raise ConfigError("the prompt is empty; write some text, or start without one in a terminal to talk.")
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
    return open_session(endpoint, timeout_s)  # aiohttp wants a running loop


def _talk(runner: asyncio.Runner, conversation: Conversation) -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # line editing and history where the platform has them
    _note(f"{conversation.model}. {_HELP}")
    while (question := _read_question()) is not None:
        if question == "/reset":
            conversation.reset()
            _note("forgotten.")
        elif question.startswith("/") and " " not in question:
            _note(f"no command {question}: {_HELP}")
        elif question:
            _answer_or_explain(runner, conversation, question)


def _read_question() -> str | None:
    """A line without its blanks, or None to leave."""
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
        _complain(exc, EXIT_NO_ANSWER)
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
    """The request fields that were asked for; the server's defaults hold for the others."""
    if args.temperature is not None and not 0 <= args.temperature <= 2:
        raise ConfigError(f"--temperature is {args.temperature}; it must be from 0 to 2.")
    if args.max_tokens is not None and args.max_tokens < 1:
        raise ConfigError(f"--max-tokens is {args.max_tokens}; it must be at least 1.")
    if not (math.isfinite(args.timeout) and args.timeout > 0):
        raise ConfigError(f"--timeout is {args.timeout}; it must be a number of seconds above 0.")
    wanted = {"temperature": args.temperature, "max_tokens": args.max_tokens}
    return {name: value for name, value in wanted.items() if value is not None}


def _complain(reason: object, exit_code: int) -> int:
    print(f"flyball chat: {reason}", file=sys.stderr)
    return exit_code
