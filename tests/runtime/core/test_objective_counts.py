"""Counts against objectives, held to their definition over a list of all that happened."""

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flyball_protocol import LimitsReport, ObjectiveCounts, Objectives, Share
from flyball_runtime.core.clock import FakeClock
from flyball_runtime.core.measurements import Measurements, RequestTimes
from runtime.fake_engine import ENVELOPE, LIMITS, step_stats

REPORT = LimitsReport(revision=2, target=LIMITS, effective=LIMITS, envelope=ENVELOPE, last_known_good=LIMITS)
TAU = 0.05
OBJECTIVES = Objectives(ttft_s=1.0, itl_s=TAU)


def counted(measured: Measurements) -> ObjectiveCounts | None:
    return measured.evidence("m", REPORT, key="k", ready=True, draining=False).objective_counts


def share(values: list[float], most: float) -> Share:
    return Share(num=len(values), num_over=sum(value > most for value in values))


@dataclass
class Definition:
    ttft: list[float] = field(default_factory=list)
    gaps: dict[int, list[float]] = field(default_factory=dict)
    steps: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)


STEP = st.tuples(st.sampled_from([0.01, 0.049, 0.05, 0.051, 0.2]), st.sets(st.integers(0, 5)), st.booleans())


@settings(deadline=None, max_examples=80)
@given(steps=st.lists(STEP, max_size=40), at_once=st.booleans())
def test_equals_its_definition(steps: list[tuple[float, set[int], bool]], at_once: bool):
    """The tokens of a step told in one call, as a simulator does, or one by one, as the API process does."""
    clock, plain = FakeClock(1000.0), Definition()
    measured = Measurements(clock)
    measured.count_against(OBJECTIVES)
    measured.step(step_stats())
    requests = {index: RequestTimes(1000.0, 7) for index in range(6)}
    last: dict[int, float] = {}
    for gap_s, indices, is_end in steps:
        clock.advance(gap_s)
        now = clock.now()
        measured.step(step_stats(num_tokens=1))
        batch = [requests[index] for index in sorted(indices)]
        for part in [batch] if at_once else [[one] for one in batch]:
            measured.tokens(part)
        found = []
        for index in sorted(indices):
            if index in last:
                found.append(now - last[index])
                plain.gaps[index].append(found[-1])
            else:
                plain.ttft.append(now - requests[index].arrival_s)
                plain.gaps[index] = []
            last[index] = now
        plain.steps += [max(found)] if found else []
        if is_end and indices:
            index = min(indices)
            measured.ended(requests[index], "stop", len(plain.gaps[index]) + 1)
            own = sorted(plain.gaps[index])
            plain.itl += own[math.ceil(0.95 * len(own)) - 1 : math.ceil(0.95 * len(own))]
            requests[index] = RequestTimes(now, 7)
            del last[index]
            plain.steps += []
    measured.step(step_stats())
    counts = counted(measured)
    assert counts is not None and counts.since_s == clock.now() - 1000.0
    assert counts.ttft == share(plain.ttft, 1.0)
    assert counts.itl == share(plain.itl, TAU)
    assert counts.steps == share(plain.steps, TAU)
    assert counts.gaps.num >= sum(map(len, plain.gaps.values()))


def test_gaps_between_two_bucket_edges_are_told_apart():
    """52 +- 1 ms under an objective of 60 ms are within it; a histogram with edges at 50 and 75 ms cannot tell."""
    clock = FakeClock()
    measured = Measurements(clock)
    measured.count_against(Objectives(itl_s=0.06))
    measured.step(step_stats())
    request = RequestTimes(0.0, 7)
    for index in range(101):
        clock.advance(0.051 + 0.001 * (index % 3))
        measured.step(step_stats(num_tokens=1))
        measured.tokens([request])
    counts = counted(measured)
    assert counts is not None and counts.gaps == Share(num=100, num_over=0) and counts.ttft == Share(num=0, num_over=0)


def test_the_gaps_of_one_step_are_one_sample():
    clock = FakeClock()
    measured = Measurements(clock)
    measured.count_against(OBJECTIVES)
    requests = [RequestTimes(0.0, 7) for _ in range(64)]
    for gap_s in (0.01, 0.01, 0.2, 0.01):
        clock.advance(gap_s)
        measured.step(step_stats(num_tokens=64))
        measured.tokens(requests)
    measured.step(step_stats())
    counts = counted(measured)
    assert counts is not None
    assert (counts.gaps, counts.steps) == (Share(num=192, num_over=64), Share(num=3, num_over=1))


@pytest.mark.parametrize(("num_over", "is_over"), [(0, 0), (1, 0), (2, 1)])
def test_a_request_is_judged_by_its_own_95th_percentile(num_over: int, is_over: int):
    clock = FakeClock()
    measured = Measurements(clock)
    measured.count_against(OBJECTIVES)
    measured.step(step_stats())
    request = RequestTimes(0.0, 7)
    measured.tokens([request])
    for index in range(20):
        clock.advance(0.2 if index < num_over else 0.01)
        measured.tokens([request])
    measured.ended(request, "length", 21)
    counts = counted(measured)
    assert counts is not None and counts.itl == Share(num=1, num_over=is_over)


def test_other_objectives_begin_anew_and_the_same_do_not():
    clock = FakeClock()
    measured = Measurements(clock)
    measured.step(step_stats())
    assert counted(measured) is None
    measured.count_against(OBJECTIVES)
    old = RequestTimes(0.0, 7)
    measured.tokens([old])
    clock.advance(0.2)
    measured.tokens([old])
    measured.count_against(None)
    measured.count_against(Objectives(ttft_s=1.0, itl_s=TAU))
    counts = counted(measured)
    assert counts is not None and (counts.gaps, counts.since_s) == (Share(num=1, num_over=1), 0.2)
    measured.count_against(Objectives(itl_s=0.1))
    clock.advance(0.01)
    measured.tokens([old])
    measured.ended(old, "stop", 3)
    counts = counted(measured)
    assert counts is not None and counts.objectives == Objectives(itl_s=0.1)
    assert (counts.gaps, counts.itl) == (Share(num=1, num_over=0), Share(num=0, num_over=0)), "its first gap was before"


def test_what_leaves_the_window_counts_no_more():
    clock = FakeClock()
    measured = Measurements(clock)
    measured.step(step_stats())
    measured.count_against(OBJECTIVES)
    measured.tokens([RequestTimes(-5.0, 7)])
    clock.advance(61.0)
    counts = counted(measured)
    assert counts is not None and (counts.ttft, counts.since_s) == (Share(num=0, num_over=0), 61.0)


def test_limits_under_another_revision_begin_the_count_anew():
    clock = FakeClock()
    measured = Measurements(clock)
    measured.step(step_stats())
    measured.count_against(OBJECTIVES, 3)
    measured.tokens([RequestTimes(-5.0, 7)])
    clock.advance(1.0)
    measured.count_against(OBJECTIVES, 3)
    counts = counted(measured)
    assert counts is not None and (counts.ttft.num, counts.since_s) == (1, 1.0), "a renewed lease changes nothing"
    measured.count_against(OBJECTIVES, 4)
    counts = counted(measured)
    assert counts is not None and (counts.ttft.num, counts.since_s) == (0, 0.0)
