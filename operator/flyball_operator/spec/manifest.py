"""Manifests to LLMDeployments: YAML, the CRD's schema, its defaults, then the rules that span fields."""

import argparse
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from flyball_operator import names
from flyball_operator.errors import SpecError
from flyball_operator.spec import (
    ClaimModel,
    DeploymentSpec,
    FolderModel,
    HubModel,
    ImageModel,
    LLMDeployment,
    ModelSource,
    is_on_hub,
    rules,
    schema,
)
from flyball_operator.spec.documents import MAX_CHARS, Document, read_documents
from flyball_operator.spec.schema import path_of_entry
from flyball_protocol.quoting import one_line, quoted

MAX_BYTES = 4 * MAX_CHARS
STDIN = Path("-")
"""Given in the place of a file, stands for standard input. Relative models are then resolved against the current folder."""
NO_FOLDER_ON_A_CLUSTER = "file: models are for flyball local; on a cluster use hf://, pvc:// or oci://"

_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_DNS_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_HUB_REPO = re.compile(r"([A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*", re.ASCII)
_CLAIM = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")


def add_file_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``-f FILE``, a Path for ``read_file``."""
    parser.add_argument(
        "-f", "--file", type=Path, required=True, help="a YAML file with LLMDeployments; - reads standard input"
    )


def read_file(path: Path) -> list[LLMDeployment]:
    """Return the LLMDeployments of a YAML file, or of standard input for ``STDIN``.

    Raises:
        SpecError: the file cannot be read, or something in it is wrong.
    """
    return parse_content(read_content(path), path)


def read_content(path: Path) -> bytes:
    """Return a YAML file as it is, up to one byte more than is taken: the file may have no end. Raises SpecError."""
    try:
        with _open(path) as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise SpecError(_source(path), [f"cannot be read: {error.strerror or one_line(str(error))}"]) from error


def _open(path: Path) -> AbstractContextManager[BinaryIO]:
    if path != STDIN:
        return path.open("rb")
    if sys.stdin is None:
        raise OSError("it is closed")
    return nullcontext(sys.stdin.buffer)


def _source(path: Path) -> str:
    return "standard input" if path.name == STDIN.name else str(path)


def parse_content(content: bytes, path: Path) -> list[LLMDeployment]:
    """Return the LLMDeployments of a YAML file's content. Raises SpecError, as ``parse`` does."""
    source = _source(path)
    if len(content) > MAX_BYTES:
        raise SpecError(source, [f"has more than {MAX_BYTES} bytes, the most of a manifest. Is it the right file?"])
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(source, [f"cannot be read: {one_line(str(error))}"]) from error
    return parse(text, source=source, base=path.parent)


def parse(text: str, *, source: str, base: Path) -> list[LLMDeployment]:
    """Return the LLMDeployments of a YAML text; relative ``file:`` models are resolved against ``base``.

    Raises:
        SpecError: one line for each thing that is wrong, each beginning with ``source``.
    """
    deployments = [parse_document(document, source=source, base=base) for document in read_documents(text, source)]
    for i, deployment in enumerate(deployments):
        if deployment.name in {other.name for other in deployments[:i]}:
            raise SpecError(source, [f"metadata.name {quoted(deployment.name)} is used by two documents; rename one"])
    return deployments


def from_object(obj: Mapping[str, Any]) -> LLMDeployment:
    """Return an object of the Kubernetes API, as the API server hands it out, as a value.

    Raises:
        SpecError: one line for each thing that is wrong. An API server with this operator's CRD lets none of them through.
    """
    metadata = obj.get("metadata", {})
    source = f"{names.KIND} {metadata.get('namespace')}/{metadata.get('name')}"
    deployment = parse_document(dict(obj), source=source, base=Path("/"))
    if isinstance(deployment.model_source, FolderModel):
        raise SpecError(source, [f"spec.model.uri is {quoted(deployment.spec.model.uri)}; {NO_FOLDER_ON_A_CLUSTER}"])
    return deployment


def parse_document(document: Document, *, source: str, base: Path) -> LLMDeployment:
    """Check one manifest and return it as a value. Raises SpecError."""
    found = [*_envelope_problems(document)]
    if found:
        raise SpecError(source, found)
    found = [*_metadata_problems(document.get("metadata")), *schema.problems(document["spec"])]
    if found:
        raise SpecError(source, found)
    spec = msgspec.convert(schema.with_defaults(document["spec"]), DeploymentSpec)
    model_source, found = _model_source(spec, base)
    found += rules.problems(spec)
    if found or model_source is None:
        raise SpecError(source, found)
    metadata = document["metadata"]
    return LLMDeployment(
        name=metadata["name"], namespace=metadata.get("namespace", "default"), spec=spec, model_source=model_source
    )


def _envelope_problems(document: Document) -> Iterator[str]:
    for key, expected in (("apiVersion", names.API_VERSION), ("kind", names.KIND)):
        if document.get(key) != expected:
            yield f"{key} is {quoted(document.get(key))}; only {expected} is understood"
    for key in sorted(document.keys() - {"apiVersion", "kind", "metadata", "spec", "status"}):
        yield f"{path_of_entry('', key)} is not a field; an LLMDeployment has apiVersion, kind, metadata and spec"
    if "spec" not in document:
        yield "spec is missing; it needs at least spec.model.uri"


def _metadata_problems(metadata: Any) -> Iterator[str]:
    if not isinstance(metadata, dict) or not metadata.get("name"):
        yield "metadata.name is missing; name the deployment"
        return
    # The name is a Service's too, and that may not begin with a digit.
    for key, most, pattern, first in (("name", 50, _NAME, "letter"), ("namespace", 63, _DNS_LABEL, "letter or digit")):
        value = metadata.get(key, "default")
        if not isinstance(value, str) or not pattern.fullmatch(value) or len(value) > most:
            yield (
                f"metadata.{key} is {quoted(value)}; it must have 1 to {most} lower-case letters, digits and '-', "
                f"begin with a {first} and end with a letter or digit"
            )


def _model_source(spec: DeploymentSpec, base: Path) -> tuple[ModelSource | None, list[str]]:
    try:
        return parse_model_uri(spec.model.uri, revision=spec.model.revision, base=base), []
    except ValueError as error:
        return None, [f"spec.model.uri is {quoted(spec.model.uri)}; {error}"]


def parse_model_uri(uri: str, *, revision: str | None, base: Path) -> ModelSource:
    """Take ``uri`` apart; a relative folder is resolved against ``base``, the manifest's own folder.

    Raises:
        ValueError: nothing usable behind the scheme; the message says what is expected.
    """
    if is_on_hub(uri):
        return HubModel(_hub_repo(uri.removeprefix("hf://")), revision)
    scheme, _, rest = uri.partition(":")
    match scheme:
        case "pvc":
            claim, _, folder = rest.removeprefix("//").partition("/")
            return ClaimModel(_claim(claim), _inside(folder.strip("/")))
        case "oci":
            return ImageModel(_nonempty(rest.removeprefix("//"), "oci://REGISTRY/REPOSITORY:TAG"))
        case "file":
            folder = _nonempty(rest.removeprefix("//"), "file:FOLDER")
            return FolderModel(Path(os.path.realpath(base / folder)))  # resolve() raises for a loop of links
        case _:
            raise ValueError("expected ORG/NAME on the Hub, or hf://, pvc://, oci:// or file:")


def _hub_repo(repo: str) -> str:
    if not _HUB_REPO.fullmatch(repo):
        raise ValueError(
            "expected ORG/NAME or hf://ORG/NAME, as on the model's page on the Hub; a folder is file:FOLDER"
        )
    return repo


def _claim(claim: str) -> str:
    if not _CLAIM.fullmatch(claim):
        raise ValueError("expected pvc://CLAIM/FOLDER, with the name of a PersistentVolumeClaim of this namespace")
    return claim


def _inside(folder: str) -> str:
    if ".." in folder.split("/"):
        raise ValueError("the folder may not contain '..'; name a folder inside the claim")
    return folder


def _nonempty(text: str, expected: str) -> str:
    if not text:
        raise ValueError(f"expected {expected}")
    return text
