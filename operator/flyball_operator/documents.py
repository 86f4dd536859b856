"""YAML text to plain documents: several per file, no repeated keys, nothing but data."""

from collections.abc import Hashable
from typing import Any

import yaml

from flyball_operator.errors import SpecError

Document = dict[str, Any]

MAX_CHARS = 1_000_000


class _Loader(yaml.SafeLoader):
    """A SafeLoader that refuses a key given twice, where YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            key, line = key_node.value, key_node.start_mark.line + 1
            if isinstance(key, str) and key != "<<" and key in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"key {key!r} is given in line {seen[key]} and again in line {line}; keep one of them",
                    problem_mark=key_node.start_mark,
                )
            if isinstance(key, str):
                seen[key] = line
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return mapping


def read_documents(text: str, source: str) -> list[Document]:
    """Return the documents of a YAML text, empty ones left out.

    Raises:
        SpecError: not YAML, a repeated key, a document that is no mapping, no document at all, or more than MAX_CHARS.
    """
    if len(text) > MAX_CHARS:
        raise SpecError(source, [f"has {len(text)} characters; a manifest may have {MAX_CHARS}. Is it the right file?"])
    try:
        documents = [document for document in yaml.load_all(text, Loader=_Loader) if document is not None]
    except yaml.YAMLError as error:
        raise SpecError(source, [_explain(error)]) from error
    if not documents:
        raise SpecError(
            source, ["holds no document; write an LLMDeployment into it, as in examples/llmdeployment.yaml"]
        )
    for document in documents:
        if not isinstance(document, dict):
            raise SpecError(
                source, [f"a document is {document!r:.60}; expected a mapping with apiVersion, kind, metadata and spec"]
            )
    return documents


def _explain(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return f"not valid YAML: {place}{problem}"
