"""A deployment on a cluster: what commands read of it, and its tables for the terminal. Nothing is written."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Any

from msgspec import Struct, structs
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from flyball_operator import names
from flyball_operator.cluster.api_server import LLM_DEPLOYMENT, POD, ApiError
from flyball_operator.cluster.client import Client
from flyball_operator.cluster.connection import Connection
from flyball_operator.cluster.monitoring import Metrics
from flyball_operator.errors import OperatorError
from flyball_operator.observed import Object, Pod
from flyball_operator.spec import schema
from flyball_operator.status import diagnosis
from flyball_operator.status.tuning import DISABLED, ShownLimits, ShownReplica, TuningStatus
from flyball_operator.tuning.words import duration
from flyball_protocol.quoting import one_line

DEFAULT_NAMESPACE = "default"
MAX_LINE_BYTES = 1 << 20
"""A longer line is printed in parts."""

_UNITS = {
    "max_num_seqs": " seqs",
    "max_num_batched_tokens": " tokens",
    "kv_cache_percent": "% KV",
    "step_time_target_milliseconds": " ms",
}
_STYLES = {"Ready": "green", "Terminating": "yellow"}


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


def render(found: Found) -> RenderableType:
    """Return title, conditions, tuning and pods. Texts of the API server are cut, and hold no control characters."""
    metadata, status = found.deployment["metadata"], found.deployment.get("status", {})
    accelerator = schema.with_defaults(found.deployment["spec"])["accelerator"]["resourceName"]
    wanted = found.deployment["spec"].get("replicas", 1)
    title = f"{metadata['namespace']}/{metadata['name']}  {status.get('url', '-')}  "
    title += f"{status.get('readyReplicas', 0)}/{wanted} ready"
    return Group(
        Text(one_line(title), style="bold"),
        "",
        _table(("Condition", "Status", "Reason", "Message"), map(_condition, status.get("conditions", []))),
        *_tuning(status.get("tuning", {})),
        "",
        _table(("Pod", "State", "Restarts", "Node"), (_pod(Pod.of(pod), accelerator) for pod in found.pods)),
    )


def render_list(tables: list[Object], *, with_namespace: bool) -> RenderableType | None:
    """Return the tables of an API server as one, as ``kubectl get`` shows them; None where they have no rows."""
    rows = [row for page in tables for row in page["rows"]]
    if not rows:
        return None
    columns = [
        (i, column["name"]) for i, column in enumerate(tables[0]["columnDefinitions"]) if column["priority"] == 0
    ]
    header = (*(("Namespace",) if with_namespace else ()), *(name for _, name in columns))

    def cells(row: Object) -> list[Text]:
        namespace = [row["object"]["metadata"]["namespace"]] if with_namespace else []
        shown = (row["cells"][i] for i, _ in columns)
        return [Text(one_line("" if cell is None else str(cell))) for cell in (*namespace, *shown)]

    return _table(header, map(cells, rows))


def _table(header: tuple[str, ...], rows: Iterable[list[Text]]) -> Table:
    table = Table(header_style="bold", box=None, padding=(0, 2, 0, 0))
    for i, column in enumerate(header):
        table.add_column(column, overflow="fold", no_wrap=i < 2)
    for row in rows:
        table.add_row(*row)
    return table


def _condition(condition: dict[str, Any]) -> list[Text]:
    return [Text(one_line(str(condition.get(key, "")))) for key in ("type", "status", "reason", "message")]


def _tuning(status: dict[str, Any]) -> Iterator[RenderableType]:
    known = TuningStatus.from_object(status)
    if known is None or known == DISABLED:
        return
    yield ""
    yield Text(f"Tuning  {known.state}, revision {known.revision}", style="bold")
    for what, limits in (("target", known.target), ("effective", known.effective), ("recommended", known.recommended)):
        if limits is not None:
            yield Text(f"  {what}: {_limits(limits)}")
    for replica in known.replicas:
        yield Text(_short(replica))
    if (last := known.last_decision) is not None:
        yield Text(one_line(f"  {last.time}  {last.action} ({last.reason}): {last.message}", max_chars=2000))


def _limits(limits: ShownLimits) -> str:
    target_ms = limits.step_time_target_milliseconds
    return (
        f"{limits.max_num_seqs} sequences, {limits.max_num_batched_tokens} tokens a step, "
        f"{limits.kv_cache_percent}% of the KV cache"
        + (f", steps of {duration(target_ms / 1000)}" if target_ms is not None else "")
    )


def _short(replica: ShownReplica) -> str:
    """Return the limits of a replica; as target/effective where these differ."""
    target, effective = (structs.asdict(one) for one in (replica.target, replica.effective))
    values = [
        f"{target[name]}{unit}" if target[name] == effective[name] else f"{target[name]}/{effective[name]}{unit}"
        for name, unit in _UNITS.items()
        if target[name] is not None
    ]
    return one_line(f"  {replica.name}: {', '.join(values)} (revision {replica.revision})")


def _pod(pod: Pod, accelerator: str) -> list[Text]:
    found = diagnosis.of_pod(pod, accelerator)
    state = "Terminating" if pod.deleting else found.reason if found else "Ready" if pod.ready else pod.phase
    return [
        Text(pod.name),
        Text(one_line(state), style=_STYLES.get(state, "red" if found is not None and found.failing else "yellow")),
        Text(str(pod.restarts)),
        Text(one_line(pod.node or "-")),
    ]
