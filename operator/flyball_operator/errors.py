"""Errors that the operator raises on purpose. Each message gives the value, the limit and the way out."""

from collections.abc import Sequence


class OperatorError(Exception):
    """Base of every error that the operator raises on purpose."""


class SpecError(OperatorError):
    """A manifest cannot be taken.

    Attributes:
        source: the file (or object) at fault.
        problems: one line for each thing that is wrong.
    """

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        super().__init__("\n".join(f"{source}: {problem}" for problem in problems))
        self.source = source
        self.problems = tuple(problems)


class LocalError(OperatorError):
    """Local mode cannot do what a manifest or an option asks of this machine."""
