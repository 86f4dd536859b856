"""An API server's verdicts on objects, without kubectl in between: hundreds of them take seconds."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx

from cluster_kit.api import Api

APPLY = "application/apply-patch+yaml"
STRICT = {"dryRun": "All", "fieldValidation": "Strict"}


@dataclass(frozen=True)
class Verdict:
    """What the API server answered: an object with its defaults, or a status that says why not."""

    accepted: bool
    body: dict[str, Any]

    @property
    def message(self) -> str:
        return "" if self.accepted else str(self.body["message"])


class ApiServer:
    """Asks with the rights of an administrator, strictly: unknown and repeated fields are errors."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client
        self._plural = cache(self._look_up_plural)

    def create(self, manifest: dict[str, Any], **params: str) -> Verdict:
        """Try to create an object; nothing is stored unless ``dryRun=""`` is given."""
        return self._verdict(self._client.post(self._path(manifest), params=_params(params), json=manifest))

    def apply(self, manifest: dict[str, Any], **params: str) -> Verdict:
        """Try to apply an object server-side, as the operator does; nothing is stored unless ``dryRun=""`` is given."""
        query = {"fieldManager": "flyball-operator", "force": "true"} | _params(params)
        path = f"{self._path(manifest)}/{manifest['metadata']['name']}"
        headers = {"Content-Type": APPLY}
        return self._verdict(self._client.patch(path, params=query, headers=headers, content=json.dumps(manifest)))

    def store(self, manifest: dict[str, Any]) -> Verdict:
        """Create an object, or put it in the place of the one with its name."""
        path = f"{self._path(manifest)}/{manifest['metadata']['name']}"
        found = self._client.get(path)
        if found.status_code == httpx.codes.NOT_FOUND:
            return self.create(manifest, dryRun="")
        version = found.raise_for_status().json()["metadata"]["resourceVersion"]
        replacement = manifest | {"metadata": manifest["metadata"] | {"resourceVersion": version}}
        return self._verdict(self._client.put(path, params=_params({"dryRun": ""}), json=replacement))

    def _verdict(self, answer: httpx.Response) -> Verdict:
        return Verdict(answer.is_success, answer.json())

    def _path(self, manifest: dict[str, Any]) -> str:
        api_version, kind = manifest["apiVersion"], manifest["kind"]
        root = f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"
        return f"{root}/namespaces/{manifest['metadata']['namespace']}/{self._plural(root, kind)}"

    def _look_up_plural(self, root: str, kind: str) -> str:
        resources = self._client.get(root).raise_for_status().json()["resources"]
        return next(one["name"] for one in resources if one["kind"] == kind and "/" not in one["name"])


def _params(given: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in (STRICT | given).items() if value}


@contextmanager
def connect(kubeconfig: Path) -> Iterator[ApiServer]:
    """Talk to the API server of a kubeconfig."""
    api = Api(kubeconfig)
    try:
        yield ApiServer(api.client)
    finally:
        api.close()
