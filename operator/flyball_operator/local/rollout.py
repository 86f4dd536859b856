"""Which replicas to start and stop next: a rolling update with maxSurge 1 and maxUnavailable 0. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Seen:
    """A replica that is not on its way out. ``current``: it runs the template that is wanted now."""

    number: int
    current: bool
    ready: bool


@dataclass(frozen=True)
class Start:
    """Start one replica of the current template."""


@dataclass(frozen=True)
class Stop:
    """Drain and end a replica."""

    number: int
    reason: str


def next_actions(wanted: int, seen: Sequence[Seen], *, room: int | None = None) -> list[Start | Stop]:
    """Return what to do now; call again whenever a replica changes.

    Args:
        wanted: replicas that should run.
        room: how many more can be started on this machine; None where nothing limits them.
    """
    stops = list(_stops(wanted, seen, room))
    left = len(seen) - len(stops)
    num_current = sum(replica.current for replica in seen) - sum(_is_current(stop.number, seen) for stop in stops)
    surge = 1 if any(not replica.current for replica in seen) and wanted else 0
    missing = min(wanted - num_current, wanted + surge - left)
    starts = [Start()] * max(0, missing if room is None else min(missing, room))
    return [*stops, *starts]


def _stops(wanted: int, seen: Sequence[Seen], room: int | None) -> Iterator[Stop]:
    old = [replica for replica in seen if not replica.current]
    current = [replica for replica in seen if replica.current]
    for replica in old:
        if not replica.ready:
            yield Stop(replica.number, "out of date, and not ready anyway")
    ready_old = [replica for replica in old if replica.ready]
    spare = len(ready_old) + sum(replica.ready for replica in current) - wanted
    for replica in ready_old[: max(0, spare)]:
        yield Stop(replica.number, "out of date, and another is ready in its place")
    if room == 0 and ready_old and spare <= 0 and len(seen) >= wanted and all(replica.ready for replica in seen):
        yield Stop(ready_old[0].number, "out of date, and this machine has no room for another beside it")
    # Those that are not ready go first, then the youngest.
    by_worth = sorted(current, key=lambda replica: (replica.ready, -replica.number))
    for replica in by_worth[: max(0, len(current) - wanted)]:
        yield Stop(replica.number, "one more than spec.replicas")


def _is_current(number: int, seen: Sequence[Seen]) -> bool:
    return any(replica.number == number and replica.current for replica in seen)
