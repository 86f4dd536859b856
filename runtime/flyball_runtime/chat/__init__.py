"""Talk to a served model in the terminal: `flyball chat`."""

import argparse

from flyball_protocol import endpoints


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags of ``flyball chat``."""
    parser.description = (
        "Chat with any OpenAI-compatible server. With a prompt, or with text on stdin, answer once and leave."
    )
    parser.add_argument(
        "prompt", nargs="?", help="ask this once; without it, talk (or read stdin when it is not a terminal)"
    )
    parser.add_argument(
        "--base-url",
        default=endpoints.DEFAULT_BASE_URL,
        metavar="URL",
        help="address of the server, with or without /v1 (default: %(default)s)",
    )
    parser.add_argument("--model", metavar="NAME", help="model to ask for (default: the first that the server lists)")
    parser.add_argument("--system", metavar="TEXT", help="system message (default: none is sent)")
    parser.add_argument("--temperature", type=float, metavar="T", help="sampling temperature (default: the server's)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most tokens of an answer (default: the server's)")
    parser.add_argument(
        "--api-key-env", metavar="NAME", help="environment variable that holds the API key (default: no key is sent)"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds that an answer may take (default: %(default)g)",
    )


def run(args: argparse.Namespace) -> int:
    """Run ``flyball chat`` with parsed flags; returns the exit code. Errors go to stderr."""
    from flyball_runtime.chat.command import run_command  # here: it loads aiohttp and rich; other commands need neither

    return run_command(args)
