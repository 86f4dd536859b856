"""A small soak of `flyball serve`; benchmarks/soak.py is the long one."""

import asyncio
import random
import time
from collections.abc import Iterator

import pytest

from checkpoints import make_checkpoint
from flyball_protocol import endpoints
from replicas import Replica, replica
from traffic import Ask, Traffic, plain_stream, random_ask


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    model = make_checkpoint(tmp_path_factory.mktemp("model"), "qwen2")
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
    rng = random.Random(0)
    asks = [random_ask(rng, max_tokens=24, patience_s=0.5) for _ in range(300)]
    traffic = drive(server, asks, concurrency=40)
    assert traffic.errors == []
    assert traffic.num_left > 50
    assert traffic.num_finished > 100
    wait_idle(server)
    assert server.metric('flyball_requests_total{outcome="error"}') == 0
    assert server.stop() == endpoints.EXIT_OK


def wait_idle(server: Replica) -> None:
    """Until no request runs or waits and no block is used."""
    deadline_s = time.monotonic() + 20
    while (state := server.load()) != (0, 0, 0):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"running, waiting, used blocks stayed at {state}")
        time.sleep(0.05)
