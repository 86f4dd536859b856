"""What tuning did to a deployment, in plain words and with a small chart. Pure."""

import re
from collections.abc import Iterator, Sequence

from msgspec import Struct
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from flyball_operator.observed import Object
from flyball_operator.spec import Objectives, schema
from flyball_operator.status.tuning import (
    MEANINGS,
    MadeDecision,
    ShownCapacity,
    ShownDecision,
    ShownForecast,
    ShownLimits,
    ShownMove,
    State,
    TuningStatus,
    report,
)
from flyball_operator.tuning.loop import Round
from flyball_operator.tuning.record import DecisionRecord
from flyball_operator.tuning.signals import BUDGET
from flyball_operator.tuning.words import duration, short
from flyball_protocol.quoting import one_line

MAX_SHOWN = 10
MAX_COLUMNS = 24
"""Of a chart, so that it fits into 80 characters with its words and figures."""

MAX_MESSAGE_CHARS = 2000

BLOCKS, PLAIN_BLOCKS = "▁▂▃▄▅▆▇█", "_.-:=+*#"

WORDS = {
    "made": ("Changed", "at every replica", "cyan"),
    "tried": ("Tried", "at one replica", "yellow"),
    "kept": ("Kept", "and given to every replica", "green"),
    "reverted": ("Taken back", "", "red"),
    "settled": ("Settled", "and kept without a lease", "green"),
    "restored": ("Restored", "at every replica", "cyan"),
    "recommended": ("Recommended", "and not made", "cyan"),
    "held": ("Held", "", "dim"),
}
LIMITS = {
    "maxNumSeqs": ("running sequences", ""),
    "maxNumBatchedTokens": ("tokens a step", ""),
    "kvCachePercent": ("KV cache", " %"),
    "stepTimeTargetMilliseconds": ("step time target", " ms"),
}
"""By name in spec.tuning.limits: what it is, and its unit."""

OBJECTIVES = {"ttft": "TTFT", "interTokenLatency": "inter-token latency"}
BECAUSE = {
    "OutOfBounds": "The spec's bounds or the envelope say so",
    "OutOfStep": "A replica had other limits",
    "StepTargetPlanned": "The replicas have learned how long steps take",
    "StepTargetTooShort": "Hardly any step could be that short",
    "RoomToSpare": "Requests waited, and there was room",
    "SLOInfeasible": "No limits can meet the objectives",
    "MemoryPressure": "Memory is short",
    "InterTokenLatencyOver": "Tokens came too slowly",
    "Preempting": "Too much computed work was thrown away",
    "TTFTOver": "First tokens came too late",
    "KVBlocked": "The KV cache held requests back",
    "KVUnused": "The KV cache was larger than needed",
    "Settled": "The limits have served well",
    "CanaryGained": "The replica gained what was predicted",
    "CanaryGainedNothing": "The replica gained too little",
    "CanaryWorse": "The replica did worse than the others",
    "CanaryRestarted": "The replica lost the change",
    "CanaryUnjudged": "The replica could not be judged in time",
    "WorseThanBefore": "It was better before",
    "TuningOff": "Tuning was turned off",
    "SpecLimits": "The spec sets it",
}
"""Reasons that limits are changed for, in words; the others are told by their sentence alone."""

_MOVES = re.compile(r"(\w+ \S+( m?s)? -> \S+( m?s)?, )*\w+ \S+( m?s)? -> \S+( m?s)?: ")


class Explanation(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """What there is to tell.

    Attributes:
        decisions: oldest first; on this machine those are among them that changed nothing.
        last: the last decision that was a change or brought another state.
    """

    name: str
    mode: str
    objectives: Objectives
    state: State
    revision: int
    effective: ShownLimits | None = None
    capacity: ShownCapacity | None = None
    recommended: ShownLimits | None = None
    last: ShownDecision | None = None
    decisions: tuple[MadeDecision, ...] = ()


def of_status(deployment: Object) -> Explanation:
    """Return what an LLMDeployment of a cluster tells."""
    metadata, tuning = deployment["metadata"], schema.with_defaults(deployment["spec"])["tuning"]
    objectives = tuning.get("objectives", {})
    known = TuningStatus.from_object(deployment.get("status", {}).get("tuning", {})) or TuningStatus(state="Observing")
    return Explanation(
        name=f"{metadata['namespace']}/{metadata['name']}",
        mode=tuning["mode"],
        objectives=Objectives(
            ttft_p95_milliseconds=objectives.get("ttftP95Milliseconds"),
            inter_token_latency_p95_milliseconds=objectives.get("interTokenLatencyP95Milliseconds"),
        ),
        state=known.state,
        revision=known.revision,
        effective=known.effective,
        capacity=known.capacity,
        recommended=known.recommended,
        last=known.last_decision,
        decisions=known.decisions[::-1],
    )


def of_records(name: str, records: Sequence[DecisionRecord]) -> Explanation:
    """Return what the records of at least one round tell; they come oldest first."""
    newest = records[-1]
    known = report(None, newest.tuning, _round(newest), newest.time).status
    return Explanation(
        name=name,
        mode=newest.tuning.mode,
        objectives=newest.tuning.objectives,
        state=known.state,
        revision=known.revision,
        effective=known.effective,
        capacity=known.capacity,
        recommended=known.recommended,
        last=known.last_decision,
        decisions=tuple(MadeDecision.of(one.tuning, _round(one), one.time) for one in records),
    )


def _round(record: DecisionRecord) -> Round:
    return Round(record.evidence, record.decision, (), True)


def render(found: Explanation, *, plain: bool = False) -> RenderableType:
    """Return title, charts, what was done, and what stands. Texts are cut, and hold no control characters.

    Args:
        plain: draw with ASCII alone.
    """
    title = Text(one_line(f"{found.name}  tuning {found.mode}, {found.state}, revision {found.revision}"), style="bold")
    if found.mode == "Disabled" and not found.decisions:
        return Group(title, "Tuning is disabled, so no limit is moved; spec.tuning.mode turns it on.")
    made = [one for one in found.decisions if one.verdict != "held"]
    done = [line for one in made[-MAX_SHOWN:] for line in _decision(one)] or [Text("  Nothing was changed yet.")]
    return Group(
        title, *_charts(found, PLAIN_BLOCKS if plain else BLOCKS), "", _heading("What was done"), *done, *_now(found)
    )


def _decision(one: MadeDecision) -> Iterator[RenderableType]:
    word, where, style = WORDS.get(one.verdict, (one.verdict, "", ""))
    moves = ", ".join(map(_move, one.moves)) or "limits"
    line = Text(f"  {_clock(one.time)}  ")
    line.append(word, style=style).append(one_line(f" {moves} {where}".rstrip()))
    yield line
    yield _indented(f"{_because(one.reason)}: {_MOVES.sub('', one.message, count=1)}")
    if one.forecast is not None:
        yield _indented(_forecast(one.forecast))


def _because(reason: str) -> str:
    return f"{BECAUSE[reason]} ({reason})" if reason in BECAUSE else reason


def _forecast(forecast: ShownForecast) -> str:
    """Return what was predicted, and what came."""
    what = OBJECTIVES.get(forecast.objective, forecast.objective)
    predicted = f"{forecast.before_per_mille / 10:g} % -> {forecast.predicted_per_mille / 10:g} % over"
    came = "" if forecast.observed_per_mille is None else f"; came: {forecast.observed_per_mille / 10:g} %"
    return f"Predicted for {what}: {predicted}{came}"


def _move(move: ShownMove) -> str:
    what, _ = LIMITS.get(move.limit, (move.limit, ""))
    before, after = ("none" if value is None else _value(move.limit, value) for value in (move.before, move.after))
    return f"{what} {before} -> {after}"


def _value(limit: str, value: float) -> str:
    _, unit = LIMITS.get(limit, (limit, ""))
    return duration(value / 1000) if unit == " ms" else f"{short(value)}{unit}"


def _now(found: Explanation) -> Iterator[RenderableType]:
    yield ""
    yield _heading("What stands")
    yield _indented(f"{found.state}: {MEANINGS.get(found.state, 'evidence is missing or contradictory')}.")
    if found.last is not None:
        yield _indented(f"{_clock(found.last.time)}  {found.last.reason}: {found.last.message}")
    if found.capacity is not None:
        yield _indented(_capacity(found.capacity))
    if found.recommended is not None:
        yield _indented(f"Mode Auto would change {_differences(found.effective, found.recommended)}.")


def _capacity(capacity: ShownCapacity) -> str:
    can, comes, free = capacity.requests_per_minute, capacity.arrivals_per_minute, capacity.headroom_percent
    return (
        f"A replica can serve about {can} requests a minute within the objectives and gets {comes}; {free} % are free."
    )


def _differences(present: ShownLimits | None, other: ShownLimits) -> str:
    """Return what the other limits change, in words."""
    before = {} if present is None else present.in_spec
    moves = (ShownMove(limit=name, before=before.get(name), after=value) for name, value in other.in_spec.items())
    return ", ".join(_move(move) for move in moves if move.before != move.after) or "nothing"


def _charts(found: Explanation, blocks: str) -> Iterator[RenderableType]:
    """Yield a line for each objective and each limit, with a column for each decision."""
    shown = found.decisions[-MAX_COLUMNS:]
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for _ in range(3):
        table.add_column(no_wrap=True)
    for row in (*_objective_rows(found, shown, blocks), *_limit_rows(found, shown, blocks)):
        table.add_row(*row)
    if shown and table.row_count:
        yield ""
        yield table
        yield Text(
            f"  a column for each decision from {_clock(shown[0].time)} to {_clock(shown[-1].time)}\n"
            f"  the budget is {BUDGET:.0%} of the samples over an objective",
            style="dim",
        )


def _objective_rows(
    found: Explanation, shown: Sequence[MadeDecision], blocks: str
) -> Iterator[tuple[RenderableType, ...]]:
    budget = 1000 * BUDGET
    posed = (
        ("TTFT", found.objectives.ttft_p95_milliseconds, [one.over_per_mille.ttft for one in shown]),
        (
            "inter-token latency",
            found.objectives.inter_token_latency_p95_milliseconds,
            [one.over_per_mille.inter_token_latency for one in shown],
        ),
    )
    for what, objective_ms, shares in posed:
        known = [share for share in shares if share is not None]
        if objective_ms is not None and known:
            chart = Text(_sparkline(shares, 0, max(2 * budget, *known), blocks))
            for i, share in enumerate(shares):
                chart.stylize("red" if share is not None and share > budget else "green", i, i + 1)
            last = f"{known[-1] / 10:g} % over {objective_ms} ms"
            yield f"  {what}", chart, Text(last, style="red" if known[-1] > budget else "green")


def _limit_rows(found: Explanation, shown: Sequence[MadeDecision], blocks: str) -> Iterator[tuple[RenderableType, ...]]:
    for name, (what, _) in LIMITS.items():
        values = [None if one.limits is None else one.limits.in_spec[name] for one in shown]
        known = [value for value in values if value is not None]
        if known:
            low, high = min(known), max(known)
            span = "" if low == high else f" ({_value(name, low)} to {_value(name, high)})"
            yield f"  {what}", Text(_sparkline(values, 0, high, blocks), style="cyan"), _value(name, known[-1]) + span


def _sparkline(values: Sequence[float | None], low: float, high: float, blocks: str) -> str:
    """Return a character for each value; a space for None."""
    top = len(blocks) - 1
    return "".join(" " if value is None else blocks[round(top * (value - low) / (high - low))] for value in values)


def _heading(text: str) -> Text:
    return Text(text, style="bold")


def _indented(text: str) -> RenderableType:
    table = Table(box=None, show_header=False, padding=(0, 0, 0, 4))
    table.add_column(overflow="fold")
    table.add_row(Text(one_line(text, max_chars=MAX_MESSAGE_CHARS)))
    return table


def _clock(time: str) -> str:
    """Return ``2026-01-01 10:02:11`` of an RFC 3339 time in UTC."""
    return one_line(time[:19].replace("T", " "))
