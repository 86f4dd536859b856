"""Calls to the Kubernetes API: plain dicts in and out, errors with types, server-side apply.

Watches and calls share credentials and counters. docs/decisions.md says why these are not the calls of the package
``kubernetes``.
"""

import json
import math
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import aiohttp

from flyball_operator.cluster.api_server import (
    ACCESS_REVIEW,
    POD,
    ApiCall,
    Kind,
    NoObject,
    NotFound,
    Unreachable,
    from_answer,
)
from flyball_operator.cluster.connection import Connection
from flyball_operator.observed import Object

FIELD_MANAGER = "flyball-operator"
TIMEOUT_S = 15.0
PAGE_SIZE = 200
_APPLY = "application/apply-patch+yaml"  # JSON is YAML
_MERGE = "application/merge-patch+json"
_JSON = "application/json"
_TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io"


@dataclass(frozen=True)
class Page:
    """A part of a list. All pages of one list carry the same ``resource_version``."""

    items: list[Object]
    resource_version: str


class Client:
    """Every method raises a ClusterError when the call fails; none of them tries again.

    Args:
        time_to_write: called before each write; returns for how many seconds it may take at most, or raises.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        timeout_s: float = TIMEOUT_S,
        time_to_write: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self._connection = connection
        self._timeout_s = timeout_s
        self._time_to_write = time_to_write

    async def get(self, kind: Kind, namespace: str, name: str) -> Object:
        return await self._call("GET", kind, "get", namespace, name)

    async def find(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """Return the object, None where there is none."""
        try:
            return await self.get(kind, namespace, name)
        except NotFound:
            return None

    async def pages(self, kind: Kind, namespace: str | None, *, labels: str = "") -> AsyncIterator[Page]:
        """List a kind, in one namespace or in all of them."""
        async for body in self._list(kind, namespace, labels=labels):
            for item in body["items"]:  # inside a list they do not say what they are
                item.update(apiVersion=kind.api_version, kind=kind.kind)
            yield Page(body["items"], body["metadata"]["resourceVersion"])

    async def tables(self, kind: Kind, namespace: str | None) -> AsyncIterator[Object]:
        """List a kind as what ``kubectl get`` prints: objects of the kind Table, one per page."""
        async for body in self._list(kind, namespace, accept=_TABLE):
            yield body

    async def _list(
        self, kind: Kind, namespace: str | None, *, labels: str = "", accept: str = _JSON
    ) -> AsyncIterator[Object]:
        params = {"limit": str(PAGE_SIZE)} | ({"labelSelector": labels} if labels else {})
        while True:
            body = await self._call("GET", kind, "list", namespace, params=params, accept=accept)
            yield body
            if not body["metadata"].get("continue"):
                return
            params["continue"] = body["metadata"]["continue"]

    async def create(self, kind: Kind, obj: Object) -> Object:
        """POST an object, of a namespace or of none."""
        namespace = obj["metadata"].get("namespace")
        return await self._call("POST", kind, "create", namespace, params={"fieldManager": FIELD_MANAGER}, body=obj)

    async def replace(self, kind: Kind, obj: Object) -> Object:
        """PUT an object; with a resourceVersion in it only if nobody changed it since."""
        metadata = obj["metadata"]
        return await self._call("PUT", kind, "update", metadata["namespace"], metadata["name"], body=obj)

    async def apply(self, kind: Kind, obj: Object, *, force: bool, subresource: str = "") -> Object:
        """Server-side apply. A uid in the metadata makes sure that it changes that object and creates none.

        Args:
            force: take over fields that others have set; otherwise they make it a Conflict.
        """
        metadata = obj["metadata"]
        params = {"fieldManager": FIELD_MANAGER, "force": str(force).lower(), "fieldValidation": "Strict"}
        return await self._call(
            "PATCH", kind, "patch", metadata["namespace"], metadata["name"], subresource, params, obj, _APPLY
        )

    async def merge(self, kind: Kind, namespace: str, name: str, change: Object) -> Object:
        """Apply a JSON merge patch."""
        return await self._call("PATCH", kind, "patch", namespace, name, body=change, content_type=_MERGE)

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str) -> None:
        """Delete the object with this uid, and what it owns in the background. One that is gone already is fine."""
        options = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        try:
            await self._call("DELETE", kind, "delete", namespace, name, body=options)
        except NotFound:
            return

    async def log(
        self, namespace: str, pod: str, *, container: str, tail: int, follow: bool = False, previous: bool = False
    ) -> AsyncIterator[bytes]:
        """Yield the log of a container in pieces of any length.

        Args:
            tail: how many of the last lines to begin with.
            follow: go on with what the container writes, until it ends.
            previous: of the container before its last restart.
        """
        call = ApiCall("get", f"{POD.resource}/log", f"{namespace}/{pod}")
        wanted = {"container": container, "tailLines": tail, "follow": follow, "previous": previous}
        params = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in wanted.items()}
        read_s = None if follow else self._timeout_s
        timeout = aiohttp.ClientTimeout(sock_connect=self._timeout_s, sock_read=read_s)
        url = f"{self._connection.server}{POD.path(namespace, pod, 'log')}"
        try:
            async with self._connection.session.get(url, params=params, timeout=timeout) as response:
                if response.status >= 400:
                    raise from_answer(call, response.status, await _read(call, response), response.headers)
                async for piece in response.content.iter_any():
                    yield piece
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise Unreachable(call, error) from error

    async def serves(self, kind: Kind) -> bool:
        """Return whether the API server knows the kind."""
        path = kind.path().rpartition("/")[0]
        try:
            found = await self._request("GET", path, ApiCall("get", "discovery", path))
        except NotFound:
            return False
        return any(resource["name"] == kind.plural for resource in found["resources"])

    async def _call(
        self,
        method: str,
        kind: Kind,
        verb: str,
        namespace: str | None = None,
        name: str = "",
        subresource: str = "",
        params: dict[str, str] | None = None,
        body: Object | None = None,
        content_type: str = _JSON,
        accept: str = _JSON,
    ) -> Object:
        target = "/".join(part for part in (namespace, name) if part)
        resource = "/".join(part for part in (kind.resource, subresource) if part)
        path = kind.path(namespace, name, subresource)
        return await self._request(method, path, ApiCall(verb, resource, target), params, body, content_type, accept)

    async def _request(
        self,
        method: str,
        path: str,
        call: ApiCall,
        params: dict[str, str] | None = None,
        body: Object | None = None,
        content_type: str = _JSON,
        accept: str = _JSON,
    ) -> Object:
        url = f"{self._connection.server}{path}"
        data = None if body is None else json.dumps(body).encode()
        headers = {"Accept": accept, "Content-Type": content_type}
        timeout_s = self._timeout_s if method == "GET" else min(self._timeout_s, self._time_to_write())
        # aiohttp would round longer ones up to the next second.
        timeout = aiohttp.ClientTimeout(total=timeout_s, ceil_threshold=math.inf)
        try:
            async with self._connection.session.request(
                method, url, params=params, data=data, headers=headers, timeout=timeout
            ) as response:
                answer = await _read(call, response)
                if response.status >= 400:
                    raise from_answer(call, response.status, answer, response.headers)
                return answer
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise Unreachable(call, error) from error


async def _read(call: ApiCall, response: aiohttp.ClientResponse) -> dict[str, Any]:
    """Return the body as JSON. A proxy's error page becomes a message; a proxy's page in the place of an object, an error."""
    content = await response.read()
    try:
        body = json.loads(content)
    except ValueError:
        body = None
    if isinstance(body, dict):
        return body
    text = content[:500].decode("utf-8", "replace").strip() or response.reason or "no message"
    if response.status < 400:
        raise NoObject(call, text)
    return {"message": text}


class Right(NamedTuple):
    """A verb on a kind, in one namespace or (None) in all."""

    verb: str
    kind: Kind
    namespace: str | None

    def __str__(self) -> str:
        where = f"in namespace {self.namespace}" if self.namespace else "in all namespaces"
        return f"{self.verb} {self.kind.resource} {where}"


def rights_to_watch(kinds: Sequence[Kind], namespaces: Sequence[str | None]) -> list[Right]:
    """Return what has to be allowed before watching makes sense."""
    return [Right(verb, kind, namespace) for kind in kinds for namespace in namespaces for verb in ("list", "watch")]


async def is_allowed(client: Client, right: Right) -> bool:
    """Return whether the operator has a right. Everybody may ask this about himself."""
    asked = {
        "verb": right.verb,
        "group": right.kind.group,
        "resource": right.kind.plural,
        "namespace": right.namespace or "",
    }
    review = {
        "apiVersion": ACCESS_REVIEW.api_version,
        "kind": ACCESS_REVIEW.kind,
        "metadata": {},
        "spec": {"resourceAttributes": asked},
    }
    answer = await client.create(ACCESS_REVIEW, review)
    return bool(answer["status"]["allowed"])
