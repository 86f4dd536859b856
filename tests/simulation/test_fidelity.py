"""The simulator tells what was measured: runs of our own runtime on a CPU, as they are in benchmarks/results, run again."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from flyball_simulation.controllers import Static
from flyball_simulation.plant import PROFILES, Device, Disturbances
from flyball_simulation.replica import Replica, engine_config, percentile
from flyball_simulation.result import Bounds
from flyball_simulation.workload import Arrival
from flyball_simulation.world import Setup, World, simulate

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"

CPU = Setup(
    name="cpu",
    plant=PROFILES["cpu"].plant,
    disturbances=Disturbances(noise=0.0),
    kv_tokens=65_536,
    max_model_len=10_240,
    objectives=Bounds(),
)


def measured(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_bytes())
    return result


@pytest.mark.parametrize("concurrency", [8, 32, 64])
def test_throughput_by_concurrency_is_within_a_fifth(concurrency: int) -> None:
    """96 requests at once, 64 tokens in, 32 out (``benchmarks/batching.py``)."""
    setup = structs.replace(CPU, max_num_seqs=concurrency)
    world = World(setup, [Arrival(0.0, 64, 32)] * 96, Static(), 0)
    world.run()
    told = 96 * 32 / max(one.end_s for one in world.outcomes())
    assert told == pytest.approx(measured("batching")["by_concurrency"][str(concurrency)]["median"], rel=0.2)


@pytest.mark.parametrize("budget", [128, 512, 2048])
def test_what_a_long_prompt_does_to_streams_is_within_a_fifth(budget: int) -> None:
    """50 streams decode while a prompt of 10,000 tokens comes (``benchmarks/interference.py``)."""
    config = engine_config(
        model="m", max_num_seqs=51, max_num_batched_tokens=budget, prefix_caching=False, seed=0, prior=None
    )
    device = Device(CPU.plant, CPU.disturbances, 0, 0)
    replica = Replica("one", config, device, kv_tokens=CPU.kv_tokens, max_model_len=CPU.max_model_len)
    for index in range(50):
        replica.submit(index, Arrival(0.0, 32, 200))
    for _ in range(8):
        step(replica)
    replica.submit(50, Arrival(replica.end_s, 10_000, 1))
    gaps: list[float] = []
    start_s, ended = replica.end_s, 0
    while not ended:
        before_s = replica.end_s
        ended = step(replica)
        gaps += [replica.end_s - before_s] * 50
    seen = measured("interference")["by_budget"][f"chunks, {budget} tokens a step"]
    assert replica.end_s - start_s == pytest.approx(seen["ttft_of_long_prompt_s"]["median"], rel=0.2)
    assert percentile(gaps, 0.5) == pytest.approx(seen["itl_p50_s"]["median"], rel=0.2)
    assert percentile(gaps, 0.99) == pytest.approx(seen["itl_p99_s"]["median"], rel=0.2)


def step(replica: Replica) -> int:
    """Run one step; return how many requests it ended."""
    replica.begin(replica.end_s)
    return replica.finish()


def test_one_stream_alone_is_within_a_fifth() -> None:
    result = simulate(
        structs.replace(CPU, max_num_seqs=1), [Arrival(0.0, 64, 32)] * 8, Static(), label="one", seed=0, duration_s=1.0
    )
    tokens_per_s = 1 / (result.itl_p50_s or 1)
    assert tokens_per_s == pytest.approx(measured("batching")["by_concurrency"]["1"]["median"], rel=0.3)
