"""What commands read of a cluster. Nothing is written."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from msgspec import Struct

from flyball_operator import names
from flyball_operator.cluster.api import LLM_DEPLOYMENT, POD, ApiError
from flyball_operator.cluster.client import Client
from flyball_operator.cluster.connection import Connection
from flyball_operator.cluster.monitoring import Metrics
from flyball_operator.errors import OperatorError
from flyball_operator.observed import Object
from flyball_protocol.quoting import one_line

DEFAULT_NAMESPACE = "default"
MAX_LINE_BYTES = 1 << 20
"""A longer line is printed in parts."""


class Found(Struct, frozen=True):
    """An LLMDeployment and the pods that carry its label, as the API server has them."""

    deployment: Object
    pods: list[Object]


async def find(name: str, namespace: str | None, context: str | None) -> Found:
    """Return a deployment. Raises ClusterError when there is none, or when it may not be read."""
    async with _connect(context) as (client, default):
        return await _find(client, namespace or default, name)


async def find_all(namespace: str | None, context: str | None, *, everywhere: bool) -> list[Object]:
    """Return the deployments of a namespace, or of all of them. Raises ClusterError when they may not be read."""
    async with _connect(context) as (client, default):
        pages = client.pages(LLM_DEPLOYMENT, None if everywhere else namespace or default)
        return [item async for page in pages for item in page.items]


async def find_tables(namespace: str | None, context: str | None, *, everywhere: bool) -> list[Object]:
    """Return what ``kubectl get llmdeployments`` prints, as objects of the kind Table. Raises ClusterError."""
    async with _connect(context) as (client, default):
        return [table async for table in client.tables(LLM_DEPLOYMENT, None if everywhere else namespace or default)]


async def print_logs(
    name: str,
    namespace: str | None,
    context: str | None,
    *,
    tail: int,
    follow: bool,
    previous: bool,
    echo: Callable[[str, str], None],
) -> int:
    """Give ``echo`` the name of a pod and a line of its runtime's log; returns how many pods gave theirs.

    A pod that has no log yet, or no previous one, is named on standard error. With ``follow``, ends when the containers do.

    Raises:
        OperatorError: there is no such deployment, it has no pods, or the API server does not answer.
    """

    async def print_one(pod: str) -> bool:
        pieces = client.log(space, pod, container=names.RUNTIME_CONTAINER, tail=tail, follow=follow, previous=previous)
        try:
            async for line in _lines(pieces):
                echo(pod, line)
        except ApiError as error:
            print(f"{pod}: {one_line(error.message)}", file=sys.stderr)
            return False
        return True

    async with _connect(context) as (client, default):
        space = namespace or default
        pods = [pod["metadata"]["name"] for pod in (await _find(client, space, name)).pods]
        if not pods:
            raise OperatorError(f"{space}/{name} has no pods; `flyball status {name} -n {space}` says why")
        if follow:
            return sum(await asyncio.gather(*map(print_one, pods)))
        return sum([await print_one(pod) for pod in pods])


@asynccontextmanager
async def _connect(context: str | None) -> AsyncIterator[tuple[Client, str]]:
    """Yield a client, and the namespace that is meant where none is named."""
    connection = await Connection.find(Metrics(), context)
    try:
        yield Client(connection), connection.namespace or DEFAULT_NAMESPACE
    finally:
        await connection.close()


async def _find(client: Client, namespace: str, name: str) -> Found:
    deployment = await client.get(LLM_DEPLOYMENT, namespace, name)
    labels = ",".join(f"{label}={value}" for label, value in names.selector_labels(name).items())
    pods = [pod async for page in client.pages(POD, namespace, labels=labels) for pod in page.items]
    return Found(deployment, sorted(pods, key=lambda pod: str(pod["metadata"]["name"])))


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[str]:
    rest = b""
    async for piece in pieces:
        *complete, rest = (rest + piece).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            complete, rest = [*complete, rest], b""
        for line in complete:
            yield line.decode("utf-8", "replace")
    if rest:
        yield rest.decode("utf-8", "replace")
