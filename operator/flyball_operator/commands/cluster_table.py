"""A deployment of a cluster as tables for the terminal. Pure."""

from collections.abc import Iterable, Iterator
from typing import Any

from msgspec import structs
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from flyball_operator.commands.cluster import Found
from flyball_operator.observed import Object, Pod
from flyball_operator.spec import schema
from flyball_operator.status import diagnosis
from flyball_operator.status.tuning import DISABLED, ShownLimits, ShownReplica, TuningStatus
from flyball_protocol.quoting import one_line

_UNITS = {
    "max_num_seqs": " seqs",
    "max_num_batched_tokens": " tokens",
    "kv_cache_percent": "% KV",
    "step_time_target_milliseconds": " ms",
}
_STYLES = {"Ready": "green", "Terminating": "yellow"}


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
        f"{limits.kv_cache_percent}% of the KV cache" + (f", steps of {target_ms} ms" if target_ms is not None else "")
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
