"""A small soak of `flyball serve`; benchmarks/soak.py is the long one."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoints import make_checkpoint
from flyball_protocol import endpoints
from replicas import Replica, replica
from traffic import Ask, Traffic, plain_stream, random_ask

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen2")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    with replica(model, log=tmp_path_factory.mktemp("log") / "server.log") as running:
        yield running


def drive(server: Replica, asks: list[Ask], concurrency: int) -> Traffic:
    async def session() -> Traffic:
        async with Traffic.opened(server.url) as traffic:
            await traffic.send_all(asks, concurrency)
            return traffic

    return asyncio.run(session())


def test_a_hundred_streams_at_once_get_every_token(server: Replica) -> None:
    before = server.metric("flyball_generation_tokens_total")
    traffic = drive(server, [plain_stream(index, max_tokens=12) for index in range(100)], concurrency=100)
    assert traffic.errors == []
    assert (traffic.num_finished, traffic.num_output_tokens) == (100, 1200)
    assert server.metric("flyball_generation_tokens_total") - before == 1200


def test_random_cancels_leave_nothing_behind(server: Replica) -> None:
    traffic = drive(server, random_asks(300), concurrency=40)
    assert traffic.errors == []
    assert traffic.num_left > 50
    assert traffic.num_finished > 100
    wait_idle(server)
    assert server.metric('flyball_requests_total{outcome="error"}') == 0


def test_sigterm_under_load_finishes_what_runs_and_refuses_the_rest(server: Replica) -> None:
    """Ends the module's server, so it comes last."""

    async def scenario() -> None:
        async with Traffic.opened(server.url) as running, Traffic.opened(server.url) as late:
            accepted = [plain_stream(index, max_tokens=400) for index in range(100)]
            sending = asyncio.create_task(running.send_all(accepted, concurrency=100))
            await until_in_flight(server, 100, sending)
            server.process.send_signal(signal.SIGTERM)
            while (await asyncio.to_thread(server.client.get, endpoints.READYZ_PATH)).status_code == 200:
                await asyncio.sleep(0.01)
            await late.send_all([plain_stream(index, max_tokens=5) for index in range(10)], concurrency=10)
            await sending
            assert running.errors == []
            assert running.num_output_tokens == 100 * 400
            assert [error[:3] for error in late.errors] == ["503"] * 10

    asyncio.run(scenario())
    assert server.process.wait(30) == endpoints.EXIT_OK


def test_an_engine_killed_under_load_fails_each_request_once(model: Path, tmp_path: Path) -> None:
    async def scenario(server: Replica) -> Traffic:
        async with Traffic.opened(server.url) as traffic:
            asks = [plain_stream(index, max_tokens=400) for index in range(200)]
            sending = asyncio.create_task(traffic.send_all(asks, concurrency=200))
            await until_in_flight(server, 200, sending)
            os.kill(server.engine_pid(), signal.SIGKILL)
            await sending
            return traffic

    with replica(model, "--max-num-seqs", "128", log=tmp_path / "log") as server:
        traffic = asyncio.run(scenario(server))
        assert len(traffic.errors) == 200
        assert all("engine_dead" in error for error in traffic.errors), traffic.errors[:3]
        assert server.process.wait(30) == endpoints.EXIT_ENGINE_DIED
        assert "Traceback" not in server.log.read_text()


async def until_in_flight(server: Replica, count: int, sending: asyncio.Task[None]) -> None:
    """Until so many requests run or wait at once; what ended before that was seen is a failure, not a wait for ever."""
    while sum((await asyncio.to_thread(server.load))[:2]) < count:
        assert not sending.done(), f"the requests ended before {count} of them were seen together"
        await asyncio.sleep(0.02)


def random_asks(count: int) -> list[Ask]:
    rng = random.Random(0)
    return [random_ask(rng, max_tokens=24, patience_s=0.5) for _ in range(count)]


def wait_idle(server: Replica) -> None:
    """Until no request runs or waits and no block is used."""
    deadline_s = time.monotonic() + 20
    while (state := server.load()) != (0, 0, 0):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"running, waiting, used blocks stayed at {state}")
        time.sleep(0.05)
