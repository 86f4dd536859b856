"""YAML text to plain documents: several per file, no repeated keys, JSON's types only, and bounded work.

Scalars mean what they mean to kubectl: dates and ``1:30`` stay text.
"""

import math
import re
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import yaml
from yaml.constructor import ConstructorError, SafeConstructor

from flyball_operator.errors import SpecError
from flyball_protocol.quoting import one_line, quoted

Document = dict[str, Any]

MAX_CHARS = 1_000_000
MAX_NODES = 20_000
"""Most values of a text, with each alias counted as what it stands for. An LLMDeployment has about a hundred."""
MAX_DEPTH = 64
"""Deepest nesting, aliases included. A pod template has about fifteen levels."""
_TOO_DEEP = f"lists and mappings are nested more than {MAX_DEPTH} levels deep"
MAX_NUMBER_CHARS = 64
MAX_DIRECTIVES = 16
"""libyaml compares each directive with all before it."""

_DIRECTIVE = re.compile(r"(?:\A|[\r\n\x85\u2028\u2029])\ufeff?%")

_MERGE_KEY = "<<"
_CORE = "tag:yaml.org,2002:"


class _Loader(yaml.CSafeLoader):
    """A SafeLoader that knows JSON's types alone, and refuses a key given twice, where YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> dict[Hashable, Any]:
        if not isinstance(node, yaml.MappingNode):
            raise _problem(node, "expected a mapping")
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            key, line = key_node.value, key_node.start_mark.line + 1
            if isinstance(key, str) and key != _MERGE_KEY and key in seen:
                raise _problem(
                    key_node,
                    f"key {quoted(key)} is given in line {seen[key]} and again in line {line}; keep one of them",
                )
            if isinstance(key, str):
                seen[key] = line
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
        for found in mapping:
            if not isinstance(found, str):
                raise _problem(node, f"the key {quoted(found)} is not text; write it in quotes")
        return mapping


def _text(loader: _Loader, node: yaml.ScalarNode) -> str:
    value = str(loader.construct_scalar(node))
    if "\0" in value:
        raise _problem(node, f"{quoted(value)} contains a NUL character; remove it")
    return value


def _integer(loader: _Loader, node: yaml.ScalarNode) -> Any:
    value = _number(loader, node, loader.construct_yaml_int)
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise _problem(
            node, f"{quoted(node.value)} does not fit into 64 bits; write a smaller number, or text in quotes"
        )
    return value


def _float(loader: _Loader, node: yaml.ScalarNode) -> Any:
    value = _number(loader, node, loader.construct_yaml_float)
    if isinstance(value, float) and not math.isfinite(value):
        raise _problem(node, f"{quoted(node.value)} is not a finite number; write one, or text in quotes")
    return value


def _number(loader: _Loader, node: yaml.ScalarNode, construct: Callable[[yaml.ScalarNode], Any]) -> Any:
    text = _text(loader, node)
    if ":" in text:  # YAML 1.1 reads 1:30 as 90
        return text
    if len(text) > MAX_NUMBER_CHARS:
        raise _problem(node, f"{quoted(text)} is a number of {len(text)} characters; write it in quotes if it is text")
    return _scalar(loader, node, construct)


def _boolean(loader: _Loader, node: yaml.ScalarNode) -> Any:
    return _scalar(loader, node, loader.construct_yaml_bool)


def _scalar(loader: _Loader, node: yaml.ScalarNode, construct: Callable[[yaml.ScalarNode], Any]) -> Any:
    try:
        return construct(node)
    except (ValueError, LookupError):  # such as !!int x, !!bool x, and 0x_, which looks like a number to PyYAML
        raise _problem(node, f"{quoted(node.value)} is no {node.tag.removeprefix(_CORE)}") from None


def _problem(at: yaml.Node | yaml.Event, text: str) -> ConstructorError:
    mark: Any = at.start_mark  # libyaml's own class of marks
    return ConstructorError(problem=text, problem_mark=mark)


_Loader.yaml_constructors = {
    f"{_CORE}null": SafeConstructor.construct_yaml_null,
    f"{_CORE}bool": _boolean,
    f"{_CORE}int": _integer,
    f"{_CORE}float": _float,
    f"{_CORE}str": _text,
    f"{_CORE}seq": SafeConstructor.construct_yaml_seq,
    f"{_CORE}map": SafeConstructor.construct_yaml_map,
    None: SafeConstructor.construct_undefined,
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (f"{_CORE}timestamp", f"{_CORE}value")]
    for first, resolvers in yaml.CSafeLoader.yaml_implicit_resolvers.items()
}


def read_documents(text: str, source: str) -> list[Document]:
    """Return the documents of a YAML text, empty ones left out.

    Raises:
        SpecError: not YAML, a repeated key, a value that JSON does not have, a document that is no mapping, no document at all,
            or more than MAX_CHARS, MAX_NODES, MAX_DEPTH or MAX_DIRECTIVES.
    """
    if len(text) > MAX_CHARS:
        raise SpecError(
            source, [f"has more than {MAX_CHARS} characters, the most that a manifest may have. Is it the right file?"]
        )
    if len(_DIRECTIVE.findall(text)) > MAX_DIRECTIVES:
        raise SpecError(
            source, [f"has more than {MAX_DIRECTIVES} lines that begin with %; a manifest needs none of them"]
        )
    try:
        meter = _Meter()
        for event in yaml.parse(text, Loader=_Loader):  # builds nothing, recurses nowhere
            meter.take(event)
        documents = [document for document in yaml.load_all(text, Loader=_Loader) if document is not None]
    except yaml.YAMLError as error:
        raise SpecError(source, [_explain(error)]) from error
    except UnicodeEncodeError as error:
        raise SpecError(
            source, [f"not valid YAML: half a character (a surrogate) at position {error.start}"]
        ) from error
    if not documents:
        raise SpecError(
            source, ["holds no document; write an LLMDeployment into it, as in examples/llmdeployment.yaml"]
        )
    for document in documents:
        if not isinstance(document, dict):
            raise SpecError(
                source,
                [f"a document is {quoted(document)}; expected a mapping with apiVersion, kind, metadata and spec"],
            )
    return documents


class _Size(NamedTuple):
    """Values in a value, itself included, and levels of lists and mappings."""

    nodes: int
    depth: int


class _Open:
    """A list or mapping whose end has not come yet."""

    def __init__(self, anchor: str | None, nodes_before: int) -> None:
        self.anchor = anchor
        self.nodes_before = nodes_before
        self.depth = 1


class _Meter:
    """Counts what building the documents of a stream of events will take.

    An alias costs what its anchor does: nine lists of nine aliases each, nine levels deep, are less than a kilobyte of text
    and 387 million values.
    """

    def __init__(self) -> None:
        self._nodes = 0
        self._anchors: dict[str, _Size] = {}
        self._open: list[_Open] = []

    def take(self, event: yaml.Event) -> None:
        """Raise YAMLError when there is more than MAX_NODES or MAX_DEPTH."""
        match event:
            case yaml.DocumentStartEvent():
                self._anchors.clear()
            case yaml.CollectionStartEvent():
                self._open.append(_Open(event.anchor, self._nodes))
                self._add(event, None, _Size(1, 0))
            case yaml.CollectionEndEvent():
                ended = self._open.pop()
                self._keep(ended.anchor, _Size(self._nodes - ended.nodes_before, ended.depth))
            case yaml.AliasEvent():
                if event.anchor not in self._anchors:
                    raise _problem(event, f"alias {quoted(event.anchor)} has no anchor that ends before it")
                self._add(event, None, self._anchors[event.anchor])
            case yaml.ScalarEvent():
                self._add(event, event.anchor, _Size(1, 0))

    def _add(self, event: yaml.Event, anchor: str | None, size: _Size) -> None:
        self._nodes += size.nodes
        if self._nodes > MAX_NODES:
            raise _problem(
                event, f"there are more than {MAX_NODES} values up to here; split the file, use fewer aliases"
            )
        if len(self._open) + size.depth > MAX_DEPTH:
            raise _problem(event, _TOO_DEEP)
        self._keep(anchor, size)

    def _keep(self, anchor: str | None, size: _Size) -> None:
        if anchor is not None:
            self._anchors[anchor] = size
        if self._open:
            self._open[-1].depth = max(self._open[-1].depth, size.depth + 1)


def _explain(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    if problem == "exceeded maximum nesting depth":  # libyaml from 0.2.6 on stops at 1,000, ahead of the meter
        problem = _TOO_DEEP
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return f"not valid YAML: {place}{one_line(problem)}"
