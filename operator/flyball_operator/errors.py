"""Errors that the operator raises on purpose. Each message gives the value, the limit and the way out."""

from collections.abc import Sequence

from flyball_protocol.quoting import one_line

MAX_PROBLEMS = 20
"""Problems of one manifest that get a line each."""


class OperatorError(Exception):
    """Base of every error that the operator raises on purpose."""


class SpecError(OperatorError):
    """A manifest cannot be taken.

    Attributes:
        source: the file (or object) at fault.
        problems: one line for each of the first things that are wrong; the last counts the others.
    """

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        num_others = len(problems) - MAX_PROBLEMS
        others = [f"{num_others} more problems"] if num_others > 0 else []
        self.source = one_line(source)
        self.problems = (*problems[:MAX_PROBLEMS], *others)
        super().__init__("\n".join(f"{self.source}: {problem}" for problem in self.problems))


class LocalError(OperatorError):
    """Local mode cannot do what a manifest or an option asks of this machine."""
