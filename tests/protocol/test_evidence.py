import msgspec
import pytest

from flyball_protocol import Envelope, Evidence, KVBlocks, LatencyWindow, Limits

WINDOW = LatencyWindow(count=3, p50_s=0.1, p95_s=0.2, p99_s=0.2, edges_s=(0.1, 1.0), counts=(2, 1, 0))
EMPTY = LatencyWindow(count=0, p50_s=None, p95_s=None, p99_s=None, edges_s=(0.1, 1.0), counts=(0, 0, 0))
LIMITS = Limits(max_num_seqs=8, kv_cache_fraction=0.5, max_num_batched_tokens=512)


@pytest.fixture
def evidence() -> Evidence:
    return Evidence(
        model="demo",
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
    assert msgspec.json.decode(msgspec.json.encode(evidence), type=Evidence) == evidence


def test_a_newer_runtime_may_send_more(evidence: Evidence):
    """Evidence grows with the runtime; an older operator reads what it knows."""
    body = msgspec.to_builtins(evidence) | {"gpu_temperature_c": 60}
    assert msgspec.convert(body, Evidence) == evidence


def test_a_missing_field_is_an_error_that_names_it(evidence: Evidence):
    body = msgspec.to_builtins(evidence)
    del body["kv_blocks"]
    with pytest.raises(msgspec.ValidationError, match="missing required field `kv_blocks`"):
        msgspec.convert(body, Evidence)
