"""Evidence and histograms against the plain definition, over a list of all that happened."""

import math
import subprocess
import sys
from bisect import bisect_left
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flyball_protocol import LatencyWindow, LimitsReport
from flyball_runtime.core.clock import FakeClock
from flyball_runtime.core.measurements import LATENCY_EDGES_S, Measurements, RequestTimes
from runtime.fake_engine import ENVELOPE, LIMITS, step_stats

REPORT = LimitsReport(revision=2, target=LIMITS, effective=LIMITS, envelope=ENVELOPE, last_known_good=LIMITS)


@dataclass
class Definition:
    """Every sample, with its name and its time."""

    samples: list[tuple[str, float, float]] = field(default_factory=list)
    first_s: dict[int, float] = field(default_factory=dict)
    last_s: dict[int, float] = field(default_factory=dict)

    def tokens(self, now: float, request: int, arrival_s: float, count: int) -> None:
        if request in self.last_s:
            self.samples += [("itl", now, (now - self.last_s[request]) / count)] * count
        else:
            self.samples += [("ttft", now, now - arrival_s), ("prompt_tokens", now, 7)]
            self.first_s[request] = now
        self.samples.append(("generated", now, count))
        self.last_s[request] = now

    def values(self, name: str, now: float = math.inf) -> list[float]:
        """Values since the start, or of the window that ends at ``now``."""
        since = -math.inf if now == math.inf else int(now) - 60
        return [value for one, when, value in self.samples if one == name and int(when) > since]

    def window(self, name: str, now: float) -> LatencyWindow:
        values = sorted(self.values(name, now))
        p50, p95, p99 = (values[math.ceil(q * len(values)) - 1] if values else None for q in (0.5, 0.95, 0.99))
        return LatencyWindow(
            count=len(values),
            p50_s=p50,
            p95_s=p95,
            p99_s=p99,
            edges_s=LATENCY_EDGES_S,
            counts=tuple(buckets(values)),
        )


def buckets(values: list[float]) -> list[int]:
    places = [bisect_left(LATENCY_EDGES_S, value) for value in values]
    return [places.count(place) for place in range(len(LATENCY_EDGES_S) + 1)]


EVENT = st.tuples(st.floats(0, 15), st.lists(st.integers(0, 4), unique=True), st.integers(1, 3), st.booleans())


@settings(deadline=None, max_examples=60)
@given(events=st.lists(EVENT, max_size=30), at_once=st.booleans(), read=st.booleans())
def test_equals_its_definition(events: list[tuple[float, list[int], int, bool]], at_once: bool, read: bool) -> None:
    """Tokens of a step told in one call or one by one, with reads in between or none; samples fewer than are kept."""
    clock = FakeClock(1000.0)
    measured, plain = Measurements(clock), Definition()
    measured.step(step_stats())
    requests = {index: RequestTimes(1000.0, 7) for index in range(5)}
    for gap_s, indices, count, is_end in events:
        clock.advance(gap_s)
        now = clock.now()
        batch = [requests[index] for index in indices]
        for part in [batch] if at_once else [[one] for one in batch]:
            measured.tokens(part, count)
        for index in indices:
            plain.tokens(now, index, requests[index].arrival_s, count)
        measured.step(step_stats(num_tokens=1, duration_s=gap_s, num_preemptions=count))
        plain.samples += [("step", now, gap_s), ("preemptions", now, count)]
        if is_end and indices:
            measured.ended(requests[indices[0]], "stop", 9)
            plain.samples.append(("e2e", now, now - requests[indices[0]].arrival_s))
        if read:
            measured.evidence("m", REPORT, key="m/f32/cpu/1", ready=True, draining=False)
    now = clock.now()
    evidence = measured.evidence("m", REPORT, key="m/f32/cpu/1", ready=True, draining=False)
    for name in ("ttft", "itl", "e2e"):
        assert getattr(evidence, name) == plain.window(name, now)
        counts, total = getattr(measured, name).totals()
        assert counts == buckets(plain.values(name)) and total == pytest.approx(sum(plain.values(name)))
    steps = plain.window("step", now)
    assert (evidence.num_steps, evidence.step_time_p50_s, evidence.step_time_p95_s) == (
        steps.count,
        steps.p50_s,
        steps.p95_s,
    )
    assert evidence.num_prompt_tokens == sum(plain.values("prompt_tokens", now))
    assert evidence.num_generated_tokens == sum(plain.values("generated", now))
    assert evidence.num_preemptions == sum(plain.values("preemptions", now))
    assert evidence.num_finished == len(plain.values("e2e", now))
    assert evidence.uptime_s == now - 1000.0


def test_needs_neither_a_server_nor_torch() -> None:
    """A simulator measures with it."""
    program = (
        "import sys, flyball_runtime.core.measurements\n"
        "print({'torch', 'fastapi', 'prometheus_client', 'asyncio'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "set()\n"


def test_demand_counts_what_was_accepted_and_what_found_the_queue_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYBALL_TEMPLATE", "t7")
    clock = FakeClock(1000.0)
    measured = Measurements(clock)
    measured.step(step_stats())
    measured.arrived(3)
    measured.rejected("queue_full")
    measured.rejected("prompt_too_long")
    evidence = measured.evidence("m", REPORT, key="k", ready=True, draining=False)
    assert (evidence.num_arrived, evidence.template, evidence.key) == (4, "t7", "k")
    assert evidence.boot_id == measured.boot_id != Measurements(clock).boot_id
    assert (evidence.step_model, evidence.lengths, evidence.objective_counts, evidence.memory) == (None,) * 4
    clock.advance(61)
    assert measured.evidence("m", REPORT, key="k", ready=True, draining=False).num_arrived == 0
