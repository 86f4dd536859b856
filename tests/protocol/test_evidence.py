import msgspec
import pytest

from flyball_protocol import (
    EVIDENCE_VERSION,
    Envelope,
    Evidence,
    HitPoint,
    KVBlocks,
    LatencyWindow,
    Lengths,
    Limits,
    MemoryState,
    ObjectiveCounts,
    Objectives,
    Share,
    StepModel,
    decode_evidence,
)

WINDOW = LatencyWindow(count=3, p50_s=0.1, p95_s=0.2, p99_s=0.2, edges_s=(0.1, 1.0), counts=(2, 1, 0))
EMPTY = LatencyWindow(count=0, p50_s=None, p95_s=None, p99_s=None, edges_s=(0.1, 1.0), counts=(0, 0, 0))
LIMITS = Limits(max_num_seqs=8, kv_cache_fraction=0.5, max_num_batched_tokens=512)


@pytest.fixture
def evidence() -> Evidence:
    return Evidence(
        model="demo",
        boot_id="b1",
        template="t1",
        key="demo/bfloat16/cpu/1",
        uptime_s=12.5,
        window_s=15.0,
        ready=True,
        draining=False,
        revision=3,
        target=LIMITS,
        effective=LIMITS,
        envelope=Envelope(
            max_num_seqs=64,
            max_num_batched_tokens=2048,
            min_num_batched_tokens=1,
            num_kv_blocks=100,
            min_kv_cache_fraction=0.25,
            block_size=16,
            max_model_len=400,
        ),
        num_running=4,
        num_waiting=1,
        num_arrived=4,
        num_finished=3,
        num_failed=0,
        ttft=WINDOW,
        itl=WINDOW,
        e2e=EMPTY,
        blocked_by={"none": 0.75, "kv": 0.25},
        kv_blocks=KVBlocks(total=100, capacity=50, free=60, used=30, cached=10),
        num_prompt_tokens=300,
        num_generated_tokens=30,
        num_prefix_queried_tokens=300,
        num_prefix_hit_tokens=64,
        num_preemptions=0,
        num_recomputed_tokens=0,
        num_steps=40,
        step_time_p50_s=0.01,
        step_time_p95_s=None,
    )


def test_what_is_encoded_decodes_to_the_same(evidence: Evidence):
    assert decode_evidence(msgspec.json.encode(evidence)) == evidence


def test_what_became_known_decodes_to_the_same(evidence: Evidence):
    known = msgspec.structs.replace(
        evidence,
        step_model=StepModel(base_s=0.001, token_s=1e-5, covariance=(1.0,), settled=True, residual_p50=0.1),
        lengths=Lengths(
            num_requests=12.5,
            prompt_tokens=100.0,
            computed_prompt_tokens=80.0,
            computed_prompt_tokens_squared=9000.0,
            output_tokens=20.0,
            output_tokens_p95=64.0,
            context_tokens=130.0,
        ),
        objective_counts=ObjectiveCounts(
            objectives=Objectives(ttft_s=1.0),
            since_s=30.0,
            ttft=Share(num=10, num_over=1),
            itl=Share(num=0, num_over=0),
            gaps=Share(num=0, num_over=0),
            steps=Share(num=0, num_over=0),
        ),
        memory=MemoryState(
            pool_bytes=1, pool_max_bytes=2, process_bytes=3, limit_bytes=4, available_bytes=1, pressure=0.5
        ),
        prefix_hits=(HitPoint(num_blocks=10, share=0.25), HitPoint(num_blocks=20, share=0.5)),
    )
    assert decode_evidence(msgspec.json.encode(known)) == known


@pytest.mark.parametrize(("version", "told"), [(None, 1), (1, 1), (EVIDENCE_VERSION + 1, EVIDENCE_VERSION + 1)])
def test_another_version_is_refused_before_its_fields_are_read(evidence: Evidence, version: int | None, told: int):
    body = msgspec.to_builtins(evidence) | {"version": version, "ttft": "another type"}
    if version is None:
        del body["version"]
    with pytest.raises(msgspec.ValidationError, match=f"evidence of version {told}; version {EVIDENCE_VERSION} can be"):
        decode_evidence(msgspec.json.encode(body))


def test_a_newer_runtime_may_send_more(evidence: Evidence):
    """Evidence grows with the runtime; an older operator reads what it knows."""
    body = msgspec.to_builtins(evidence) | {"gpu_temperature_c": 60}
    assert msgspec.convert(body, Evidence) == evidence


def test_a_missing_field_is_an_error_that_names_it(evidence: Evidence):
    body = msgspec.to_builtins(evidence)
    del body["kv_blocks"]
    with pytest.raises(msgspec.ValidationError, match="missing required field `kv_blocks`"):
        msgspec.convert(body, Evidence)
