"""The discrete-event simulation: arrivals, steps, rounds of the slow loop and faults, in order of time."""

import heapq
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

import numpy as np
from msgspec import Struct, structs

from flyball_protocol import BootPrior, Limits
from flyball_simulation.controllers import Auto, Controller
from flyball_simulation.executor import engine_info
from flyball_simulation.memory import Memory
from flyball_simulation.plant import Device, Disturbances, Plant
from flyball_simulation.replica import BLOCK_SIZE, Outcome, Replica, engine_config, percentile
from flyball_simulation.result import Bounds, Change, Result, bins
from flyball_simulation.scrape import Faults, Scraper
from flyball_simulation.workload import Workload

Event = Callable[[float], None]

READY_S = 1.0
"""After which the operator reads the evidence of a replica that has become ready: it watches the pods."""

LOOK_S = 5.0
"""Between two looks at whether a run that may be given up has too many bad requests already."""


class Setup(Struct, frozen=True, kw_only=True):
    """A world without its traffic and its controller.

    Attributes:
        name: of the plant, for the result.
        max_num_seqs, max_num_batched_tokens: what the replicas start with; live limits stay within.
        prior: what new replicas start from.
        memory: around each replica; None: replicas do not know theirs, so the KV share never moves.
        kv_start_tokens: of the KV cache, what may be used at first; None: all.
    """

    name: str
    plant: Plant
    disturbances: Disturbances = Disturbances()
    faults: Faults = Faults()
    replicas: int = 1
    kv_tokens: int
    max_model_len: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    scheduling_policy: str = "fcfs"
    objectives: Bounds
    model: str = "model"
    prior: BootPrior | None = None
    memory: Memory | None = None
    kv_start_tokens: int | None = None

    @property
    def key(self) -> str:
        """Under which step times are learned; see ``Evidence.key``."""
        return engine_info(
            model=self.model,
            device=self.name,
            max_model_len=1,
            max_num_batched_tokens=1,
            num_kv_blocks=1,
            block_size=BLOCK_SIZE,
        ).key


def simulate(
    setup: Setup,
    workload: Workload,
    controller: Controller,
    *,
    label: str,
    seed: int,
    duration_s: float,
    max_bad: int | None = None,
) -> Result:
    """Run until every request has ended, or more than ``max_bad`` of them were not good.

    Raises:
        ConfigError: the replicas cannot start.
    """
    started_s = time.perf_counter()
    world = World(setup, workload, controller, seed, max_bad)
    world.run()
    elapsed_s = time.perf_counter() - started_s
    return world.result(label, duration_s, elapsed_s)


class World:
    """All replicas behind a balancer that takes the one with the fewest outstanding requests.

    Raises:
        ConfigError: replicas with these settings cannot start.
    """

    def __init__(
        self, setup: Setup, workload: Workload, controller: Controller, seed: int, max_bad: int | None = None
    ) -> None:
        self.setup = setup
        self.workload = workload
        self.controller = controller
        self.seed = seed
        self.changes: list[Change] = []
        self._num_bad = 0
        self._max_bad = len(workload) if max_bad is None else max_bad
        self._prefix_caching = any(one.hash_ids for one in workload)
        self._events: list[tuple[float, int, Event]] = []
        self._order = count()
        self._num_left = len(workload)
        self._num_served = [0] * setup.replicas
        self._num_starts = count(setup.replicas)
        self._gone: list[Replica] = []
        self.replicas: list[Replica | None] = [self._start(index, index, 0.0) for index in range(setup.replicas)]
        self._scraper = Scraper(setup.faults, seed)

    def run(self) -> None:
        """Let every request end."""
        if self.workload:
            self._at(self.workload[0].at_s, self._arrive_from(0))
        if self.controller.reads_evidence:
            self._at(self.controller.interval_s, self._round)
            self._look_at_new(0.0)
        for kill in self.setup.faults.restarts:
            self._at(kill.at_s, self._killer(kill.replica, kill.down_s))
        for at_s in self.setup.faults.operator_restarts:
            self._at(at_s, self._restart_operator)
        if self._max_bad < len(self.workload):
            self._at(LOOK_S, self._look)
        events = self._events
        while self._num_left > 0 and self._num_bad <= self._max_bad:
            at_s, _, event = heapq.heappop(events)
            event(at_s)

    def result(self, label: str, duration_s: float, elapsed_s: float) -> Result:
        setup, replicas = self.setup, [*self._gone, *(one for one in self.replicas if one is not None)]
        outcomes = sorted((one for replica in replicas for one in replica.outcomes), key=lambda one: one.index)
        good = sum(setup.objectives.met_by(one.ttft_s, one.itl_p95_s) for one in outcomes)
        ttft = sorted(one.ttft_s for one in outcomes if one.ttft_s is not None)
        gaps = np.sort(np.concatenate([np.asarray(replica.gaps) for replica in replicas])).tolist()
        num_steps = sum(replica.num_steps for replica in replicas)
        records = self.controller.records if isinstance(self.controller, Auto) else []
        return Result(
            controller=label,
            plant=setup.name,
            seed=self.seed,
            replicas=setup.replicas,
            kv_tokens=setup.kv_tokens,
            objectives=setup.objectives,
            num_requests=len(outcomes),
            num_good=good,
            num_failed=sum(one.ttft_s is None for one in outcomes),
            share_good=round(good / len(outcomes), 6) if outcomes else 1.0,
            goodput_per_s=round(good / duration_s, 6),
            duration_s=duration_s,
            ttft_p50_s=percentile(ttft, 0.5),
            ttft_p95_s=percentile(ttft, 0.95),
            itl_p50_s=percentile(gaps, 0.5),
            itl_p95_s=percentile(gaps, 0.95),
            num_preemptions=sum(replica.num_preemptions for replica in replicas),
            num_recomputed_tokens=sum(replica.num_recomputed_tokens for replica in replicas),
            num_changes=len({change.at_s for change in self.changes}),
            changes=self.changes,
            final_limits={one.name: one.limits for one in self.replicas if one is not None},
            timeline=bins(self.workload, outcomes, setup.objectives),
            sweep=[],
            feasible=[],
            num_decisions=len(records),
            num_replayed=sum(record.replay() == record.decision for record in records),
            num_steps=num_steps,
            steps_per_s=round(num_steps / elapsed_s, 1),
        )

    @property
    def was_given_up(self) -> bool:
        return self._num_left > 0

    @property
    def most_running(self) -> int:
        """Sequences that never more of ran at once on any replica; an upper bound."""
        return max(one.most_running for one in (*self._gone, *self.replicas) if one is not None)

    def outcomes(self) -> list[Outcome]:
        """Return how every request ended, in order of arrival."""
        replicas = [*self._gone, *(one for one in self.replicas if one is not None)]
        return sorted((one for replica in replicas for one in replica.outcomes), key=lambda one: one.index)

    def _start(self, index: int, number: int, now_s: float) -> Replica:
        setup = self.setup
        config = engine_config(
            model=setup.model,
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.max_num_batched_tokens,
            prefix_caching=self._prefix_caching,
            scheduling_policy=setup.scheduling_policy,
            seed=self.seed,
            prior=setup.prior,
        )
        return Replica(
            f"replica-{number}",
            config,
            Device(setup.plant, setup.disturbances, index, self.seed * 1000 + number),
            kv_tokens=setup.kv_tokens,
            max_model_len=setup.max_model_len,
            start_s=now_s,
            device_name=setup.name,
            measured=self.controller.reads_evidence,
            learning=self.controller.paces,
            memory=setup.memory,
            kv_start_tokens=setup.kv_start_tokens,
        )

    def _at(self, at_s: float, event: Event) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), event))

    def _arrive_from(self, index: int) -> Event:
        def arrive(now_s: float) -> None:
            if index + 1 < len(self.workload):
                self._at(self.workload[index + 1].at_s, self._arrive_from(index + 1))
            chosen = self._choose()
            if chosen is None:
                self._lose(index, now_s)
                return
            replica = self.replicas[chosen]
            assert replica is not None  # _choose() returns those that serve
            self._num_served[chosen] += 1
            if not replica.submit(index, self.workload[index]):
                self._num_left -= 1
            elif not replica.busy:
                self._step(replica, now_s)

        return arrive

    def _choose(self) -> int | None:
        serving = [i for i, one in enumerate(self.replicas) if one is not None]
        if len(serving) == 1:
            return serving[0]
        return min(
            serving,
            key=lambda i: (self.replicas[i].num_outstanding, self._num_served[i], i),  # type: ignore[union-attr]
            default=None,
        )

    def _lose(self, index: int, now_s: float) -> None:
        """Fail a request that no replica can take."""
        holder = self._gone[-1]
        holder.outcomes.append(Outcome(index, now_s, None, None))
        self._num_left -= 1

    def _step(self, replica: Replica, now_s: float) -> None:
        replica.begin(now_s)
        if replica.busy:
            self._at(replica.end_s, partial(self._end_step, replica))

    def _end_step(self, replica: Replica, now_s: float) -> None:
        if replica.busy:  # else it was killed within the step
            num_ended = replica.finish()
            if num_ended:
                self._count(replica.outcomes[-num_ended:])
            self._step(replica, now_s)

    def _count(self, ended: Sequence[Outcome]) -> None:
        self._num_left -= len(ended)
        bounds = self.setup.objectives
        self._num_bad += sum(not bounds.met_by(one.ttft_s, one.itl_p95_s) for one in ended)

    def _look(self, now_s: float) -> None:
        """Count as bad what has not ended, but waited too long for its first token: the run may be given up for that."""
        bound_s = self.setup.objectives.ttft_s
        if bound_s is None:
            return
        num_late = sum(one.num_late(now_s, bound_s) for one in self.replicas if one is not None)
        if self._num_bad + num_late > self._max_bad:
            self._num_bad += num_late
        else:
            self._at(now_s + LOOK_S, self._look)

    def _look_at_new(self, now_s: float) -> None:
        """Have the operator's tuner make a round more, for a replica that starts now. The others know their intervals only."""
        if isinstance(self.controller, Auto):
            self._at(now_s + READY_S, self._turn)

    def _round(self, now_s: float) -> None:
        """Make a round of the slow loop, and the next one an interval later."""
        self._at(now_s + self.controller.interval_s + self._scraper.jitter_s(), self._round)
        self._turn(now_s)

    def _turn(self, now_s: float) -> None:
        """One round of the slow loop, as the operator makes it."""
        scraper = self._scraper
        serving = {one.name: one for one in self.replicas if one is not None}
        evidence = scraper.scrape([one.pod_evidence(now_s) for one in serving.values()], now_s)
        if scraper.operator_down(now_s):
            return
        for name, update in self.controller.round(evidence, now_s).items():
            if name in serving and scraper.delivers(now_s):
                before = serving[name].limits
                serving[name].post(update, now_s)
                self._note(serving[name], before, now_s)

    def _note(self, replica: Replica, before: Limits, now_s: float) -> None:
        after = replica.limits
        if after != before:
            self.changes.append(
                Change(at_s=now_s, replica=replica.name, reason=self.controller.reason, limits=structs.replace(after))
            )

    def _killer(self, index: int, down_s: float) -> Event:
        def kill(now_s: float) -> None:
            replica = self.replicas[index]
            if replica is None:
                return
            self._num_left -= replica.kill(now_s)
            self._gone.append(replica)
            self.replicas[index] = None
            self._at(now_s + down_s, self._reviver(index))

        return kill

    def _reviver(self, index: int) -> Event:
        def revive(now_s: float) -> None:
            self.replicas[index] = self._start(index, next(self._num_starts), now_s)
            self._look_at_new(now_s)

        return revive

    def _restart_operator(self, now_s: float) -> None:
        if isinstance(self.controller, Auto):
            self.controller.restart()


def share_good(outcomes: Sequence[Outcome], bounds: Bounds) -> float:
    """Return the share of requests that met other objectives than the run's own."""
    good = sum(bounds.met_by(one.ttft_s, one.itl_p95_s) for one in outcomes)
    return good / len(outcomes) if outcomes else 1.0
