"""Where a model comes from: ``spec.model.uri`` taken apart."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

_HUB_REPO = re.compile(r"([A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*", re.ASCII)
_CLAIM = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")


@dataclass(frozen=True)
class HubModel:
    """``ORG/NAME`` or ``hf://ORG/NAME``: downloaded by the runtime."""

    repo: str
    revision: str | None


@dataclass(frozen=True)
class ClaimModel:
    """``pvc://CLAIM/FOLDER``: a folder of a PersistentVolumeClaim; an empty folder is the claim's root."""

    claim: str
    folder: str


@dataclass(frozen=True)
class ImageModel:
    """``oci://REFERENCE``: an image whose root folder is the model."""

    reference: str


@dataclass(frozen=True)
class FolderModel:
    """``file:FOLDER``: an absolute folder of the machine that runs the replicas."""

    path: Path


ModelSource = HubModel | ClaimModel | ImageModel | FolderModel


def is_on_hub(uri: str) -> bool:
    """Return whether ``uri`` names a model of the Hugging Face Hub, with or without ``hf://``."""
    return uri.startswith("hf://") or ":" not in uri


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
