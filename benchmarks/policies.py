"""Scheduling policies side by side, in the simulator: the real engine on the model of an A100.

    python benchmarks/policies.py [--traces FOLDER] [--minutes 20] [--seed 1]

Limits are fixed; the objectives are posted, so they are the deadlines of ``edf``. Loads: 1.5 times what the best fixed
limits serve, for a third of the time; a batch of 1,500 requests in 60 groups that share a prefix, all there at the start; with
--traces, the recorded ones of Azure and Mooncake. Time is simulated, so nothing else on the machine changes the figures.
Writes results/policies.json.
"""

import argparse
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from common import save
from flyball_operator.tuning import PodEvidence
from flyball_protocol import LimitsChange, LimitsUpdate, Objectives
from flyball_simulation.proof.cells import CHAT_390, CODE_90, HELD_OUT_TRACES, LONG_390, overload
from flyball_simulation.result import Result
from flyball_simulation.workload import Arrival, Workload, from_trace, until
from flyball_simulation.world import Setup, World

POLICIES = ("fcfs", "sjf", "srpf", "edf", "dpr")
SETUPS = {"azure-conversation": CHAT_390, "azure-code": CODE_90, "mooncake": LONG_390}
"""The objectives of the cells with such traffic."""


class Posted:
    """Posts a step target and the objectives once, and leaves the limits alone otherwise."""

    interval_s = 0.001
    reads_evidence = True
    paces = True
    reason = "Static"

    def __init__(self, setup: Setup) -> None:
        bounds = setup.objectives
        assert bounds.itl_s is not None
        self._update = LimitsUpdate(
            revision=1,
            limits=LimitsChange(step_time_target_ms=900 * bounds.itl_s),
            objectives=Objectives(ttft_s=bounds.ttft_s, itl_s=bounds.itl_s),
        )

    def round(self, evidence: Sequence[PodEvidence], now_s: float) -> Mapping[str, LimitsUpdate]:
        self.interval_s = 1e9
        return {one.pod: self._update for one in evidence}


def batch(seed: int) -> Workload:
    """Each request has a prefix of 2048 tokens that 25 share, and 512 of its own. A third of them answers at length."""
    rng = random.Random(seed)
    requests = [
        Arrival(0.0, 2560, rng.randint(400, 800) if number % 3 == 0 else rng.randint(5, 60), (*prefix, 10_000 + number))
        for number in range(1500)
        for prefix in [tuple(range(10 * (number % 60), 10 * (number % 60) + 4))]
    ]
    rng.shuffle(requests)
    return requests


def loads(args: argparse.Namespace) -> dict[str, tuple[Setup, Workload]]:
    cell = structs.replace(overload(), minutes=args.minutes)
    found = {
        "overload 1.5x for a third": (cell.setup, cell.workload(args.seed)),
        "batch with shared prefixes": (
            structs.replace(CHAT_390, kv_tokens=120_000, max_model_len=8192),
            batch(args.seed),
        ),
    }
    for name, (file, speed) in HELD_OUT_TRACES.items() if args.traces else ():
        arrivals = until(from_trace(str(args.traces / file), speed=speed, seed=args.seed), 60 * args.minutes)
        most = SETUPS[name].max_model_len
        found[name] = (SETUPS[name], [one for one in arrivals if one.input_len + one.output_len < most])
    return found


def figures(result: Result, world: World) -> dict[str, Any]:
    (replica,) = world.replicas
    assert replica is not None
    waits = [one.ttft_s for one in replica.outcomes if one.ttft_s is not None]
    totals = replica.measurements.counts.totals
    return {
        "num_requests": result.num_requests,
        "share_good": result.share_good,
        "ttft_p50_s": result.ttft_p50_s,
        "ttft_p95_s": result.ttft_p95_s,
        "largest_ttft_s": max(waits),
        "itl_p95_s": result.itl_p95_s,
        "seconds": replica.end_s,
        "counts": {str(name): count for name, count in totals.items() if isinstance(name, str)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, help="folder with the recorded traces")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for name, (setup, workload) in loads(args).items():
        for policy in POLICIES:
            one = structs.replace(setup, scheduling_policy=policy, max_num_batched_tokens=2048)
            world = World(one, workload, Posted(one), args.seed)
            world.run()
            found = figures(world.result(policy, 60 * args.minutes, 1.0), world)
            results.setdefault(name, {})[policy] = found
            print(
                f"{name}, {policy}: {found['share_good']:.3f} good, TTFT p50 {found['ttft_p50_s']:.2f} s, p95 "
                f"{found['ttft_p95_s']:.2f} s, largest {found['largest_ttft_s']:.1f} s, ITL p95 "
                f"{1000 * found['itl_p95_s']:.1f} ms, {found['seconds']:.0f} s in all",
                flush=True,
            )
    save("policies", {"minutes": args.minutes, "seed": args.seed, "loads": results})


if __name__ == "__main__":
    main()
