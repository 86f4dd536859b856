"""Whether anything that fits a grammar ever ends: ``start: ("a" | "b") start`` can be followed for ever, and must be.

This is the emptiness problem of context-free grammars. A rule can end if all symbols of one of its alternatives can; which
rules those are is found in time linear in their length (Dowling and Gallier 1984). A JSON schema becomes such rules too: an
object ends if the properties it requires do, an ``anyOf`` if one of its schemas does.
"""

import json
import re
from collections import defaultdict
from collections.abc import Hashable, Iterator
from typing import Any

Symbol = Hashable
Rules = dict[Symbol, list[list[Symbol]]]
"""The alternatives of each rule. What has no rule can end."""


def schema_ends(schema: str) -> bool:
    """Whether a JSON schema has a finite instance; True where this cannot be told, and where it is no JSON."""
    try:
        root = json.loads(schema)
    except (ValueError, RecursionError):
        return True
    return _can_end(_pointer(()), _rules_of_schema(root))


def lark_ends(grammar: str) -> bool:
    """Whether a sentence of a grammar in llguidance's dialect of Lark ends; True where this cannot be told."""
    try:
        rules = _LarkReader(grammar).read()
    except _Unreadable:
        return True
    return _can_end("start", rules)


def _can_end(start: Symbol, rules: Rules) -> bool:
    num_open: list[int] = []  # symbols of each alternative that are not known to end
    heads: list[Symbol] = []  # whose alternative it is
    users: dict[Symbol, list[int]] = defaultdict(list)
    for rule, alternatives in rules.items():
        for alternative in alternatives:
            symbols = [symbol for symbol in alternative if symbol in rules]
            for symbol in symbols:
                users[symbol].append(len(heads))
            num_open.append(len(symbols))
            heads.append(rule)
    ready = [head for head, num in zip(heads, num_open, strict=True) if num == 0]
    ended: set[Symbol] = set()
    while ready:
        rule = ready.pop()
        if rule in ended:
            continue
        ended.add(rule)
        for user in users[rule]:
            num_open[user] -= 1
            if num_open[user] == 0:
                ready.append(heads[user])
    return start in ended or start not in rules


Path = tuple[str | int, ...]
"""Keys and indices that lead from the root of a schema to a part of it."""

_SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")


def _pointer(path: Path) -> Symbol:
    return ("schema", path)


def _rules_of_schema(root: object) -> Rules:
    """Return a rule for each schema in a document, and those that they are made of."""
    rules: Rules = {}
    open_paths: list[tuple[Path, object]] = [((), root)]
    while open_paths:
        path, schema = open_paths.pop()
        rules[_pointer(path)] = [] if schema is False else [[]]
        if isinstance(schema, dict):
            rules[_pointer(path)] = [_needs(path, schema, rules)]
            open_paths += _parts(path, schema)
    return rules


def _parts(path: Path, schema: dict[str, Any]) -> Iterator[tuple[Path, object]]:
    for key, value in schema.items():
        if key in _SCHEMA_LISTS and isinstance(value, list):
            yield from (((*path, key, index), part) for index, part in enumerate(value))
        elif key in _SCHEMA_MAPS and isinstance(value, dict):
            yield from (((*path, key, name), part) for name, part in value.items())
        elif key in ("items", "additionalProperties"):
            yield (*path, key), value


def _needs(path: Path, schema: dict[str, Any], rules: Rules) -> list[Symbol]:
    """Return what must end for an instance to end; adds rules for what can end in several ways."""
    needs: list[Symbol] = []
    if isinstance(ref := schema.get("$ref"), str) and ref.startswith("#"):
        needs.append(_pointer(_path_of(ref)))
    if isinstance(members := schema.get("allOf"), list):
        needs += [_pointer((*path, "allOf", index)) for index in range(len(members))]
    for key in ("anyOf", "oneOf"):
        if isinstance(members := schema.get(key), list):
            needs.append((key, path))
            rules[key, path] = [[_pointer((*path, key, index))] for index in range(len(members))]
    kinds = schema.get("type", "any")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "const" not in schema and "enum" not in schema and all(kind in ("object", "array") for kind in kinds):
        needs.append(("type", path))
        rules["type", path] = [
            _required_properties(path, schema) if kind == "object" else _required_items(path, schema) for kind in kinds
        ]
    return needs


def _required_properties(path: Path, schema: dict[str, Any]) -> list[Symbol]:
    if schema.get("patternProperties"):
        return []  # which of them a name fits is not looked at
    required, properties = schema.get("required"), schema.get("properties")
    named = properties if isinstance(properties, dict) else {}
    names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    return [
        _pointer((*path, "properties", name) if name in named else (*path, "additionalProperties")) for name in names
    ]


def _required_items(path: Path, schema: dict[str, Any]) -> list[Symbol]:
    least, first = schema.get("minItems"), schema.get("prefixItems")
    num = least if isinstance(least, int | float) else 0
    num_first = len(first) if isinstance(first, list) else 0
    needs = [_pointer((*path, "prefixItems", index)) for index in range(num_first) if index < num]
    return [*needs, _pointer((*path, "items"))] if num > num_first else needs


def _path_of(ref: str) -> Path:
    """Return where a JSON pointer (RFC 6901) leads."""
    parts = [part.replace("~1", "/").replace("~0", "~") for part in ref.removeprefix("#").split("/")[1:]]
    path: list[str | int] = []
    for part in parts:
        is_index = path[-1:] in [[key] for key in _SCHEMA_LISTS] and part.isdecimal()
        path.append(int(part) if is_index else part)
    return tuple(path)


class _Unreadable(Exception):
    """The text is not what this reader knows of Lark's notation."""


class _LarkReader:
    """Reads rules. Terminals, which cannot refer to themselves, are not looked into; nor are rules with attributes."""

    _DEFINITION = re.compile(r"[!?]?(?P<name>[A-Za-z_][\w-]*)(?:\.-?\d+)?(?P<attributes>\[[^\]\n]*\])?\s*:")
    _SPACE = re.compile(r"(?:\s+|//[^\n]*|#[^\n]*)+")
    _DIRECTIVE = re.compile(r"%(?:import|ignore|declare)\b[^\n]*")
    _JSON = re.compile(r"%(?P<kind>llguidance|json|regex)\s*(?=\{)")
    _ITEM = re.compile(
        r"""
        (?P<closed>"(?:\\.|[^"\\])*"i?|/(?:\\.|[^/\\])+/[a-z]*|<[^>\s]*>|@[\w-]+|\.\.)
        |(?P<name>[A-Za-z_][\w-]*)
        |(?P<times>~\s*(?P<exactly>\d+)(?:\s*\.\.\s*\d+)?|\{\s*(?P<least>\d*)\s*(?:,\s*\d*\s*)?\})
        |(?P<mark>[()\[\]|?*+]|->\s*\w+)
        """,
        re.VERBOSE | re.DOTALL,
    )
    _CLOSED: Symbol = ("closed",)
    """A text, and all else that ends."""
    _ENDLESS: Symbol = ("endless",)
    """A JSON schema without a finite instance."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._rules: Rules = {self._ENDLESS: []}

    def read(self) -> Rules:
        """Raises _Unreadable."""
        self._skip_space()
        while self._at < len(self._text):
            if self._take(self._DIRECTIVE) is None and self._take_json() is None and not self._read_rule():
                raise _Unreadable
            self._skip_space()
        return self._rules

    def _read_rule(self) -> bool:
        """Return False if there is none here."""
        found = self._take(self._DEFINITION)
        if found is None:
            return False
        alternatives = self._read_alternatives()
        if found["attributes"] is None and not found["name"].isupper():
            self._rules[found["name"]] = alternatives
        return True

    def _read_alternatives(self) -> list[list[Symbol]]:
        """Read up to the next definition. Groups become rules of their own."""
        groups: list[list[list[Symbol]]] = [[[]]]
        openings: list[str] = []
        self._skip_space()
        while self._at < len(self._text) and not self._starts_statement():
            symbols = groups[-1][-1]
            if (ends := self._take_json()) is not None:
                symbols.append(self._CLOSED if ends else self._ENDLESS)
            elif (item := self._take(self._ITEM)) is None:
                raise _Unreadable
            elif item["closed"]:
                symbols.append(self._CLOSED)
            elif item["name"]:
                symbols.append(item["name"])
            elif item["times"]:
                if symbols and int(item["exactly"] or item["least"] or 0) == 0:
                    symbols[-1] = self._CLOSED
            elif item["mark"] in ("(", "["):
                openings.append(item["mark"])
                groups.append([[]])
            elif item["mark"] in (")", "]"):
                self._close(item["mark"], groups, openings)
            elif item["mark"] == "|":
                groups[-1].append([])
            elif item["mark"] in ("?", "*") and symbols:
                symbols[-1] = self._CLOSED
            self._skip_space()
        if openings:
            raise _Unreadable
        return groups[0]

    def _close(self, mark: str, groups: list[list[list[Symbol]]], openings: list[str]) -> None:
        if not openings or openings.pop() + mark not in ("()", "[]"):
            raise _Unreadable
        alternatives = groups.pop()
        if mark == "]":
            alternatives.append([])
        group: Symbol = ("group", self._at)
        self._rules[group] = alternatives
        groups[-1][-1].append(group)

    def _starts_statement(self) -> bool:
        start_of_line = self._text.rfind("\n", 0, self._at) + 1
        if self._text[start_of_line : self._at].strip():
            return False
        return any(one.match(self._text, self._at) for one in (self._DEFINITION, self._DIRECTIVE))

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self._text, self._at)
        if found is not None:
            self._at = found.end()
        return found

    def _take_json(self) -> bool | None:
        """Take what has a JSON value behind it; return False if that is a schema that has no finite instance."""
        found = self._take(self._JSON)
        if found is None:
            return None
        try:
            value, self._at = json.JSONDecoder().raw_decode(self._text, self._at)
        except (ValueError, RecursionError):
            raise _Unreadable from None
        return found["kind"] != "json" or _can_end(_pointer(()), _rules_of_schema(value))

    def _skip_space(self) -> None:
        self._take(self._SPACE)
