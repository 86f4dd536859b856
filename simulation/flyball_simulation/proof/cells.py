"""What the contenders run on: a cell is a device, a KV size, a load and objectives.

The rates are shares of what the best fixed limits serve with 95 % good requests, which was found by bisection once and is
written down here, so that a cell stays the same cell.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from msgspec import Struct, structs

from flyball_protocol import BootPrior, StepModel
from flyball_protocol import Limits as LiveLimits
from flyball_simulation.oracle import Limits
from flyball_simulation.plant import PROFILES, Disturbances, Shape, SlowDown, shaped
from flyball_simulation.result import Bounds
from flyball_simulation.scrape import Faults, Restart, Window
from flyball_simulation.workload import Arrival, Phase, Workload, burst, from_trace, generate, until
from flyball_simulation.world import Setup

SEEDS = (1, 2, 3, 4, 5)
"""For work on the tuner."""

HELD_OUT_SEEDS = (101, 102, 103, 104, 105)
"""For the proof alone: nothing may be chosen by them."""

HELD_OUT_TRACES = {
    "azure-conversation": ("AzureLLMInferenceTrace_conv.csv.gz", 1.2),
    "azure-code": ("AzureLLMInferenceTrace_code.csv.gz", 1.0),
    "mooncake": ("mooncake_conversation_trace.jsonl.gz", 0.2),
}
"""Recorded traffic, by file and speed, for the proof alone. Drawn workloads have their quantiles, and not their arrivals."""

MINUTES = 15.0
SHORT_MINUTES = 10.0
"""Of cells that show how much is served, and not how soon."""

LONG_MINUTES = 20.0
"""Of cells in which something happens."""


class Bursts(Struct, frozen=True, kw_only=True):
    """``count`` times ``size`` equal requests within 2 s, spread over the run."""

    count: int
    size: int
    input_len: int
    output_len: int


class Cell(Struct, frozen=True, kw_only=True):
    """One line of the matrix.

    Attributes:
        phases: the drawn load; their seconds are shares of the run.
        trace: a file in place of phases, and its speed.
        load: of the capacity, for the reader.
        grid: for the oracle to try; all of its own when empty.
    """

    name: str
    setup: Setup
    phases: tuple[Phase, ...] = ()
    trace: tuple[str, float] | None = None
    bursts: Bursts | None = None
    load: float = 0.95
    minutes: float = MINUTES
    grid: tuple[Limits, ...] = ()

    @property
    def seconds(self) -> float:
        return 60 * self.minutes

    def shift_times_s(self) -> list[float]:
        """Return when each phase begins; the first at 0."""
        starts = [0.0]
        for phase in self.phases[:-1]:
            starts.append(starts[-1] + phase.seconds * self.seconds)
        return starts

    def workload(self, seed: int) -> Workload:
        if self.trace is not None:
            path, speed = self.trace
            return until(from_trace(path, speed=speed, seed=seed), self.seconds)
        phases = [structs.replace(one, seconds=one.seconds * self.seconds) for one in self.phases]
        drawn = [one for one in generate(phases, seed) if one.input_len + one.output_len < self.setup.max_model_len]
        if self.bursts is None:
            return drawn
        return sorted([*drawn, *_bursts(self.bursts, self.seconds)])


def _bursts(bursts: Bursts, seconds: float) -> list[Arrival]:
    every = seconds / (bursts.count + 1)
    return [
        one
        for i in range(bursts.count)
        for one in burst((i + 1) * every, bursts.size, 2.0, bursts.input_len, bursts.output_len)
    ]


def a100(kv_tokens: int, *, ttft_s: float = 2.0, itl_s: float = 0.05, shape: Shape | None = None) -> Setup:
    profile = PROFILES["a100"]
    return Setup(
        name="a100",
        plant=shaped(profile.plant, shape),
        kv_tokens=kv_tokens,
        max_model_len=min(20_480, kv_tokens // 16 * 16),
        objectives=Bounds(ttft_s=ttft_s, itl_s=itl_s),
    )


CAPACITY = {
    "chat390": 7.8,
    "chat390, ITL 25 ms": 7.5,
    "chat390, ITL 100 ms": 8.3,
    "chat43": 5.5,
    "code90": 4.2,
    "long390": 0.97,
    "h200": 22.5,
    "h200, ITL 15 ms": 21.8,
    "h200, ITL 60 ms": 23.9,
    "l4": 1.55,
    "cpu": 0.65,
}
"""Requests a second that the best fixed limits serve with 95 % good requests."""

CHAT_390, CHAT_43, CODE_90 = a100(390_000), a100(43_008), a100(90_000)
LONG_390 = a100(390_000, ttft_s=4.0)
H200 = structs.replace(
    CHAT_390,
    name="h200",
    plant=PROFILES["h200"].plant,
    objectives=Bounds(ttft_s=2.0, itl_s=0.03),
    max_num_seqs=512,
    max_num_batched_tokens=4096,
)
L4 = structs.replace(CHAT_43, name="l4", plant=PROFILES["l4"].plant, objectives=Bounds(ttft_s=4.0, itl_s=0.12))
CPU = structs.replace(CHAT_43, name="cpu", plant=PROFILES["cpu"].plant, objectives=Bounds(ttft_s=4.0, itl_s=0.1))


def with_itl(setup: Setup, itl_s: float) -> Setup:
    """Return a setup with another objective for the time between tokens."""
    return structs.replace(setup, objectives=structs.replace(setup.objectives, itl_s=itl_s))


def steady(name: str, setup: Setup, mix: str, capacity: str, load: float) -> Cell:
    phase = Phase(mix=mix, rate=round(load * CAPACITY[capacity], 3), seconds=1.0)
    minutes = MINUTES if load == 0.95 else SHORT_MINUTES
    return Cell(name=f"{name}, load {load:g}", setup=setup, phases=(phase,), load=load, minutes=minutes)


def matrix() -> list[Cell]:
    """Return the cells of the targets on goodput."""
    cells = [
        steady(name, setup, mix, capacity, load)
        for name, setup, mix, capacity in (
            ("chat, KV 390k", CHAT_390, "chat", "chat390"),
            ("chat, KV 43k", CHAT_43, "chat", "chat43"),
            ("code, KV 90k", CODE_90, "code", "code90"),
            ("long, KV 390k", LONG_390, "long", "long390"),
        )
        for load in (0.7, 0.95, 1.2)
    ]
    return [
        *cells,
        *(
            steady(f"chat, KV 390k, {itl}", with_itl(CHAT_390, itl_s), "chat", f"chat390, {itl}", 0.95)
            for itl, itl_s in (("ITL 25 ms", 0.025), ("ITL 100 ms", 0.1))
        ),
        steady("chat, H200, ITL 30 ms", H200, "chat", "h200", 0.95),
        *(
            steady(f"chat, H200, {itl}", with_itl(H200, itl_s), "chat", f"h200, {itl}", 0.95)
            for itl, itl_s in (("ITL 15 ms", 0.015), ("ITL 60 ms", 0.06))
        ),
        steady("chat, L4, ITL 120 ms", L4, "chat", "l4", 0.95),
        steady("chat, CPU, ITL 100 ms", CPU, "chat", "cpu", 0.95),
        shift(),
        overload(),
        bursts(),
        co_tenant(),
        noisy(),
        structs.replace(
            steady("chat, interaction", a100(390_000, shape="interaction"), "chat", "chat390", 0.7), load=0.7
        ),
        two_replicas(),
        *(wrong_prior(factor) for factor in (0.5, 2.0)),
    ]


def shift() -> Cell:
    rates = (("chat", "chat390"), ("long", "long390"), ("code", "code90"), ("chat", "chat390"))
    return Cell(
        name="shift chat, long, code, chat",
        setup=LONG_390,
        phases=tuple(Phase(mix=mix, rate=0.95 * CAPACITY[name], seconds=0.25) for mix, name in rates),
        minutes=32.0,
    )


def overload() -> Cell:
    """All contenders run ``edf``; who posts objectives has them as deadlines, and without any the order is that of arrival."""
    rate = CAPACITY["chat390"]
    return Cell(
        name="overload 1.5x for a third",
        setup=structs.replace(CHAT_390, scheduling_policy="edf"),
        phases=tuple(Phase(mix="chat", rate=load * rate, seconds=1 / 3) for load in (0.8, 1.5, 0.8)),
        minutes=30.0,
        load=1.5,
    )


def bursts() -> Cell:
    quiet = Phase(mix="chat", rate=0.5 * CAPACITY["chat390"], seconds=1.0)
    return Cell(
        name="12 bursts of 60 long prompts",
        setup=structs.replace(LONG_390, objectives=Bounds(ttft_s=10.0, itl_s=0.05)),
        phases=(quiet,),
        bursts=Bursts(count=12, size=60, input_len=2000, output_len=60),
        minutes=30.0,
        load=0.5,
    )


def co_tenant() -> Cell:
    """The device is 1.6 times as slow in the middle third."""
    slow = SlowDown(factor=1.6, start_s=400.0, end_s=800.0)
    setup = structs.replace(CHAT_390, disturbances=Disturbances(slow_downs=(slow,)))
    return structs.replace(steady("chat, co-tenant 1.6x", setup, "chat", "chat390", 0.6), minutes=LONG_MINUTES)


def noisy() -> Cell:
    setup = structs.replace(CHAT_390, disturbances=Disturbances(noise=0.25, hiccup_share=0.0005))
    return structs.replace(steady("chat, noise 25 % and hiccups", setup, "chat", "chat390", 0.7), minutes=LONG_MINUTES)


def two_replicas() -> Cell:
    """Scraping as it is on a bad day: jitter, one answer in five lost, a replica that dies."""
    faults = Faults(jitter_s=3.0, loss=0.2, restarts=(Restart(at_s=600.0, replica=1, down_s=40.0),))
    setup = structs.replace(CHAT_43, replicas=2, faults=faults)
    phase = Phase(mix="chat", rate=1.4 * CAPACITY["chat43"], seconds=1.0, num_clients=8, swing=0.2)
    return Cell(
        name="2 replicas, lossy scraping, a restart", setup=setup, phases=(phase,), load=0.7, minutes=LONG_MINUTES
    )


def wrong_prior(factor: float) -> Cell:
    cell = steady(f"chat, prior off by {factor:g}x", CHAT_390, "chat", "chat390", 0.95)
    prior = BootPrior(
        revision=1,
        limits=LiveLimits(
            max_num_seqs=CHAT_390.max_num_seqs,
            kv_cache_fraction=1.0,
            max_num_batched_tokens=CHAT_390.max_num_batched_tokens,
        ),
        step_model=true_model(factor),
        key=CHAT_390.key,
    )
    return structs.replace(cell, setup=structs.replace(cell.setup, prior=prior))


def true_model(factor: float = 1.0) -> StepModel:
    """Return what a settled learner knows of the A100, times a factor."""
    plant = PROFILES["a100"].plant
    return StepModel(
        base_s=factor * (plant.overhead_s + plant.weights_s),
        token_s=factor * plant.token_s,
        knee_tokens=plant.weights_s / plant.token_s,
        context_token_s=factor * plant.context_token_s,
        attention_pair_s=factor * plant.attention_pair_s,
        interaction_s=0.0,
        residual_p50=0.03,
        residual_p95=0.1,
        num_steps=10_000,
        covariance=(),
        settled=True,
    )


def held_out(folder: Path) -> list[Cell]:
    """Return the cells of the recorded traces that are in ``folder``."""
    setups = {
        "azure-conversation": CHAT_43,
        "azure-code": CODE_90,
        "mooncake": structs.replace(LONG_390, max_model_len=131_072),
    }
    return [
        Cell(name=f"trace {name}", setup=setups[name], trace=(str(folder / file), speed))
        for name, (file, speed) in HELD_OUT_TRACES.items()
        if (folder / file).exists()
    ]


def smoke() -> list[Cell]:
    """Return two small cells, for a test of seconds."""
    even = structs.replace(CHAT_43, max_num_seqs=64, max_num_batched_tokens=1024)
    phase = Phase(mix="code", rate=2.0, seconds=1.0)
    grid = ((64, 256), (64, 64), (64, 1024), (8, 64))
    return [
        Cell(name="smoke", setup=even, phases=(phase,), minutes=0.7, load=0.5, grid=grid),
        Cell(
            name="smoke, shift",
            setup=structs.replace(even, faults=Faults(silences=(Window(start_s=10.0, end_s=20.0),))),
            phases=(structs.replace(phase, seconds=0.5), Phase(mix="chat", rate=1.0, seconds=0.5)),
            minutes=0.7,
            load=0.5,
            grid=grid,
        ),
    ]


def turns_back(values: Sequence[float], times_s: Sequence[float], within_s: float = 600.0) -> int:
    """Return how often a limit went from A to B and back to A within a time."""
    count = 0
    for (first, start_s), (_, _), (last, end_s) in zip(
        pairwise_points(values, times_s),
        pairwise_points(values, times_s)[1:],
        pairwise_points(values, times_s)[2:],
        strict=False,
    ):
        count += first == last and end_s - start_s <= within_s
    return count


def pairwise_points(values: Sequence[float], times_s: Sequence[float]) -> list[tuple[float, float]]:
    """Return values with their times, where they changed."""
    points = list(zip(values, times_s, strict=True))
    return points[:1] + [after for before, after in pairwise(points) if before[0] != after[0]]
