"""A small request beside one client's large ones. What counts is the order of their ends, not the seconds."""

import asyncio
from typing import Any

import aiohttp

from adversary_kit.attacked import Attacked

NUM_LARGE = 3
LARGE = {"prompt": [5, 6, 7], "n": 256, "max_tokens": 24, "ignore_eos": True, "seed": 1}
SMALL = {"prompt": [9, 10], "max_tokens": 4, "ignore_eos": True}


def client(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def race(port: int, waiting_for: int) -> list[str]:
    """Send the large requests of one client; once they wait, a small one of another. Return names in the order of ends."""
    ends: list[str] = []

    async def send(name: str, session: aiohttp.ClientSession, body: dict[str, Any], key: str) -> None:
        async with session.post(f"http://127.0.0.1:{port}/v1/completions", json=body, headers=client(key)) as answer:
            assert answer.status == 200, await answer.text()
            assert len((await answer.json())["choices"]) == body.get("n", 1)
        ends.append(name)

    async with aiohttp.ClientSession() as session:
        large = [asyncio.create_task(send("large", session, LARGE, "greedy")) for _ in range(NUM_LARGE)]
        while await num_waiting(session, port) < waiting_for:
            await asyncio.sleep(0.01)
        await send("small", session, SMALL, "modest")
        await asyncio.gather(*large)
    return ends


async def num_waiting(session: aiohttp.ClientSession, port: int) -> float:
    async with session.get(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("flyball_requests_waiting"))


def test_a_small_request_ends_before_another_clients_large_ones(server: Attacked) -> None:
    assert asyncio.run(race(server.port, waiting_for=400))[0] == "small"
