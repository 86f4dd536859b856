"""Situations in which the first tuner did the wrong thing, each with what a tuner has to do there."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from flyball_protocol import BootPrior, Limits
from flyball_simulation.memory import Memory, Taken
from flyball_simulation.plant import CpuLimit, Disturbances, Plant, SlowDown
from flyball_simulation.proof import contenders
from flyball_simulation.proof.cells import CAPACITY, CHAT_43, CHAT_390, LONG_MINUTES, Bursts, Cell, steady, turns_back
from flyball_simulation.proof.contenders import Run
from flyball_simulation.result import Bounds
from flyball_simulation.scrape import Faults, Window
from flyball_simulation.workload import Phase
from flyball_simulation.world import Setup


class Verdict(NamedTuple):
    """Whether a run did what it had to, and the figures."""

    passed: bool
    figures: str


class Scenario(NamedTuple):
    """A situation.

    Attributes:
        demand: what has to come of it, in words.
    """

    name: str
    demand: str
    cell: Cell
    judge: Callable[[Run, Cell], Verdict]


def judge(scenario: Scenario, contender: str, seed: int = 1) -> Verdict:
    """Run a contender in a scenario."""
    return scenario.judge(contenders.run(scenario.cell, contender, seed), scenario.cell)


def run(place: int, contender: str, seed: int, folder: Path) -> Run:
    """Run a contender in one of ``scenarios()``, or take the run from ``folder``; for another process."""
    return contenders.cached(scenarios()[place].cell, contender, seed, None, folder)


def scenarios() -> list[Scenario]:
    return [
        Scenario(
            "an objective between two histogram edges",
            "gaps of 52 ms under an objective of 60 ms are no reason to cut sequences or tokens",
            between_edges(),
            lambda run, cell: _all_of(_unchanged(run, cell), _at_least(run, 0.99)),
        ),
        Scenario(
            "a cut that gains nothing",
            "one gap in ten is too long whatever the limits are, so the limits end above 70 % of where they began",
            useless_cut(),
            _keeps_its_limits,
        ),
        Scenario(
            "one replica of two is slow for reasons of its own",
            "the other replica's limits end above 70 % of where they began",
            slow_neighbour(),
            _keeps_its_limits,
        ),
        Scenario(
            "a CPU limit",
            "it interrupts one step in ten for longer than the objective, so the limits end above 70 % of where they began",
            cpu_limit(),
            _keeps_its_limits,
        ),
        Scenario(
            "too little KV memory",
            "85 % of the requests of the last 10 minutes are good; the best fixed limits reach 100 %",
            structs.replace(steady("chat, KV 43k", CHAT_43, "chat", "chat43", 0.95), minutes=LONG_MINUTES),
            lambda run, cell: _late(run, 0.85, 600.0),
        ),
        Scenario(
            "a start at the optimum, under KV pressure",
            "a start with the best limits is left as good as it is: 98 % of all requests are good (under those limits: all)",
            at_the_optimum(),
            lambda run, cell: _at_least(run, 0.98),
        ),
        Scenario(
            "decodes alone take too long",
            "where sequences are too many, they are cut: from the fifth minute on, 90 % of the requests are good",
            decodes_alone(),
            lambda run, cell: _late(run, 0.90, cell.seconds - 240.0),
        ),
        Scenario(
            "a start with far too few sequences",
            "with 4 instead of 60, twice as many would gain nothing: from the fifth minute on, 90 % of the requests are good",
            few_sequences(),
            lambda run, cell: _late(run, 0.90, cell.seconds - 240.0),
        ),
        Scenario(
            "a cold start",
            "from the fourth minute on, 90 % of the requests are good",
            structs.replace(steady("chat, KV 390k", CHAT_390, "chat", "chat390", 0.7), minutes=LONG_MINUTES),
            lambda run, cell: _late(run, 0.90, cell.seconds - 180.0),
        ),
        Scenario(
            "an hour of even load near the limit",
            "at most 6 changes an hour after the first 15 minutes, and no way there and back within 10 minutes",
            structs.replace(steady("chat, an hour", CHAT_390, "chat", "chat390", 0.9), minutes=60.0),
            _calm,
        ),
        Scenario(
            "the share over the objective is not monotone in the token budget",
            "two replicas short of KV memory: 85 % of the last 10 minutes' requests are good",
            not_monotone(),
            lambda run, cell: _late(run, 0.85, 600.0),
        ),
        Scenario(
            "metrics are lost for 10 minutes",
            "nothing is raised meanwhile, and 95 % as many requests are good as in the 5 minutes before",
            metrics_lost(),
            _holds,
        ),
        Scenario(
            "the operator is down for 10 minutes",
            "nothing gets worse: 95 % as many requests are good as in the 5 minutes before",
            operator_down(),
            _holds,
        ),
        Scenario(
            "evidence that is not a number",
            "nothing is raised on it, and 95 % as many requests are good as in the 5 minutes before",
            not_a_number(),
            _holds,
        ),
        Scenario(
            "a healthy deployment beside a busy neighbour",
            "for three minutes steps take 2.7 times as long, which still meets the objectives: no change after the first "
            "two minutes, and 95 % of the requests are good",
            healthy(),
            _left_alone,
        ),
        Scenario(
            "memory for the KV cache that comes and goes",
            "the KV share grows while requests wait for blocks, shrinks while a neighbour takes the memory, and grows again",
            memory_moves(),
            _share_follows_memory,
        ),
    ]


def between_edges() -> Cell:
    """A step takes 52 ms, and 1 ms more or less."""
    plant = Plant(
        shape="knee", overhead_s=0.002, weights_s=0.050, token_s=4e-5, context_token_s=0.0, attention_pair_s=0.0
    )
    setup = Setup(
        name="a100",
        plant=plant,
        disturbances=Disturbances(noise=0.01),
        kv_tokens=390_000,
        max_model_len=20_480,
        max_num_batched_tokens=1024,
        objectives=Bounds(ttft_s=4.0, itl_s=0.060),
    )
    phase = Phase(mix="chat", rate=2.0, seconds=1.0)
    return Cell(name="gaps of 52 ms", setup=setup, phases=(phase,), load=0.5, minutes=LONG_MINUTES)


def useless_cut() -> Cell:
    """One step in ten takes four times as long; alone it is over the objective, so no limits help."""
    setup = structs.replace(
        CHAT_390,
        replicas=4,
        disturbances=Disturbances(hiccup_share=0.10, hiccup_factor=6.0),
        objectives=Bounds(ttft_s=4.0, itl_s=0.055),
        max_num_seqs=64,
        max_num_batched_tokens=512,
    )
    phase = Phase(mix="chat", rate=8.0, seconds=1.0)
    return Cell(name="one gap in ten", setup=setup, phases=(phase,), minutes=51.0, load=0.3)


def slow_neighbour() -> Cell:
    slow = SlowDown(factor=2.5, start_s=60.0, end_s=1e9, replica=1)
    setup = structs.replace(
        CHAT_390,
        replicas=2,
        disturbances=Disturbances(slow_downs=(slow,)),
        max_num_batched_tokens=512,
        max_num_seqs=128,
    )
    phase = Phase(mix="chat", rate=0.8 * CAPACITY["chat390"], seconds=1.0)
    return Cell(name="a slow replica", setup=setup, phases=(phase,), minutes=30.0, load=0.4)


def cpu_limit() -> Cell:
    """Two replicas with 0.4 of a core each, whose steps take 2 to 6 ms of it."""
    plant = Plant(
        shape="linear",
        overhead_s=0.0012,
        weights_s=0.0,
        token_s=2.5e-5,
        decode_s=2e-4,
        context_token_s=1e-8,
        attention_pair_s=2e-9,
    )
    setup = structs.replace(
        CHAT_43,
        plant=plant,
        replicas=2,
        disturbances=Disturbances(cpu_limit=CpuLimit(share=0.4)),
        objectives=Bounds(ttft_s=10.0, itl_s=0.02),
        max_num_seqs=16,
        max_num_batched_tokens=256,
    )
    return Cell(name="a CPU limit", setup=setup, phases=(Phase(mix="chat", rate=8.0, seconds=1.0),), minutes=6.0)


def at_the_optimum() -> Cell:
    """The replicas start with the best limits, and may go far above them."""
    best = Limits(max_num_seqs=256, kv_cache_fraction=1.0, max_num_batched_tokens=192)
    setup = structs.replace(CHAT_43, prior=BootPrior(revision=1, limits=best))
    return structs.replace(steady("chat, KV 43k, from the optimum", setup, "chat", "chat43", 0.95), minutes=30.0)


def decodes_alone() -> Cell:
    """A device where each decode costs: 20 sequences are the most that 50 ms allow. The best fixed limits of some that were
    tried, 20 sequences and 128 tokens, get 82 % of the requests done in time.
    """
    plant = Plant(
        shape="linear",
        overhead_s=0.002,
        weights_s=0.006,
        token_s=5e-5,
        decode_s=1.9e-3,
        context_token_s=0.0,
        attention_pair_s=0.0,
    )
    setup = structs.replace(CHAT_390, plant=plant, max_num_seqs=256, objectives=Bounds(ttft_s=30.0, itl_s=0.05))
    phase = Phase(mix="chat", rate=1.5, seconds=1.0)
    return Cell(name="decodes alone", setup=setup, phases=(phase,), minutes=25.0)


def few_sequences() -> Cell:
    """Two replicas that may run 256 sequences, and begin with 4."""
    few = Limits(max_num_seqs=4, kv_cache_fraction=1.0, max_num_batched_tokens=CHAT_390.max_num_batched_tokens)
    setup = structs.replace(CHAT_390, prior=BootPrior(revision=1, limits=few), replicas=2)
    phase = Phase(mix="chat", rate=0.4 * CAPACITY["chat390"], seconds=1.0)
    return Cell(name="far too few sequences", setup=setup, phases=(phase,), minutes=8.0, load=0.2)


def not_monotone() -> Cell:
    phase = Phase(mix="chat", rate=1.9 * CAPACITY["chat43"], seconds=1.0)
    return Cell(name="2 replicas, KV 43k", setup=structs.replace(CHAT_43, replicas=2), phases=(phase,), minutes=30.0)


OUTAGE = Window(start_s=900.0, end_s=1500.0)


def _outage(name: str, faults: Faults) -> Cell:
    setup = structs.replace(CHAT_390, replicas=2, faults=faults, max_num_batched_tokens=768)
    phase = Phase(mix="chat", rate=1.6 * CAPACITY["chat390"], seconds=1.0)
    return Cell(name=name, setup=setup, phases=(phase,), minutes=30.0, load=0.8)


def metrics_lost() -> Cell:
    return _outage("metrics lost", Faults(silences=(OUTAGE,)))


def operator_down() -> Cell:
    return _outage("operator down", Faults(operator_down=(OUTAGE,), operator_restarts=(OUTAGE.end_s,)))


def not_a_number() -> Cell:
    return _outage("not a number", Faults(lie="nan", lie_windows=(OUTAGE,)))


def healthy() -> Cell:
    """Short questions on a small model, whose steps of 7 ms are far below an objective of 26 ms, also beside a neighbour."""
    plant = Plant(
        shape="linear",
        overhead_s=0.006,
        weights_s=0.0,
        token_s=1e-4,
        context_token_s=1e-6,
        attention_pair_s=1e-8,
    )
    setup = Setup(
        name="cpu",
        plant=plant,
        disturbances=Disturbances(noise=0.1, slow_downs=(SlowDown(factor=2.7, start_s=240.0, end_s=420.0),)),
        kv_tokens=16_384,
        max_model_len=2048,
        max_num_seqs=16,
        objectives=Bounds(ttft_s=2.0, itl_s=0.026),
    )
    questions = Bursts(count=300, size=3, input_len=7, output_len=200)
    return Cell(name="healthy", setup=setup, bursts=questions, minutes=10.0, load=0.2)


def _left_alone(run: Run, cell: Cell) -> Verdict:
    late = [one for one in run.changes if one.at_s >= 120.0]
    what = ", ".join(f"{one.reason} at {one.at_s:.0f} s" for one in late)
    return _all_of(
        Verdict(not late, f"{len(late)} changes after two minutes{': ' * bool(late)}{what}"), _at_least(run, 0.95)
    )


NEIGHBOUR = Window(start_s=1200.0, end_s=1800.0)
GIB = 2**30


def memory_moves() -> Cell:
    """The KV cache starts with a tenth of what it may have, and the load needs more; then a neighbour takes memory.

    It takes 45 GiB and soon 51, so that less than a twentieth of the memory is left beside any KV share above a seventh. What
    share the load needs depends on the step target: with short steps, a fifth will do.
    """
    start_s, end_s = NEIGHBOUR.start_s, NEIGHBOUR.end_s
    memory = Memory(
        limit_bytes=80 * GIB,
        pool_max_bytes=50 * GIB,
        rest_bytes=18 * GIB,
        neighbours=tuple(
            Taken(num_bytes=num * GIB, start_s=start_s + after_s, end_s=end_s)
            for num, after_s in ((45, 0.0), (3, 180.0), (3, 360.0))
        ),
    )
    setup = structs.replace(CHAT_390, memory=memory, kv_start_tokens=39_000)
    phase = Phase(mix="chat", rate=0.9 * CAPACITY["chat390"], seconds=1.0)
    return Cell(name="memory comes and goes", setup=setup, phases=(phase,), minutes=40.0, load=0.9)


def _share_follows_memory(run: Run, cell: Cell) -> Verdict:
    """Judge the KV share at the start, before, at the end of, and after the time in which memory is short."""
    start = (cell.setup.kv_start_tokens or 0) / cell.setup.kv_tokens
    before, during, after = (_kv_share(run, start, at_s) for at_s in (NEIGHBOUR.start_s, NEIGHBOUR.end_s, cell.seconds))
    late = _share(run, cell.seconds - 600.0, cell.seconds)
    return Verdict(
        start < before and during < before and after > during and run.num_failed == 0,
        f"{start:.0%}, {before:.0%}, {during:.0%}, {after:.0%} of the KV cache; {run.num_failed} failed; "
        f"{late:.1%} good in the last 10 minutes",
    )


def _kv_share(run: Run, start: float, at_s: float) -> float:
    earlier = [one.limits.kv_cache_fraction for one in run.changes if one.at_s < at_s]
    return earlier[-1] if earlier else start


def _all_of(*verdicts: Verdict) -> Verdict:
    return Verdict(all(one.passed for one in verdicts), "; ".join(one.figures for one in verdicts))


def _unchanged(run: Run, cell: Cell) -> Verdict:
    """Judge whether sequences and tokens are what they were; a step-time target may come."""
    was = (cell.setup.max_num_seqs, cell.setup.max_num_batched_tokens)
    moved = [one for one in run.changes if (one.limits.max_num_seqs, one.limits.max_num_batched_tokens) != was]
    return Verdict(
        not moved, f"{run.num_changes} changes, {len(moved)} away from the sequences and tokens of the start"
    )


def _at_least(run: Run, share: float) -> Verdict:
    return Verdict(run.share_good >= share, f"{run.share_good:.1%} good")


def _late(run: Run, share: float, seconds: float) -> Verdict:
    """Judge the requests of the last part of the run."""
    last_s = run.timeline[-1].start_s + 60.0
    found = _share(run, last_s - seconds, last_s)
    return Verdict(found >= share, f"{found:.1%} good in the last {seconds / 60:.0f} minutes")


def _share(run: Run, start_s: float, end_s: float) -> float:
    within = [one for one in run.timeline if start_s <= one.start_s < end_s]
    return sum(one.num_good for one in within) / max(1, sum(one.num_requests for one in within))


def _keeps_its_limits(run: Run, cell: Cell) -> Verdict:
    """Judge the limits of the first replica, which is not the slow one."""
    setup = cell.setup
    last = next((one.limits for one in reversed(run.changes) if one.replica == "replica-0"), None)
    seqs = setup.max_num_seqs if last is None else last.max_num_seqs
    tokens = setup.max_num_batched_tokens if last is None else last.max_num_batched_tokens
    kept = seqs >= 0.7 * setup.max_num_seqs and tokens >= 0.7 * setup.max_num_batched_tokens
    return Verdict(
        kept,
        f"{setup.max_num_seqs} sequences and {setup.max_num_batched_tokens} tokens became {seqs} and {tokens}, "
        f"{run.num_changes} changes",
    )


def _calm(run: Run, cell: Cell) -> Verdict:
    late = [one for one in run.changes if one.at_s >= 900.0]
    per_hour = len({one.at_s for one in late}) / (cell.seconds - 900.0) * 3600
    first = [one for one in run.changes if one.replica == run.changes[0].replica]
    turned = max(turns_back([_of(one.limits, i) for one in first], [one.at_s for one in first]) for i in range(3))
    return Verdict(
        per_hour <= 6.0 and turned == 0,
        f"{per_hour:.0f} changes an hour after the first 15 minutes, {turned} times there and back; {run.share_good:.1%} good",
    )


def _of(limits: Limits, index: int) -> float:
    return (limits.max_num_seqs, limits.max_num_batched_tokens, limits.step_time_target_ms or 0.0)[index]


def _holds(run: Run, cell: Cell) -> Verdict:
    before, during = _share(run, OUTAGE.start_s - 300.0, OUTAGE.start_s), _share(run, OUTAGE.start_s, OUTAGE.end_s)
    raised = [
        (one, two)
        for one, two in zip(run.changes, run.changes[1:], strict=False)
        if one.replica == two.replica
        and OUTAGE.covers(two.at_s)
        and two.at_s > OUTAGE.start_s + 30.0
        and two.limits.max_num_batched_tokens > one.limits.max_num_batched_tokens
    ]
    return Verdict(
        during >= 0.95 * before and not raised,
        f"{before:.1%} good before, {during:.1%} meanwhile; {len(raised)} raises",
    )
