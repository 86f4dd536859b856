"""What a step of this machine's runtime costs, as a plant of the simulator; how near that is to a real server.

    python benchmarks/plant.py [--requests 160] [--seconds 60] [--seed 1]

First and last, a mixed load under limits that change all the time is run through an engine in this process. Each step's work
and time are noted. The plant's coefficients are fitted to half of the steps, by least squares of the relative error, none
negative; the other half says how far off they are. Half of the learning load comes before the loads to compare and half behind
them, so if the machine gets slower meanwhile, it does for both.

In between, `flyball serve` runs, as processes of their own, whose engine has one thread. Single requests show what it takes
outside of its steps: a time for each request and for each token of its prompt (HTTP, JSON), and a time between steps (messages
between the processes, and what the engine does there). Then three loads arrive in real time over HTTP. The same arrivals go
through the simulator, and p50 and p95 of TTFT and ITL are compared, as the client saw them. No request that is compared has a
part in the fit.

Takes about five minutes, on a machine that does nothing else. Writes results/plant.json.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from common import make_checkpoint, save
from contender import VOCABULARY, Answer, new_session, pods_of, replica, send, warm_up
from flyball_operator.observed import Pod
from flyball_protocol import LimitsChange, LimitsUpdate
from flyball_runtime.core.config import EngineConfig
from flyball_runtime.core.request import Request
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.core.stats import Sampled
from flyball_runtime.engine.engine import Engine
from flyball_runtime.engine.runner import start_engine
from flyball_runtime.scheduler import BatchPlan
from flyball_simulation.controllers import Static
from flyball_simulation.plant import Disturbances, Plant
from flyball_simulation.replica import percentile
from flyball_simulation.result import Bounds
from flyball_simulation.workload import Arrival
from flyball_simulation.world import Setup, World

MAX_MODEL_LEN, KV_BYTES, MAX_SEQS, MAX_TOKENS = 4096, 256 << 20, 48, 512
"""As the server of contender.py has them."""
KV_TOKENS = KV_BYTES // (12 * 2 * 4 * 64 * 2)
KNEES = (0, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
TARGET = 0.10
"""The simulator is to be this near, as a share of the measured value."""
NUM_SIMULATIONS = 5
"""Runs of the simulator that are taken together: they differ by the noise of the steps only."""


class Step(NamedTuple):
    prefill_tokens: int
    decodes: int
    context_tokens: int
    attention_pairs: int
    seconds: float


class Outside(NamedTuple):
    """What a server takes outside of its steps, in seconds: once and for each prompt token of a request, and between steps."""

    request_s: float
    prompt_token_s: float
    between_steps_s: float


class Recorder:
    """An executor that notes what each plan asked for and how long it took, from its launch to its tokens."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.steps: list[Step] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def launch(self, plan: BatchPlan) -> tuple[BatchPlan, float, Any]:
        started_s = time.perf_counter()
        return plan, started_s, self.inner.launch(plan)

    def collect(self, handle: tuple[BatchPlan, float, Any]) -> Sampled:
        plan, started_s, inner = handle
        tokens: Sampled = self.inner.collect(inner)
        self.steps.append(
            Step(
                plan.num_prefill_tokens,
                plan.num_decodes,
                plan.num_context_tokens,
                plan.prefill_work,
                time.perf_counter() - started_s,
            )
        )
        return tokens


def make_engine(checkpoint: Path) -> tuple[Engine, Recorder]:
    config = EngineConfig(
        model=str(checkpoint),
        served_model_name="m",
        dtype="bfloat16",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=MAX_TOKENS,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=KV_BYTES,
        num_threads=1,
        fair_share=False,
    )
    engine = start_engine(config)
    recorder = engine._executor = Recorder(engine._executor)
    return engine, recorder


def learn(engine: Engine, num_requests: int, rng: random.Random) -> None:
    """Run a load of all sizes, under a token budget and a number of sequences that keep changing."""
    waiting = [_request(str(index), rng) for index in range(num_requests)]
    revision = engine.limits().revision
    while waiting or engine.has_work():
        if revision % 25 == 0:
            num_seqs = rng.choice((1, 2, 4, 8, 16, 32, MAX_SEQS))
            budget = max(num_seqs, rng.choice((16, 48, 96, 200, 350, MAX_TOKENS)))
            change = LimitsChange(max_num_seqs=num_seqs, max_num_batched_tokens=budget)
            engine.post_limits(LimitsUpdate(revision=revision + 1, limits=change))
        revision += 1
        while waiting and engine.scheduler.num_waiting < 4:
            engine.submit(waiting.pop())
        engine.step()


def _request(request_id: str, rng: random.Random) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=rng.choices(VOCABULARY, k=rng.choice((16, 64, 200, 500, 1500, 3000))),
        sampling=SamplingParams(temperature=0.0, max_tokens=rng.choice((4, 20, 80)), ignore_eos=True),
    )


def fit(steps: Sequence[Step]) -> Plant:
    """Return the plant of the knee with the least relative error."""
    return min((_fit_knee(steps, knee) for knee in KNEES), key=lambda plant: statistics.median(errors(plant, steps)))


def _fit_knee(steps: Sequence[Step], knee: int) -> Plant:
    table = np.array(steps, dtype=np.float64)
    num_tokens = table[:, 0] + table[:, 1]
    seconds = table[:, 4]
    columns = np.stack(
        [np.ones(len(steps)), np.maximum(0.0, num_tokens - knee), table[:, 1], table[:, 2], table[:, 3]], axis=1
    )
    base, token, decode, context, pairs = _nonnegative(columns / seconds[:, None], np.ones(len(steps)))
    weights = min(token * knee, base)
    return Plant(
        shape="knee" if knee else "linear",
        overhead_s=round(base - weights, 9),
        weights_s=round(weights, 9),
        token_s=round(token, 12),
        decode_s=round(decode, 12),
        context_token_s=round(context, 15),
        attention_pair_s=round(pairs, 15),
    )


def _nonnegative(columns: NDArray[np.float64], target: NDArray[np.float64]) -> list[float]:
    """Return least-squares coefficients, leaving the most negative one out until none is negative.

    A second round leaves out the steps that are far off: the machine did something else meanwhile.
    """
    kept = np.ones(len(target), dtype=bool)
    found = [0.0] * columns.shape[1]
    for _ in range(2):
        used = list(range(columns.shape[1]))
        while True:
            values = np.linalg.lstsq(columns[kept][:, used], target[kept], rcond=None)[0]
            if not used or values.min() >= 0:
                break
            used.pop(int(values.argmin()))
        found = [0.0] * columns.shape[1]
        for place, value in zip(used, values.tolist(), strict=True):
            found[place] = value
        off = np.abs(columns @ np.array(found) - target)
        kept = off <= max(0.05, 3 * float(np.median(off)))
    return found


def errors(plant: Plant, steps: Sequence[Step]) -> list[float]:
    return [abs(plant.seconds(*step[:4]) - step.seconds) / step.seconds for step in steps]


class Load(NamedTuple):
    """Mean lengths, the share of what the device can do, and how evenly requests come: gamma distributed gaps of this shape."""

    input_len: int
    output_len: int
    share: float
    shape: float


LOADS = {
    "chat": Load(220, 60, 0.6, 1.0),
    "long prompts": Load(1800, 30, 0.5, 1.0),
    "code, in bursts": Load(500, 10, 0.5, 0.35),
}


def arrivals(load: Load, plant: Plant, seconds: float, rng: random.Random) -> list[Arrival]:
    """Draw a load by what the plant says that a request costs among others."""
    tokens, outputs = load.input_len, load.output_len
    cost_s = plant.seconds(tokens, 0, 0, tokens * tokens // 2) + outputs * plant.seconds(0, 8, 8 * tokens, 0) / 8
    at_s, drawn = 0.0, []
    while at_s < seconds:
        num_tokens, num_outputs = (max(4, int(mean * rng.lognormvariate(0.0, 0.5))) for mean in (tokens, outputs))
        drawn.append(Arrival(at_s, min(num_tokens, 3500), min(num_outputs, 500)))
        at_s += rng.gammavariate(load.shape, cost_s / load.share / load.shape)
    return drawn


async def single_requests(session: aiohttp.ClientSession, one: Pod, rng: random.Random) -> list[tuple[int, Answer]]:
    """Send requests of several lengths one after the other; return the lengths of their prompts with the answers."""
    found = []
    for num_tokens in (16, 16, 64, 256, 500) * 6:
        found.append((num_tokens, await send(session, one, rng.choices(VOCABULARY, k=num_tokens), 24)))
    return found


def outside_of(singles: Sequence[tuple[int, Answer]], plant: Plant) -> Outside:
    """Return what single requests took beside the steps that the plant knows of."""
    between_s = statistics.median(
        gap_s - plant.seconds(0, 1, num_tokens + place + 1, 0)
        for num_tokens, answer in singles
        for place, gap_s in enumerate(answer.gaps_s)
    )
    rest_s = [
        (answer.ttft_s or 0.0) - plant.seconds(num_tokens, 0, 0, num_tokens * (num_tokens + 1) // 2)
        for num_tokens, answer in singles
    ]
    slope_s, request_s = np.polyfit([num_tokens for num_tokens, _ in singles], rest_s, 1)
    return Outside(float(request_s), float(slope_s), between_s)


async def ask_all(
    session: aiohttp.ClientSession, one: Pod, load: Sequence[Arrival], rng: random.Random
) -> list[Answer]:
    """Send the requests of a load when they are due."""
    prompts, sent = [rng.choices(VOCABULARY, k=arrival.input_len) for arrival in load], []
    started_s = time.perf_counter()
    for arrival, prompt in zip(load, prompts, strict=True):
        await asyncio.sleep(arrival.at_s - (time.perf_counter() - started_s))
        sent.append(asyncio.create_task(send(session, one, prompt, arrival.output_len)))
    return list(await asyncio.gather(*sent))


async def measure(
    model: Path, loads: dict[str, list[Arrival]], rng: random.Random
) -> tuple[list[tuple[int, Answer]], dict[str, list[Answer]]]:
    """Return what a client of a real server saw: of single requests, and of each load."""
    (one, *_) = pods_of(1)
    with tempfile.TemporaryDirectory() as folder:
        async with replica(one, model, (MAX_SEQS, MAX_TOKENS), Path(folder) / "log"), new_session() as session:
            await warm_up(session, one)
            singles = await single_requests(session, one, rng)
            return singles, {name: await ask_all(session, one, load, rng) for name, load in loads.items()}


def simulate(load: Sequence[Arrival], plant: Plant, noise: float, outside: Outside) -> tuple[list[float], list[float]]:
    """Return TTFT of each request and all gaps, as a client would see them, of several runs."""
    setup = Setup(
        name="fit",
        plant=structs.replace(plant, overhead_s=plant.overhead_s + outside.between_steps_s),
        disturbances=Disturbances(noise=noise),
        kv_tokens=KV_TOKENS,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=MAX_TOKENS,
        objectives=Bounds(),
    )
    ttft_s: list[float] = []
    gaps_s: list[float] = []
    for seed in range(NUM_SIMULATIONS):
        world = World(setup, list(load), Static(), seed)
        world.run()
        for arrival, outcome in zip(load, world.outcomes(), strict=True):
            ttft_s.append((outcome.ttft_s or 0.0) + outside.request_s + outside.prompt_token_s * arrival.input_len)
        gaps_s += [gap_s for one in world.replicas if one is not None for gap_s in one.gaps]
    return ttft_s, gaps_s


def compare(
    load: Sequence[Arrival], answers: Sequence[Answer], told: tuple[list[float], list[float]]
) -> dict[str, Any]:
    problems = [answer.problem for answer in answers if answer.problem]
    if problems:
        raise SystemExit(f"{len(problems)} of {len(answers)} requests failed: {problems[0]}")
    seen = [answer.ttft_s or 0.0 for answer in answers], [gap_s for answer in answers for gap_s in answer.gaps_s]
    measured, simulated = _quantiles(*seen), _quantiles(*told)
    off = {key: round(simulated[key] / measured[key] - 1, 4) for key in measured}
    return {"requests": len(load), "measured": measured, "simulated": simulated, "off": off}


def _quantiles(ttft_s: list[float], gaps_s: list[float]) -> dict[str, float]:
    return {
        f"{what}_p{percent}_s": round(percentile(values, percent / 100) or 0.0, 6)
        for what, values in (("ttft", ttft_s), ("itl", gaps_s))
        for percent in (50, 95)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=160, help="of the load to learn from")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each load to compare")
    parser.add_argument("--seed", type=int, default=1, help="of lengths, times and tokens")
    parser.add_argument("--folder", type=Path, default=Path("out/checkpoints"))
    args = parser.parse_args()
    rng, model = random.Random(args.seed), make_checkpoint(args.folder, "small")
    engine, recorder = make_engine(model)
    learn(engine, 8, rng)
    recorder.steps.clear()  # the first ones touch their memory
    learn(engine, args.requests // 2, rng)
    first = fit(recorder.steps)
    loads = {name: arrivals(load, first, args.seconds, rng) for name, load in LOADS.items()}
    print(f"{len(recorder.steps)} steps: {first}", flush=True)
    singles, answers = asyncio.run(measure(model, loads, rng))
    learn(engine, args.requests - args.requests // 2, rng)
    steps = recorder.steps
    plant, rest = fit(steps[::2]), steps[1::2]
    off = sorted(errors(plant, rest))
    p50, p95 = off[len(off) // 2], off[int(0.95 * len(off))]
    bias = sum(plant.seconds(*step[:4]) for step in rest) / sum(step.seconds for step in rest) - 1
    outside = outside_of(singles, plant)
    print(f"{len(steps)} steps: {plant}\nrelative error p50 {p50:.1%}, p95 {p95:.1%}, of all together {bias:+.1%}")
    print(", ".join(f"{name} {1e6 * value:.1f} us" for name, value in outside._asdict().items()))
    noise = min(0.3, 1.48 * p50)
    compared = {
        name: compare(load, answers[name], simulate(load, plant, noise, outside)) for name, load in loads.items()
    }
    for name, one in compared.items():
        print(
            f"{name}: {one['requests']} requests; " + ", ".join(f"{key} {off:+.1%}" for key, off in one["off"].items())
        )
    worst = max(abs(off) for one in compared.values() for off in one["off"].values())
    print(f"farthest off: {worst:.1%}, {'within' if worst <= TARGET else 'NOT within'} {TARGET:.0%}")
    save(
        "plant",
        {
            "settings": {name: getattr(args, name) for name in ("requests", "seconds", "seed")},
            "num_steps": len(steps),
            "plant": {name: getattr(plant, name) for name in plant.__struct_fields__},
            "relative_error": {"p50": p50, "p95": p95, "of_all_together": bias},
            "outside_of_steps": outside._asdict(),
            "target": TARGET,
            "farthest_off": worst,
            "loads": compared,
        },
    )


if __name__ == "__main__":
    main()
