"""What commands print: text or JSON, to a standard output that may be closed, or a file on a full disk."""

import argparse
import os
import sys

from flyball_operator.errors import OperatorError


class ReaderGone(Exception):
    """Whatever reads standard output has closed it, as ``head`` does when it has enough. No error."""


def add_format_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``-o``, which is ``text`` or ``json``."""
    parser.add_argument(
        *("-o", "--output"),
        choices=("text", "json"),
        default="text",
        help="text, or JSON for programs (default: %(default)s)",
    )


def write(text: str) -> None:
    """Write to standard output.

    Raises:
        ReaderGone: the reader has closed it.
        OperatorError: it cannot be written.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError as error:
        _drop_output()
        raise ReaderGone from error
    except OSError as error:
        _drop_output()
        raise OperatorError(f"standard output cannot be written: {error.strerror}") from error


def _drop_output() -> None:
    """Send what is still buffered to /dev/null, so that the interpreter does not try to write it again at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
