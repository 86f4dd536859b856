"""``flyball completion``: a script with which a shell completes commands, flags and values."""

import argparse
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

from flyball_cli.commands import COMMANDS

SHELLS = ("bash", "zsh", "fish")
_FILE_METAVARS = ("FILE", "PATH")

Commands = argparse._SubParsersAction  # argparse has no public name for what add_subparsers() returns


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``flyball completion``."""
    parser.description = (
        "Print a script that completes flyball's commands, flags and values. "
        "bash: flyball completion bash > ~/.local/share/bash-completion/completions/flyball; "
        "fish: flyball completion fish > ~/.config/fish/completions/flyball.fish; "
        "zsh: write it to a file named _flyball in a folder of $fpath."
    )
    parser.add_argument("shell", choices=SHELLS, help="shell that the script is for")


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """Return the script for a parser that has the commands' names.

    Flags of commands whose packages are not installed are left out, with a message on standard error.
    """
    import shtab  # here: no other command needs it

    commands = commands_of(parser)
    for extra in sorted({command.extra for command in COMMANDS.values()}):
        commands.choices.update(_installed(extra, commands))
    for action in _values(commands):
        action.complete = shtab.FILE  # type: ignore[attr-defined]  # where shtab looks for it
    text: str = shtab.complete(parser, shell)
    return text


def commands_of(parser: argparse.ArgumentParser) -> "Commands[argparse.ArgumentParser]":
    """Return the parser's sub-commands."""
    return next(action for action in parser._actions if isinstance(action, Commands))


def _installed(extra: str, listed: "Commands[argparse.ArgumentParser]") -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of the commands of one extra's package, with all flags; nothing if it is not installed."""
    try:
        package = importlib.import_module(f"flyball_{extra}.cli")
        known = commands_of(package.build_parser()).choices
    except ModuleNotFoundError as error:
        print(
            f"flyball: the script has no flags for some commands, because {error.name} is not installed; "
            f"install it with: pip install 'flyball[{extra}]'",
            file=sys.stderr,
        )
        return {}
    return {name: parser for name, parser in known.items() if name in listed.choices}


def _values(commands: "Commands[argparse.ArgumentParser]") -> Iterator[argparse.Action]:
    """Yield the arguments that may be paths: positional ones, and flags of type Path or with a path's metavar."""
    for parser in commands.choices.values():
        for action in parser._actions:
            is_path = action.type is Path or action.metavar in _FILE_METAVARS
            if action.choices is None and (is_path or not action.option_strings):
                yield action
