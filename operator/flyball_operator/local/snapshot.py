"""How a LocalRunner stands at one moment, as a value and as a table for the terminal."""

import time
from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from flyball_operator.local.replica import State
from flyball_operator.local.reports import Event
from flyball_operator.tuning import Decision, PodEvidence
from flyball_operator.tuning.words import duration
from flyball_protocol import Evidence

NUM_EVENTS = 8
_STYLES = {State.READY: "green", State.BACKOFF: "red", State.UNREADY: "red"}
_COLUMNS = ("#", "State", "Run", "Wait", "KV", "TTFT p95", "ITL p95", "Seqs", "Budget", "KV max", "Rev")


@dataclass(frozen=True)
class ReplicaSnapshot:
    """One replica. ``evidence`` is the last that was read, None before the first time."""

    number: int
    state: State
    in_state_s: float
    message: str
    pid: int | None
    port: int
    outstanding: int
    served: int
    restarts: int
    current: bool
    evidence: PodEvidence | None


@dataclass(frozen=True)
class Snapshot:
    """The deployment. ``decision`` is the slow loop's last, None while tuning is off; ``events`` are in order of time."""

    name: str
    url: str
    model: str
    wanted: int
    replicas: tuple[ReplicaSnapshot, ...]
    decision: Decision | None
    events: tuple[Event, ...]

    @property
    def num_ready(self) -> int:
        return sum(replica.state is State.READY for replica in self.replicas)


def render(snapshot: Snapshot) -> RenderableType:
    """Return the replicas as a table, and the last events.

    Seqs, Budget (tokens a step) and KV max are the limits: the target, or target/effective while they differ.
    """
    title = f"{snapshot.name}  {snapshot.url}  {snapshot.num_ready}/{snapshot.wanted} ready"
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="bold",
        box=None,
        padding=(0, 2, 0, 0),
    )
    for i, column in enumerate(_COLUMNS):
        table.add_column(column, justify="left" if i < 2 else "right", no_wrap=True)
    for replica in snapshot.replicas:
        table.add_row(*_row(replica))
    lines = (
        f"{time.strftime('%H:%M:%S', time.localtime(event.time_s))}  {event.text}"
        for event in snapshot.events[-NUM_EVENTS:]
    )
    return Group(table, Text("\n".join(lines), style="dim"))


def render_list(snapshots: Iterable[Snapshot]) -> RenderableType:
    """Return deployments as a table, one to a row."""
    table = Table("Name", "Model", "Ready", "URL", header_style="bold", box=None, padding=(0, 2, 0, 0))
    for one in snapshots:
        table.add_row(Text(one.name), Text(one.model), f"{one.num_ready}/{one.wanted}", Text(one.url))
    return table


def _row(replica: ReplicaSnapshot) -> list[RenderableType]:
    state = Text(f"{replica.state} {replica.in_state_s:.0f}s", style=_STYLES.get(replica.state, "yellow"))
    evidence = replica.evidence.evidence if replica.evidence and replica.state is State.READY else None
    return [str(replica.number), state, *(_cells(evidence) if evidence else ["-"] * (len(_COLUMNS) - 2))]


def _cells(evidence: Evidence) -> list[str]:
    kv_blocks, target, effective = evidence.kv_blocks, evidence.target, evidence.effective
    return [
        str(evidence.num_running),
        str(evidence.num_waiting),
        f"{kv_blocks.used / kv_blocks.capacity:.0%}" if kv_blocks.capacity else "-",
        _milliseconds(evidence.ttft.p95_s),
        _milliseconds(evidence.itl.p95_s),
        _limit(target.max_num_seqs, effective.max_num_seqs),
        _limit(target.max_num_batched_tokens, effective.max_num_batched_tokens),
        _limit(f"{target.kv_cache_fraction:.0%}", f"{effective.kv_cache_fraction:.0%}"),
        str(evidence.revision),
    ]


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else duration(seconds)


def _limit(target: object, effective: object) -> str:
    return str(target) if target == effective else f"{target}/{effective}"
