"""What a request says of the form of its output."""

from typing import Literal

from msgspec import Struct


class Grammar(Struct, frozen=True, array_like=True):
    """The form that an output must have. Equal values are the same grammar, so they are keys of caches.

    Attributes:
        kind: how ``text`` is to be read: a JSON schema; a regular expression; a JSON list of texts to choose from; a
            context-free grammar (Lark's notation, or GBNF); or what the compiler makes of one of these.
        whitespace: of a JSON schema, a regular expression for the space between JSON's tokens. None allows some.
    """

    kind: Literal["json", "regex", "choice", "grammar", "compiled"]
    text: str
    whitespace: str | None = None


MAX_GRAMMAR_CHARS = 256 * 1024
"""Longer ones make masks that hold up every step."""

WHITESPACE = r"[\x20\n\r\t]{0,40}"
"""Between JSON's tokens, by default. Small models like to print spaces without end."""

ANY_OBJECT = Grammar("json", '{"type":"object"}')
"""What ``json_object`` means."""
