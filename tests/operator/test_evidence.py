"""What a replica says is checked before it counts, and replicas are pooled by their steps."""

from typing import Any

import pytest
from msgspec import structs

from flyball_operator.tuning import PodEvidence, TunerState
from flyball_operator.tuning.evidence import fault, pool, tightest
from flyball_operator.tuning.signals import samples_over, wilson
from flyball_protocol import Evidence, LatencyWindow
from operator_kit.evidence import ENVELOPE, make_evidence


def fault_of(evidence: Evidence | None, *, age_s: float = 0.0, problem: str = "") -> str | None:
    pod = PodEvidence(pod="one", evidence=evidence, age_s=age_s, problem=problem)
    return fault(pod, max_age_s=45.0, min_uptime_s=15.0)


@pytest.mark.parametrize(
    ("fields", "age_s", "said"),
    [
        ({}, 0.0, None),
        ({}, 45.0, None),
        ({}, 46.0, "evidence is 46 s old, more than 45 s"),
        ({"draining": True}, 0.0, "draining"),
        ({"draining": True, "ready": False}, 0.0, "draining"),
        ({"ready": False}, 0.0, "not ready"),
        ({"uptime_s": 14.0}, 0.0, "up for 14 s only"),
        ({"uptime_s": 15.0}, 0.0, None),
        ({"blocked_by": {"kv": -0.1}}, 0.0, "blocked_by shares outside 0 to 1"),
        ({"blocked_by": {"kv": 1.1}}, 0.0, "blocked_by shares outside 0 to 1"),
        ({"blocked_by": {"kv": 1.0, "seqs": 0.0}}, 0.0, None),
    ],
)
def test_what_makes_a_replica_unusable(fields: dict[str, Any], age_s: float, said: str | None) -> None:
    assert fault_of(make_evidence(**fields), age_s=age_s) == said


def test_a_replica_without_an_answer_says_why_if_it_can() -> None:
    assert (fault_of(None), fault_of(None, problem="timed out")) == ("no answer", "timed out")


@pytest.mark.parametrize("which", ["ttft", "itl"])
@pytest.mark.parametrize(
    ("edges_s", "counts"),
    [
        ((0.1, 0.2), (1, 2)),
        ((0.1, 0.2), (1, 2, 3, 4)),
        ((0.1, 0.2), (1, -2, 3)),
        ((0.2, 0.1), (1, 2, 3)),
        ((0.1, 0.1), (1, 2, 3)),
    ],
)
def test_buckets_that_contradict_themselves_are_not_used(
    which: str, edges_s: tuple[float, ...], counts: tuple[int, ...]
) -> None:
    odd = LatencyWindow(count=6, p50_s=None, p95_s=None, p99_s=None, edges_s=edges_s, counts=counts)
    assert fault_of(make_evidence(**{which: odd})) == "latency buckets that contradict themselves"


def test_shares_are_weighted_by_steps_and_a_reason_not_named_is_zero() -> None:
    busy = make_evidence(blocked_by={"kv": 0.4}, num_steps=300, num_waiting=5)
    calm = make_evidence(blocked_by={"seqs": 1.0}, num_steps=100, num_waiting=2)
    pooled = pool([busy, calm], TunerState())
    assert pooled.blocked_by == {"kv": pytest.approx(0.3), "seqs": pytest.approx(0.25)}
    assert pooled.num_waiting == 7


def test_shares_of_one_step_and_one_token_are_whole() -> None:
    fields = {"num_prompt_tokens": 0, "num_generated_tokens": 0, "num_recomputed_tokens": 1}
    pooled = pool([make_evidence(num_steps=1, blocked_by={"kv": 1.0}, **fields)], TunerState())
    assert (pooled.blocked_by, pooled.recomputed_share) == ({"kv": 1.0}, 1.0)
    idle = pool([make_evidence(num_steps=0, **(fields | {"num_recomputed_tokens": 0}))], TunerState())
    assert idle.recomputed_share == 0.0


def test_the_window_is_the_longest_that_a_replica_has_been_up_for() -> None:
    young, short = make_evidence(window_s=60.0, uptime_s=20.0), make_evidence(window_s=30.0)
    assert pool([young, short], TunerState()).window_s == 30.0
    assert pool([young], TunerState()).window_s == 20.0


def test_the_tightest_envelope_is_what_every_replica_can_take() -> None:
    other = structs.replace(
        ENVELOPE,
        max_num_seqs=64,
        max_num_batched_tokens=4096,
        min_num_batched_tokens=32,
        num_kv_blocks=900,
        min_kv_cache_fraction=0.05,
        block_size=8,
        max_model_len=512,
    )
    assert tightest([ENVELOPE, other]) == structs.replace(
        ENVELOPE, max_num_seqs=64, min_num_batched_tokens=32, num_kv_blocks=900, max_model_len=512
    )


@pytest.mark.parametrize(
    ("objective_s", "p99_s", "over"),
    [
        (0.4, 0.3, 10),  # at the last edge, which says all there is to know
        (0.41, 0.41, 0),
        (0.41, 0.42, 10),
        (0.3, 0.2, 25),  # inside the buckets their counts hold, whatever the p99 says
        (0.5, None, 10),
    ],
)
def test_the_open_bucket(objective_s: float, p99_s: float | None, over: float) -> None:
    counts = (10, 50, 30, 10)
    window = LatencyWindow(count=100, p50_s=None, p95_s=None, p99_s=p99_s, edges_s=(0.1, 0.2, 0.4), counts=counts)
    assert samples_over(window, objective_s) == pytest.approx(over)


def test_a_share_is_never_above_one() -> None:
    assert all(wilson(num, num)[1] <= 1.0 for num in range(1, 200))
