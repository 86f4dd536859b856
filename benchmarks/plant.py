"""What a step of this machine's runtime costs, as a plant of the simulator; and how well the simulator then tells a run.

    python benchmarks/plant.py [--shape small] [--requests 600]

First a mixed load, under limits that change all the time, is run through the engine, and each step's work and time are
noted. The plant's coefficients are fitted to half of the steps, by least squares of the relative error, none negative; the
other half says how far off they are. Then three loads arrive in real time, the same arrivals go through the simulator, and p50
and p95 of TTFT and ITL are compared. Writes results/plant.json. `cpu` in simulation/flyball_simulation/plant.py is that fit.
"""

import argparse
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from common import make_checkpoint, save
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
from flyball_simulation.world import Setup, simulate

MAX_MODEL_LEN, KV_TOKENS, MAX_SEQS, MAX_TOKENS = 4096, 65_536, 48, 512
KNEES = (0, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
TARGET = 0.10
"""The simulator is to be this near, as a share of the measured value."""


class Step(NamedTuple):
    prefill_tokens: int
    decodes: int
    context_tokens: int
    attention_pairs: int
    seconds: float


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


@dataclass
class Seen:
    """What a request saw, in seconds."""

    arrival_s: float
    first_s: float | None = None
    last_s: float = 0.0


def make_engine(checkpoint: Path) -> tuple[Engine, Recorder]:
    config = EngineConfig(
        model=str(checkpoint),
        served_model_name="m",
        dtype="bfloat16",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=MAX_TOKENS,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=KV_TOKENS * 12 * 2 * 4 * 64 * 2,
        fair_share=False,
    )
    engine = start_engine(config)
    recorder = engine._executor = Recorder(engine._executor)
    return engine, recorder


def request(index: int, arrival: Arrival, rng: random.Random) -> Request:
    return Request(
        request_id=str(index),
        prompt_token_ids=[rng.randrange(10, 8000) for _ in range(arrival.input_len)],
        sampling=SamplingParams(temperature=0.0, max_tokens=arrival.output_len, ignore_eos=True),
    )


def learn(engine: Engine, num_requests: int) -> None:
    """Run a load of all sizes, under a token budget and a number of sequences that keep changing."""
    rng = random.Random(0)
    waiting = [
        Arrival(0.0, rng.choice((16, 64, 200, 500, 1500, 3000)), rng.choice((4, 20, 80))) for _ in range(num_requests)
    ]
    revision, index = 0, 0
    while waiting or engine.has_work():
        if revision % 25 == 0:
            num_seqs = rng.choice((1, 2, 4, 8, 16, 32, MAX_SEQS))
            budget = max(num_seqs, rng.choice((16, 48, 96, 200, 350, MAX_TOKENS)))
            change = LimitsChange(max_num_seqs=num_seqs, max_num_batched_tokens=budget)
            engine.post_limits(LimitsUpdate(revision=revision + 1, limits=change))
        revision += 1
        while waiting and engine.scheduler.num_waiting < 4:
            engine.submit(request(index, waiting.pop(), rng))
            index += 1
        engine.step()
    everything = LimitsChange(max_num_seqs=MAX_SEQS, max_num_batched_tokens=MAX_TOKENS)
    engine.post_limits(LimitsUpdate(revision=revision + 1, limits=everything))


def fit(steps: list[Step]) -> Plant:
    """Return the plant of the knee with the least relative error."""
    return min((_fit_knee(steps, knee) for knee in KNEES), key=lambda plant: error(plant, steps))


def _fit_knee(steps: list[Step], knee: int) -> Plant:
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


def error(plant: Plant, steps: list[Step]) -> float:
    """Return the median relative error."""
    return statistics.median(errors(plant, steps))


def errors(plant: Plant, steps: list[Step]) -> list[float]:
    return [abs(plant.seconds(*step[:4]) - step.seconds) / step.seconds for step in steps]


LOADS = {
    "chat": (Arrival(0.0, 220, 60), 0.6),
    "long prompts": (Arrival(0.0, 1800, 30), 0.5),
    "code, in bursts": (Arrival(0.0, 500, 10), 0.5),
}
"""Mean lengths, and the load as a share of what the device can do."""


def arrivals(name: str, plant: Plant, seconds: float) -> list[Arrival]:
    """Draw a load; bursts are gamma distributed gaps of shape 0.35."""
    (_, mean_in, mean_out, _), load = LOADS[name]
    cost_s = plant.seconds(mean_in, 0, 0, mean_in * mean_in // 2) + mean_out * plant.seconds(0, 8, 8 * mean_in, 0) / 8
    rng, at_s, drawn = random.Random(name), 0.0, []
    shape = 0.35 if "bursts" in name else 1.0
    while at_s < seconds:
        size = [max(4, int(mean * rng.lognormvariate(0.0, 0.5))) for mean in (mean_in, mean_out)]
        drawn.append(Arrival(at_s, min(size[0], 3500), min(size[1], 500)))
        at_s += rng.gammavariate(shape, cost_s / load / shape)
    return drawn


def live(engine: Engine, load: list[Arrival]) -> tuple[list[float], list[float]]:
    """Run a load as it arrives; return TTFT of each request and all gaps."""
    rng, seen, gaps = random.Random(1), {}, []
    requests = [request(index, one, rng) for index, one in enumerate(load)]
    start_s, num_sent = time.perf_counter(), 0
    while num_sent < len(load) or engine.has_work():
        now_s = time.perf_counter() - start_s
        while num_sent < len(load) and load[num_sent].at_s <= now_s:
            seen[str(num_sent)] = Seen(load[num_sent].at_s)
            engine.submit(requests[num_sent])
            num_sent += 1
        if not engine.has_work():
            time.sleep(max(0.0, min(0.001, load[num_sent].at_s - now_s)))
            continue
        output = engine.step()
        now_s = time.perf_counter() - start_s
        for request_id in output.request_ids:
            one = seen[request_id]
            if one.first_s is None:
                one.first_s = now_s
            else:
                gaps.append(now_s - one.last_s)
            one.last_s = now_s
    return [one.first_s - one.arrival_s for one in seen.values() if one.first_s is not None], gaps


def compare(name: str, engine: Engine, plant: Plant, noise: float, between_s: float, seconds: float) -> dict[str, Any]:
    load = arrivals(name, plant, seconds)
    ttft, gaps = live(engine, load)
    setup = Setup(
        name="fit",
        plant=Plant(
            **{key: getattr(plant, key) for key in plant.__struct_fields__}
            | {"overhead_s": plant.overhead_s + between_s}
        ),
        disturbances=Disturbances(noise=noise),
        kv_tokens=KV_TOKENS,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=MAX_TOKENS,
        objectives=Bounds(),
    )
    told = simulate(setup, load, Static(), label="replay", seed=0, duration_s=seconds)
    measured = {
        "ttft_p50_s": percentile(ttft, 0.5),
        "ttft_p95_s": percentile(ttft, 0.95),
        "itl_p50_s": percentile(gaps, 0.5),
        "itl_p95_s": percentile(gaps, 0.95),
    }
    simulated = {key: getattr(told, key) for key in measured}
    off = {key: simulated[key] / measured[key] - 1 for key in measured}
    print(f"{name}: {len(load)} requests; " + ", ".join(f"{key} {value:+.1%}" for key, value in off.items()))
    return {"requests": len(load), "measured": measured, "simulated": simulated, "off": off}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="small")
    parser.add_argument("--requests", type=int, default=600, help="of the load to learn from")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each load to compare")
    parser.add_argument("--folder", type=Path, default=Path("out/checkpoints"))
    args = parser.parse_args()
    engine, recorder = make_engine(make_checkpoint(args.folder, args.shape))
    started_s = time.perf_counter()
    learn(engine, args.requests)
    elapsed_s = time.perf_counter() - started_s
    steps = recorder.steps[20:]
    plant, rest = fit(steps[::2]), steps[1::2]
    off = sorted(errors(plant, rest))
    between_s = max(0.0, (elapsed_s - sum(step.seconds for step in recorder.steps)) / len(recorder.steps))
    print(f"{len(steps)} steps: {plant}")
    p50, p95 = off[len(off) // 2], off[int(0.95 * len(off))]
    print(f"relative error p50 {p50:.1%}, p95 {p95:.1%}; {between_s * 1e6:.0f} us between steps")
    noise = min(0.3, 1.48 * p50)
    compared = {name: compare(name, engine, plant, noise, between_s, args.seconds) for name in LOADS}
    save(
        "plant",
        {
            "shape": args.shape,
            "num_steps": len(steps),
            "plant": {name: getattr(plant, name) for name in plant.__struct_fields__},
            "between_steps_s": between_s,
            "relative_error": {"p50": p50, "p95": p95},
            "target": TARGET,
            "loads": compared,
        },
    )


if __name__ == "__main__":
    main()
