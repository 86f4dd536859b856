"""The admin port: token, limits, evidence, drain."""

from typing import Any

import httpx
import msgspec
import pytest

from flyball_protocol import Evidence, LimitsAck, LimitsReport, LimitsStatus
from flyball_runtime.api import MetricsCollector, create_admin_app
from flyball_runtime.core.clock import FakeClock
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.measurements import RequestTimes
from runtime.api.support import ADMIN_TOKEN, error_of
from runtime.fake_engine import ENVELOPE, LIMITS, FakeEngine, step_stats

pytestmark = pytest.mark.anyio

LIMITS_PATH, EVIDENCE, DRAIN = "/admin/limits", "/admin/evidence", "/admin/drain"


@pytest.mark.parametrize(
    "token", [None, "", "Bearer", "Bearer wrong", f"Basic {ADMIN_TOKEN}", ADMIN_TOKEN, "Bearer ünicode"]
)
@pytest.mark.parametrize("path", [LIMITS_PATH, EVIDENCE, DRAIN, "/nope"])
async def test_nothing_without_the_token(
    admin: httpx.AsyncClient, engine: FakeEngine, path: str, token: str | None
) -> None:
    del admin.headers["Authorization"]
    headers = {} if token is None else {"Authorization": token.encode()}
    for method in ("GET", "POST"):
        response = await admin.request(method, path, headers=headers)
        error = error_of(response)
        assert (response.status_code, error["type"]) == (401, "invalid_request_error")
        assert response.headers["www-authenticate"] == "Bearer" and ADMIN_TOKEN not in response.text
    assert not engine.draining


@pytest.mark.parametrize("token", ["", "  \n"])
async def test_no_admin_app_with_an_empty_token(engine: FakeEngine, metrics: MetricsCollector, token: str) -> None:
    with pytest.raises(ConfigError, match="FLYBALL_ADMIN_TOKEN"):
        create_admin_app(engine, metrics, token)


async def test_a_token_file_may_end_in_a_newline(engine: FakeEngine, metrics: MetricsCollector) -> None:
    transport = httpx.ASGITransport(create_admin_app(engine, metrics, "secret\n"))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        assert (await client.get(LIMITS_PATH, headers={"Authorization": "bearer secret"})).status_code == 200


async def test_get_limits(admin: httpx.AsyncClient) -> None:
    report = msgspec.json.decode((await admin.get(LIMITS_PATH)).content, type=LimitsReport)
    assert report.target == LIMITS and report.envelope == ENVELOPE


async def test_post_limits_answers_by_status(admin: httpx.AsyncClient) -> None:
    async def post(revision: int, **limits: Any) -> tuple[int, LimitsAck]:
        response = await admin.post(LIMITS_PATH, json={"revision": revision, "limits": limits, "ttl_s": 60})
        return response.status_code, msgspec.json.decode(response.content, type=LimitsAck)

    status, ack = await post(5, max_num_seqs=4)
    assert (status, ack.status, ack.revision, ack.target.max_num_seqs) == (200, LimitsStatus.APPLIED, 5, 4)
    status, ack = await post(4, max_num_seqs=3)
    assert (status, ack.status, ack.revision) == (409, LimitsStatus.STALE, 5) and "revision 5" in ack.reason
    status, ack = await post(6, max_num_seqs=100)
    assert (status, ack.status) == (422, LimitsStatus.REJECTED) and "at most 8" in ack.reason


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        (b"\xff", None),
        (b"[]", None),
        (b"{}", "revision"),
        (b'{"revision": 0, "limits": {}}', "revision"),
        (b'{"revision": 1, "limits": {"max_num_seqs": 0}}', "limits.max_num_seqs"),
        (b'{"revision": 1, "limits": {"max_num_seqs": "4"}}', "limits.max_num_seqs"),
        (b'{"revision": 1, "limits": {"kv_cache_fraction": 1.5}}', "limits.kv_cache_fraction"),
        (b'{"revision": 1, "limits": {"max_seqs": 1}}', "limits"),
        (b'{"revision": 1, "limits": {}, "ttl_s": -1}', "ttl_s"),
    ],
)
async def test_malformed_limits(admin: httpx.AsyncClient, engine: FakeEngine, body: bytes, param: str | None) -> None:
    response = await admin.post(LIMITS_PATH, content=body)
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, param), error
    assert engine.revision == 0


async def test_admin_body_limit_and_routes(admin: httpx.AsyncClient) -> None:
    assert (await admin.post(LIMITS_PATH, content=b" " * 100_000)).status_code == 413
    assert error_of(await admin.get("/admin/nope"))["code"] == "not_found"
    assert error_of(await admin.delete(LIMITS_PATH))["code"] == "method_not_allowed"


async def test_drain(admin: httpx.AsyncClient, engine: FakeEngine) -> None:
    for _ in range(2):
        response = await admin.post(DRAIN)
        assert response.status_code == 202 and response.json() == {"draining": True, "num_unfinished": 0}
    assert engine.draining


async def test_evidence(
    admin: httpx.AsyncClient, engine: FakeEngine, metrics: MetricsCollector, clock: FakeClock
) -> None:
    measured = metrics.measured
    measured.step(step_stats())
    for blocked_by in ("none", "kv", "kv", "seqs"):
        measured.step(step_stats(num_tokens=10, blocked_by=blocked_by, num_preemptions=1, num_recomputed_tokens=5))
    measured.step(step_stats(num_running=3, num_waiting=2, num_prefix_queried_tokens=8, num_prefix_hit_tokens=4))
    times = RequestTimes(clock.now() - 0.1, 7)
    measured.tokens([times])
    clock.advance(0.01)
    measured.tokens([times], 2)
    measured.ended(times, "length", 3)
    measured.ended(RequestTimes(clock.now(), 1), "error", 0)
    evidence = msgspec.json.decode((await admin.get(EVIDENCE)).content, type=Evidence)
    assert evidence.uptime_s == pytest.approx(0.01) and evidence.window_s == 60
    assert (evidence.num_running, evidence.num_waiting, evidence.num_steps) == (3, 2, 4)
    assert (evidence.num_finished, evidence.num_failed) == (1, 1)
    assert evidence.blocked_by == {
        "none": 0.25,
        "seqs": 0.25,
        "kv": 0.5,
        "reserve": 0.0,
        "budget": 0.0,
        "step_time": 0.0,
    }
    assert (evidence.num_prompt_tokens, evidence.num_generated_tokens) == (7, 3)
    assert (evidence.num_prefix_queried_tokens, evidence.num_prefix_hit_tokens) == (8, 4)
    assert (evidence.num_preemptions, evidence.num_recomputed_tokens) == (4, 20)
    assert evidence.ttft.count == 1 and evidence.ttft.p50_s == pytest.approx(0.1)
    assert evidence.itl.count == 2 and evidence.itl.p99_s == pytest.approx(0.005)
    assert evidence.e2e.count == 1 and sum(evidence.e2e.counts) == 1
    assert evidence.step_time_p50_s == evidence.step_time_p95_s == 0.004
    assert evidence.envelope == ENVELOPE and evidence.model == "test-model"


async def test_evidence_has_the_memory_of_both_processes_and_the_pool(
    admin: httpx.AsyncClient, engine: FakeEngine, metrics: MetricsCollector
) -> None:
    metrics.measured.step(step_stats())
    assert msgspec.json.decode((await admin.get(EVIDENCE)).content, type=Evidence).memory is None, "no pool to tell of"
    engine.engine_info = msgspec.structs.replace(engine.engine_info, kv_block_bytes=1000)
    engine.stats = step_stats(num_allocated_kv_blocks=60)
    memory = msgspec.json.decode((await admin.get(EVIDENCE)).content, type=Evidence).memory
    assert memory is not None and memory.process_bytes > 2**20
    assert (memory.pool_bytes, memory.pool_max_bytes) == (60_000, 100_000)


async def test_evidence_before_and_after_the_engine(admin: httpx.AsyncClient, engine: FakeEngine) -> None:
    response = await admin.get(EVIDENCE)
    assert (response.status_code, error_of(response)["code"]) == (503, "not_ready") and response.headers["retry-after"]
    engine.die("killed")
    assert error_of(await admin.get(EVIDENCE))["code"] == "engine_dead"
