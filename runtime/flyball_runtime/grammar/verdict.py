"""What the processes that try out grammars answer."""

from msgspec import Struct

from flyball_runtime.core.grammar import Grammar


class Verdict(Struct, frozen=True):
    """Either the grammar, in the form to send to the engine, or what is wrong with it."""

    grammar: Grammar | None = None
    refusal: str = ""
