"""Prompt tokens whose log probabilities are wanted, as a plan names them."""

from msgspec import Struct


class PromptSpan(Struct, frozen=True, array_like=True):
    """Some tokens of an entry, for each of which the log probability of the prompt's next token is wanted.

    Attributes:
        entry: index of the plan's entry.
        at: of the first of them in the sequence.
        num_top: how many of the likeliest tokens to name beside it.
        targets: the next token of each, unsigned 32-bit integers in the machine's order.
    """

    entry: int
    at: int
    num_top: int
    targets: bytes
