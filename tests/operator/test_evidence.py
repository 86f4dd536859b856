"""What a replica says is checked before it counts, and only replicas that are alike are pooled."""

import math
from typing import Any

import pytest
from msgspec import structs

from flyball_operator.tuning import PodEvidence
from flyball_operator.tuning.evidence import Seen, fault, in_force, largest_family, pool, tightest
from flyball_protocol import Evidence, KVBlocks, LatencyWindow, ObjectiveCounts, Share
from operator_kit.evidence import ENVELOPE, LIMITS, MODEL, POSTED, make_evidence, pods


def fault_of(
    evidence: Evidence | None, *, age_s: float = 0.0, problem: str = "", before: Seen | None = None
) -> str | None:
    pod = PodEvidence(pod="one", evidence=evidence, age_s=age_s, problem=problem)
    return fault(pod, max_age_s=45.0, min_uptime_s=15.0, before=before)


BLOCKS = KVBlocks(total=1000, capacity=800, free=500, used=400, cached=100)


@pytest.mark.parametrize(
    ("fields", "age_s", "said"),
    [
        ({}, 0.0, None),
        ({}, 45.0, None),
        ({}, 46.0, "evidence is 46 s old, more than 45 s"),
        ({}, math.nan, "evidence is nan s old, more than 45 s"),
        ({"draining": True}, 0.0, "draining"),
        ({"draining": True, "ready": False}, 0.0, "draining"),
        ({"ready": False}, 0.0, "not ready"),
        ({"uptime_s": 14.0}, 0.0, "up for 14 s only"),
        ({"uptime_s": 15.0}, 0.0, None),
        ({"blocked_by": {"kv": -0.1}}, 0.0, "evidence.blocked_by.kv is -0.1, which is no possible value"),
        ({"blocked_by": {"kv": math.nan}}, 0.0, "evidence.blocked_by.kv is nan, which is no possible value"),
        ({"num_waiting": -3}, 0.0, "evidence.num_waiting is -3, which is no possible value"),
        ({"window_s": math.inf}, 0.0, "evidence.window_s is inf, which is no possible value"),
        ({"blocked_by": {"kv": 1.1}}, 0.0, "blocked_by shares outside 0 to 1"),
        ({"blocked_by": {"kv": 1.0, "seqs": 0.0}}, 0.0, None),
        ({"version": 1}, 0.0, "evidence of version 1; this operator reads version 2"),
        ({"version": 3}, 0.0, "evidence of version 3; this operator reads version 2"),
        ({"step_model": structs.replace(MODEL, covariance=(1.0, -0.5, 1.0))}, 0.0, None),
        (
            {"kv_blocks": structs.replace(BLOCKS, used=-1)},
            0.0,
            "evidence.kv_blocks.used is -1, which is no possible value",
        ),
    ],
)
def test_what_makes_a_replica_unusable(fields: dict[str, Any], age_s: float, said: str | None) -> None:
    assert fault_of(make_evidence(**fields), age_s=age_s) == said


def test_a_replica_without_an_answer_says_why_if_it_can() -> None:
    assert fault_of(None) == "no answer"
    assert fault_of(None, problem="no answer in 2.0 s") == "no answer in 2.0 s"


def test_counts_that_go_back_are_a_fault() -> None:
    before = Seen("one", "b1", 700.0)
    assert fault_of(make_evidence(), before=before) == "its clock went back, from 700 s up to 600 s"
    assert fault_of(make_evidence(boot_id="b2"), before=before) is None, "it has restarted"
    assert fault_of(make_evidence(uptime_s=701.0), before=before) is None


@pytest.mark.parametrize(("edges", "counts"), [((1.0, 2.0), (1, 2)), ((2.0, 1.0), (1, 2, 3)), ((1.0, 1.0), (1, 2, 3))])
def test_buckets_that_contradict_themselves_are_a_fault(edges: tuple[float, ...], counts: tuple[int, ...]) -> None:
    window = LatencyWindow(count=3, p50_s=None, p95_s=None, p99_s=None, edges_s=edges, counts=counts)
    assert fault_of(make_evidence(itl=window)) == "latency buckets that contradict themselves"


def test_more_over_than_there_are_is_a_fault() -> None:
    one = Share(num=5, num_over=6)
    counts = ObjectiveCounts(objectives=POSTED, since_s=5.0, ttft=one, itl=one, gaps=one, steps=one)
    assert fault_of(make_evidence(objective_counts=counts)) == "more samples over an objective than there are"


def test_replicas_of_one_model_and_template_are_decided_on_together() -> None:
    old, new = make_evidence(template="t1"), make_evidence(template="t2")
    assert largest_family(pods(old, old, new), "") == "demo/t1"
    assert largest_family(pods(old, new), "demo/t1") == "demo/t1"
    assert largest_family(pods(old, new), "demo/t2") == "demo/t2"
    assert largest_family(pods(None, None), "demo/t2") == "demo/t2"


def test_shares_of_steps_are_weighed_by_steps() -> None:
    busy = make_evidence(num_steps=3000, blocked_by={"kv": 0.4, "none": 0.6})
    idle = make_evidence(num_steps=1000, blocked_by={"none": 1.0})
    assert pool([busy, idle], POSTED).blocked_by == {"kv": pytest.approx(0.3), "none": pytest.approx(0.7)}


def test_only_replicas_that_count_against_the_objectives_are_counted() -> None:
    other = make_evidence(posted=structs.replace(POSTED, itl_s=0.03), itl_over=20000)
    pooled = pool([make_evidence(ttft_over=10, since_s=7.0), other, make_evidence(posted=None)], POSTED)
    assert pooled.counts.ttft == Share(num=1000, num_over=10)
    assert (pooled.counts.steps.num_over, pooled.counted_s) == (0, 7.0)


def test_arrivals_are_per_replica() -> None:
    assert pool([make_evidence(num_arrived=600), make_evidence(num_arrived=0)], POSTED).arrivals_per_s == 5.0


def test_without_steps_nothing_was_blocked_and_nothing_recomputed() -> None:
    idle = make_evidence(num_steps=0, num_prompt_tokens=0, num_generated_tokens=0, blocked_by={})
    pooled = pool([idle], POSTED)
    assert (pooled.blocked_by, pooled.recomputed_share) == ({}, 0.0)


def test_the_newest_revision_is_in_force() -> None:
    other = structs.replace(LIMITS, max_num_seqs=10)
    reported = [make_evidence(revision=3), make_evidence(revision=2, limits=other)]
    assert in_force(reported, 0, None) == (3, LIMITS)
    assert in_force(reported, 3, other) == (3, other), "what was decided goes before what a replica makes of it"
    assert in_force(reported, 2, other) == (3, LIMITS)


def test_the_tightest_envelope_is_that_of_all() -> None:
    wide = structs.replace(ENVELOPE, max_num_seqs=999, min_num_batched_tokens=1, min_kv_cache_fraction=0.01)
    assert tightest([wide, ENVELOPE]) == ENVELOPE
