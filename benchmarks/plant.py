"""What a step of this machine's runtime costs, as a plant of the simulator; how near that is to a real server.

    python benchmarks/plant.py [--seconds 20] [--rounds 4] [--seed 1]

`flyball serve` runs with one engine thread and notes what each step computed and how long it took: the steps that its own model
of step times learns from (recorded_steps.py). A load to learn from, of all sizes, arrives over HTTP in many short parts, with
more and with fewer requests at once. The plant's coefficients are fitted to half of the steps of these parts, by least squares
of the relative error, none negative; the other half says how far off they are. A step's time has in it what the engine process
does between steps, and what the API process and the client beside it cost on the same machine. The first steps after one with a
prompt take longer; by how much is a coefficient too.

Between the parts, three loads take turns to arrive in real time. Before each turn, requests one after the other show what a
request takes outside of the steps: once, and for each token of its prompt (HTTP, JSON). The same arrivals go through the
simulator, and p50 and p95 of TTFT and ITL over all turns of a load are compared, as the client saw them. No request that is
compared has a part in the fit.

The machine may get slower or faster meanwhile. How fast it was in a turn is told by the parts before and behind it: what their
steps took, as a multiple of what the plant says of them.

Takes ten to twenty minutes, on a machine that does nothing else. Writes results/plant.json.
"""

import argparse
import asyncio
import math
import os
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
from flyball_simulation.controllers import Static
from flyball_simulation.plant import Device, Disturbances, Plant
from flyball_simulation.replica import percentile
from flyball_simulation.result import Bounds
from flyball_simulation.workload import Arrival
from flyball_simulation.world import Setup, World
from recorded_steps import STEPS_ENV, Step, Steps

MAX_MODEL_LEN, KV_BYTES, MAX_SEQS, MAX_TOKENS = 4096, 256 << 20, 48, 512
"""As the server of contender.py has them."""
KV_TOKENS = KV_BYTES // (12 * 2 * 4 * 64 * 2)
KNEES = (0, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
WAKE = 4
"""How many steps after a prompt tell how much longer they take for it."""
ROUNDS = 10
"""In which the plant and what its steps take longer after prompts are fitted in turns."""
TARGET = 0.10
"""The simulator is to be this near, as a share of the measured value."""
LEARN = {1: 3, 2: 4, 4: 8, 8: 12, 16: 16, 32: 24}
"""How many requests a part of the load to learn from has, by how many are under way at once."""
REQUESTS_A_TURN = 10
"""Each turn of a load lasts until so many requests are to be expected: a 95th percentile of a few says nothing."""
NUM_SIMULATIONS = 5
"""Runs of the simulator that are taken together: they differ by the noise of the steps only."""


class Outside(NamedTuple):
    """What a request takes outside of the steps, in seconds: once, and for each token of its prompt."""

    request_s: float
    prompt_token_s: float


class Turn(NamedTuple):
    """What came of a load in one of its turns.

    Attributes:
        alone: of requests one after the other before it, with the lengths of their prompts.
        answers: to the arrivals.
        steps: in which they were computed.
        around: steps of the parts before and behind it.
    """

    arrivals: list[Arrival]
    alone: list[tuple[int, Answer]]
    answers: list[Answer]
    steps: list[Step]
    around: list[Step]


async def learn(session: aiohttp.ClientSession, one: Pod, rng: random.Random) -> None:
    """Send requests of all sizes, with more and with fewer of them under way at once."""
    for num_at_once, num_requests in rng.sample(list(LEARN.items()), len(LEARN)):
        seats = asyncio.Semaphore(num_at_once)
        await asyncio.gather(*(_ask(session, one, seats, rng) for _ in range(num_requests)))


async def _ask(session: aiohttp.ClientSession, one: Pod, seats: asyncio.Semaphore, rng: random.Random) -> None:
    prompt = rng.choices(VOCABULARY, k=rng.choice((16, 16, 64, 64, 200, 500, 1500, 3000)))
    num_outputs = rng.choice((4, 10, 20, 60))
    async with seats:
        answer = await send(session, one, prompt, num_outputs)
    if answer.problem:
        raise SystemExit(f"a request of the load to learn from failed: {answer.problem}")


def fit(parts: Sequence[Sequence[Step]]) -> Plant:
    """Return the plant of the knee with the least relative error over every other step of the parts."""
    after_prompt = 0.0
    for _ in range(ROUNDS):
        calm = [step for part in parts for step in _without_wake(part, after_prompt)[::2]]
        plant = min((_fit_knee(calm, knee) for knee in KNEES), key=lambda plant: _mean_error(plant, calm))
        after_prompt = _wake(plant, parts)
    return structs.replace(plant, after_prompt=after_prompt)


def _wake(plant: Plant, parts: Sequence[Sequence[Step]]) -> float:
    """Return ``Plant.after_prompt``, as the first WAKE steps after prompts say."""
    shares = [
        since * (step.seconds / plant.seconds(*step.work) - 1)
        for part in parts
        for step, since in zip(part, _since_prompt(part), strict=True)
        if 0 < since <= WAKE
    ]
    return round(max(0.0, statistics.median(shares)), 4) if shares else 0.0


def _without_wake(steps: Sequence[Step], after_prompt: float) -> list[Step]:
    """Return steps in their order as they would have been long after a prompt."""
    return [
        step._replace(seconds=step.seconds / (1 + after_prompt / since)) if since else step
        for step, since in zip(steps, _since_prompt(steps), strict=True)
    ]


def _since_prompt(steps: Sequence[Step]) -> list[float]:
    """Return how many steps before each one the last prompt was; 0 for steps with one."""
    since, found = math.inf, []
    for step in steps:
        since = 0 if step.work.prefill_tokens else since + 1
        found.append(since)
    return found


def told_s(plant: Plant, steps: Sequence[Step]) -> list[float]:
    """Return what the plant says that steps take, which are in their order."""
    device = Device(plant, Disturbances(noise=0.0), 0, 0)
    return [device.seconds(0.0, *step.work) for step in steps]


def _mean_error(plant: Plant, calm: Sequence[Step]) -> float:
    """Return the mean of the relative errors; a step that was interrupted counts no more than one that is 20 % off."""
    return statistics.fmean(min(abs(plant.seconds(*step.work) / step.seconds - 1), 0.2) for step in calm)


def speed(plant: Plant, steps: Sequence[Step]) -> float:
    """Return how long the steps took together, as a multiple of what the plant says, without those that were interrupted."""
    pairs = [(step.seconds, told) for step, told in zip(steps, told_s(plant, steps), strict=True)]
    middle = statistics.median(took / told for took, told in pairs)
    kept = [(took, told) for took, told in pairs if abs(took / told / middle - 1) <= 0.3]
    return sum(took for took, _ in kept) / sum(told for _, told in kept)


def scaled(plant: Plant, factor: float) -> Plant:
    """Return a plant whose steps take ``factor`` times as long."""
    times = {name: factor * getattr(plant, name) for name in plant.__struct_fields__ if name.endswith("_s")}
    return structs.replace(plant, **times)


def _fit_knee(steps: Sequence[Step], knee: int) -> Plant:
    table = np.array([step.work for step in steps], dtype=np.float64)
    seconds = np.array([step.seconds for step in steps])
    num_tokens = table[:, 0] + table[:, 1]
    tokens = np.maximum(0.0, num_tokens - knee) if knee else table[:, 0]
    columns = np.stack([np.ones(len(steps)), tokens, table[:, 1], table[:, 2], table[:, 3]], axis=1)
    base, token, decode, context, pairs = _nonnegative(columns / seconds[:, None], np.ones(len(steps)))
    if not knee:  # a prompt's token and a decode's have prices of their own
        decode -= token
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


class Load(NamedTuple):
    """Mean lengths, the share of what the device can do, and how evenly requests come: gamma distributed gaps of this shape."""

    input_len: int
    output_len: int
    share: float
    shape: float


LOADS = {
    "chat": Load(220, 30, 0.6, 1.0),
    "long prompts": Load(1800, 30, 0.4, 1.0),
    "code, in bursts": Load(500, 10, 0.5, 0.35),
}
"""In each, far more than 5 % of the gaps have a prompt beside them. Were it about 5 %, chance would decide whether the 95th
percentile is that of the steps with a prompt, or of those without, which are far shorter.
"""


def arrivals(load: Load, plant: Plant, seconds: float, rng: random.Random) -> list[Arrival]:
    """Draw a load of at least so many seconds by what the plant says that a request costs among others."""
    tokens, outputs = load.input_len, load.output_len
    cost_s = plant.seconds(tokens, 0, 0, tokens * tokens // 2) + outputs * plant.seconds(0, 8, 8 * tokens, 0) / 8
    at_s, drawn = 0.0, []
    while at_s < max(seconds, REQUESTS_A_TURN * cost_s / load.share):
        num_tokens, num_outputs = (max(4, int(mean * rng.lognormvariate(0.0, 0.5))) for mean in (tokens, outputs))
        drawn.append(Arrival(at_s, min(num_tokens, 3500), min(num_outputs, 500)))
        at_s += rng.gammavariate(load.shape, cost_s / load.share / load.shape)
    return drawn


async def requests_alone(session: aiohttp.ClientSession, one: Pod, rng: random.Random) -> list[tuple[int, Answer]]:
    """Send requests of several lengths one after the other; return the lengths of their prompts with the answers."""
    found = []
    for num_tokens in (16, 64, 256, 500) * 2:
        found.append((num_tokens, await send(session, one, rng.choices(VOCABULARY, k=num_tokens), 24)))
    return found


def outside_of(alone: Sequence[tuple[int, Answer, Plant]]) -> Outside:
    """Return what requests took until their first token, beside the step that computed their prompts by the plant of then."""
    rest_s = [
        (answer.ttft_s or 0.0) - plant.seconds(num_tokens, 0, 0, num_tokens * (num_tokens + 1) // 2)
        for num_tokens, answer, plant in alone
    ]
    slope_s, request_s = np.polyfit([num_tokens for num_tokens, *_ in alone], rest_s, 1)
    return Outside(float(request_s), float(slope_s))


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


class Seen(NamedTuple):
    """TTFT of each request, and all gaps, as a client saw or would see them."""

    ttft_s: list[float]
    gaps_s: list[float]


def simulate(load: Sequence[Arrival], plant: Plant, noise: float, outside: Outside, told: Seen) -> None:
    """Run a load several times, and add to what a client would see."""
    setup = Setup(
        name="fit",
        plant=plant,
        disturbances=Disturbances(noise=noise),
        kv_tokens=KV_TOKENS,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=MAX_TOKENS,
        objectives=Bounds(),
    )
    for seed in range(NUM_SIMULATIONS):
        world = World(setup, list(load), Static(), seed)
        world.run()
        for arrival, outcome in zip(load, world.outcomes(), strict=True):
            outside_s = outside.request_s + outside.prompt_token_s * arrival.input_len
            told.ttft_s.append((outcome.ttft_s or 0.0) + outside_s)
        for one in world.replicas:
            told.gaps_s.extend([] if one is None else one.gaps)


def _quantiles(seen: Seen) -> dict[str, float]:
    return {
        f"{what}_p{percent}_s": round(percentile(values, percent / 100) or 0.0, 6)
        for what, values in (("ttft", seen.ttft_s), ("itl", seen.gaps_s))
        for percent in (50, 95)
    }


async def observe(
    model: Path, seconds: float, rounds: int, rng: random.Random
) -> tuple[list[list[Step]], dict[str, list[Turn]]]:
    """Return the steps of each part of the load to learn from, and the turns of the loads between them."""
    (one, *_) = pods_of(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ[STEPS_ENV] = str(folder / "steps")
        steps = Steps(folder / "steps")
        server = replica(one, model, (MAX_SEQS, MAX_TOKENS), folder / "log", script="recorded_steps.py")
        async with server, new_session() as session:
            await warm_up(session, one)
            await requests_alone(session, one, rng)  # the first steps touch their memory
            steps.new()

            async def part() -> list[Step]:
                await learn(session, one, rng)
                return steps.new()

            parts: list[list[Step]] = [await part()]
            turns: dict[str, list[Turn]] = {name: [] for name in LOADS}
            first = fit(parts)
            print(f"{len(parts[0])} steps: {first}", flush=True)
            for name in list(LOADS) * rounds:
                load = arrivals(LOADS[name], first, seconds, rng)
                alone = await requests_alone(session, one, rng)
                steps.new()
                answers = await ask_all(session, one, load, rng)
                own = steps.new()
                parts.append(await part())
                turns[name].append(Turn(load, alone, answers, own, parts[-2] + parts[-1]))
    return parts, turns


def compare(turns: Sequence[Turn], plant: Plant, noise: float) -> dict[str, Any]:
    """Return what the client saw over all turns of a load, what the simulator says of it, and how far apart they are."""
    problems = [answer.problem for turn in turns for answer in turn.answers if answer.problem]
    if problems:
        raise SystemExit(f"{len(problems)} requests of a load failed: {problems[0]}")
    took = [speed(plant, turn.around) for turn in turns]
    plants = [scaled(plant, factor) for factor in took]
    outside = outside_of([(*one, then) for turn, then in zip(turns, plants, strict=True) for one in turn.alone])
    seen, told = Seen([], []), Seen([], [])
    for turn, then in zip(turns, plants, strict=True):
        for answer in turn.answers:
            seen.ttft_s.append(answer.ttft_s or 0.0)
            seen.gaps_s.extend(answer.gaps_s)
        simulate(turn.arrivals, then, noise, outside, told)
    measured, simulated = _quantiles(seen), _quantiles(told)
    return {
        "requests": len(seen.ttft_s),
        "steps_took": [round(factor, 4) for factor in took],
        "steps_took_themselves": [round(speed(plant, turn.steps), 4) for turn in turns],
        "outside_of_steps": outside._asdict(),
        "measured": measured,
        "simulated": simulated,
        "off": {key: round(simulated[key] / measured[key] - 1, 4) for key in measured},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each turn of a load to compare, at least")
    parser.add_argument("--rounds", type=int, default=4, help="in which each load has its turn")
    parser.add_argument("--seed", type=int, default=1, help="of lengths, times and tokens")
    parser.add_argument("--folder", type=Path, default=Path("out/checkpoints"))
    args = parser.parse_args()
    rng, model = random.Random(args.seed), make_checkpoint(args.folder, "small")
    parts, turns = asyncio.run(observe(model, args.seconds, args.rounds, rng))
    plant = fit(parts)
    told = [
        seconds for part in parts for seconds in told_s(plant, part)[1::2]
    ]  # every other step: the fit has not seen them
    took = [step.seconds for part in parts for step in part[1::2]]
    off = sorted(abs(one / other - 1) for one, other in zip(told, took, strict=True))
    p50, p95, bias = off[len(off) // 2], off[int(0.95 * len(off))], sum(told) / sum(took) - 1
    print(f"{sum(map(len, parts))} steps: {plant}")
    print(f"relative error p50 {p50:.1%}, p95 {p95:.1%}, of all together {bias:+.1%}")
    compared = {}
    for name in LOADS:
        one = compared[name] = compare(turns[name], plant, min(0.3, 1.48 * p50))
        print(f"{name}: {one['requests']} requests; outside of steps {one['outside_of_steps']}")
        print(f"  around its turns steps took {one['steps_took']} times as long as the plant says", end="")
        print(f", in them {one['steps_took_themselves']}")
        print("  " + ", ".join(f"{key} {off:+.1%}" for key, off in one["off"].items()))
    worst = max(abs(off) for one in compared.values() for off in one["off"].values())
    print(f"farthest off: {worst:.1%}, {'within' if worst <= TARGET else 'NOT within'} {TARGET:.0%}")
    save(
        "plant",
        {
            "settings": {name: getattr(args, name) for name in ("seconds", "rounds", "seed")},
            "num_steps": sum(map(len, parts)),
            "plant": {name: getattr(plant, name) for name in plant.__struct_fields__},
            "relative_error": {"p50": p50, "p95": p95, "of_all_together": bias},
            "target": TARGET,
            "farthest_off": worst,
            "loads": compared,
        },
    )


if __name__ == "__main__":
    main()
