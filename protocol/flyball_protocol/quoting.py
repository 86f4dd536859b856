"""Text from outside in error messages and log lines: on one line, without control characters, and short.

The name of a client's field, a path, a YAML value or a library's message may hold newlines that forge a log line, escape codes
that a terminal obeys, or megabytes. Every text that Flyball did not write itself passes through one of these functions.
"""

import reprlib
from collections.abc import Collection, Iterable
from itertools import islice

MAX_QUOTED_CHARS = 64
MAX_LISTED = 8
MAX_LINE_CHARS = 500
MAX_MESSAGE_LINE_CHARS = 2000
MAX_INT_BITS = 256


def quoted(value: object, max_chars: int = MAX_QUOTED_CHARS) -> str:
    r"""Return ``value`` as ``repr`` shows it, cut to its first ``max_chars`` characters.

    ``repr`` escapes what is not printable: ``quoted("a\nb")`` is ``'a\nb'`` on one line. Of a container, a few entries are
    shown. The cost does not grow with the length of a text, a list or a number.
    """
    return _Quoted(max_chars).repr(value)


def quoted_list(values: Collection[object], most: int = MAX_LISTED) -> str:
    """Return the first ``most`` values, each quoted, and how many more there are."""
    shown = ", ".join(map(quoted, islice(values, most)))
    return shown if len(values) <= most else f"{shown} and {len(values) - most} more"


def one_line(text: str, max_chars: int = MAX_LINE_CHARS) -> str:
    """Return ``text`` without quotes: what is not printable is escaped, and the end is cut. For messages of libraries."""
    return "".join(_printable(text[:max_chars])) + _cut_note(len(text) - max_chars)


def lines(text: str, max_chars: int = MAX_MESSAGE_LINE_CHARS) -> str:
    """Return ``text`` with each of its lines as ``one_line`` shows it. For messages of ours that list several problems."""
    return "\n".join(one_line(line, max_chars) for line in text.split("\n"))


class _Quoted(reprlib.Repr):
    def __init__(self, max_chars: int) -> None:
        super().__init__()
        self.maxlevel = 1
        self.maxother = max_chars

    def repr_str(self, x: str, level: int) -> str:
        return repr(x[: self.maxother]) + _cut_note(len(x) - self.maxother)

    def repr_bytes(self, x: bytes, level: int) -> str:
        return repr(x[: self.maxother]) + _cut_note(len(x) - self.maxother)

    def repr_dict(self, x: dict[object, object], level: int) -> str:
        if level <= 0 and x:
            return "{...}"
        shown = [f"{self.repr1(key, level - 1)}: {self.repr1(x[key], level - 1)}" for key in islice(x, self.maxdict)]
        return "{" + ", ".join(shown + ["..."] * (len(x) > self.maxdict)) + "}"

    def repr_int(self, x: int, level: int) -> str:
        # The digits of a number cost time that grows with the square of their count, and Python refuses more than 4300.
        return repr(x) if x.bit_length() <= MAX_INT_BITS else f"an integer of {x.bit_length()} bits"

    def repr_instance(self, x: object, level: int) -> str:
        return one_line(super().repr_instance(x, level), self.maxother)


def _printable(text: str) -> Iterable[str]:
    return (char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _cut_note(num_cut: int) -> str:
    return f"... ({num_cut} more characters)" if num_cut > 0 else ""
