"""One replica: the real engine and the real measurements, on a clock that jumps from step to step."""

from array import array
from collections.abc import Sequence
from operator import sub

from flyball_operator.tuning import PodEvidence
from flyball_protocol import BootPrior, Evidence, Limits, LimitsAck, LimitsUpdate
from flyball_runtime.core.clock import FakeClock
from flyball_runtime.core.config import EngineConfig
from flyball_runtime.core.measurements import Measurements, RequestTimes
from flyball_runtime.core.request import Failed, Request
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.core.stats import StepOutput
from flyball_runtime.engine.engine import Engine
from flyball_runtime.governor import Governor, Work
from flyball_simulation.executor import PlantExecutor, engine_info
from flyball_simulation.memory import Memory
from flyball_simulation.plant import Device
from flyball_simulation.workload import Arrival, block_names

BLOCK_SIZE = 16


class Flight(RequestTimes):
    """A request under way.

    Attributes:
        first_step: that gave it a token, by its place among the replica's steps.
        missed: later steps that gave it none, because it was preempted.
    """

    __slots__ = ("arrival", "first_step", "index", "missed")

    def __init__(self, index: int, arrival: Arrival) -> None:
        super().__init__(arrival.at_s, arrival.input_len)
        self.index = index
        self.arrival = arrival
        self.first_step = -1
        self.missed: list[int] = []


class Unlearned(Governor):
    """Learns nothing: where no step-time target is ever set, nobody asks what a step will take."""

    def observe(self, work: Work, seconds: float) -> None:
        pass

    def predict(self, work: Work) -> float | None:
        return None


class Outcome:
    """How a request ended.

    Attributes:
        ttft_s: None when it failed.
        itl_p95_s: of its own gaps, None without a gap.
    """

    __slots__ = ("end_s", "index", "itl_p95_s", "ttft_s")

    def __init__(self, index: int, end_s: float, ttft_s: float | None, itl_p95_s: float | None) -> None:
        self.index = index
        self.end_s = end_s
        self.ttft_s = ttft_s
        self.itl_p95_s = itl_p95_s


class Replica:
    """Runs a request's life as the runtime does: submit, steps, tokens, end.

    ``begin`` runs a whole step at once, and ``end_s`` says when it is over; ``finish`` is to be called then, and only then
    is it visible from outside what it did.
    """

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        device: Device,
        *,
        kv_tokens: int,
        max_model_len: int,
        start_s: float = 0.0,
        device_name: str = "simulated",
        measured: bool = True,
        learning: bool = True,
        memory: Memory | None = None,
        kv_start_tokens: int | None = None,
    ) -> None:
        """Start with nothing to do.

        Args:
            measured: whether somebody reads evidence.
            learning: whether somebody uses the step-time model. Measuring and learning take more than half of a run's time,
                and where nobody looks they change nothing.
            memory: None leaves it out of the evidence.
            kv_start_tokens: of ``kv_tokens``, so many may be used at first.
        Raises:
            ConfigError: the KV cache cannot hold one sequence of ``max_model_len`` tokens.
        """
        self.name = name
        self.clock = FakeClock(start_s)
        info = engine_info(
            model=config.served_model_name,
            device=device_name,
            max_model_len=max_model_len,
            max_num_batched_tokens=config.step_tokens(device_name, max_model_len),
            num_kv_blocks=max(1, kv_tokens // BLOCK_SIZE),
            num_start_kv_blocks=max(1, (kv_start_tokens or kv_tokens) // BLOCK_SIZE),
            block_size=BLOCK_SIZE,
        )
        self._executor = PlantExecutor(info, device, self.clock)
        self.engine = Engine(config, self._executor, self.clock)
        self.measurements = Measurements(self.clock)
        self.measurements.boot_id = name  # drawn at random otherwise
        self.measurements.step(self.engine.state())
        if not learning:
            self.engine.governor = Unlearned()
        self.outcomes: list[Outcome] = []
        self.gaps = array("d")
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0
        self.most_running = 0
        self.end_s = start_s
        self.busy = False
        self._config = config
        self._measured = measured
        self._memory = memory
        self._flights: dict[str, Flight] = {}
        self._num_streaming = 0  # flights that have got a token
        self._some_away = False  # of them, some got none in the last step
        self._ends_s: list[float] = []  # of all steps
        self._output: StepOutput | None = None

    @property
    def num_steps(self) -> int:
        return len(self._ends_s)

    @property
    def num_outstanding(self) -> int:
        return len(self._flights)

    @property
    def limits(self) -> Limits:
        return self.engine.scheduler.limits

    def num_late(self, now_s: float, bound_s: float) -> int:
        """Return how many requests under way have waited longer than that for their first token."""
        ends_s = self._ends_s
        firsts_s = (
            (one.arrival_s, ends_s[one.first_step] if one.first_step >= 0 else now_s) for one in self._flights.values()
        )
        return sum(first_s - arrival_s > bound_s for arrival_s, first_s in firsts_s)

    def submit(self, index: int, arrival: Arrival) -> bool:
        """Queue a request; False when the engine refuses it."""
        self.clock.advance_to(arrival.at_s)
        flight = Flight(index, arrival)
        request_id = str(index)
        refused = self.engine.submit(_request(request_id, index, arrival, self._config.enable_prefix_caching))
        if refused is not None:
            if self._measured:
                self.measurements.rejected(refused.code)
            self.outcomes.append(Outcome(index, arrival.at_s, None, None))
            return False
        if self._measured:
            self.measurements.arrived()
        self._flights[request_id] = flight
        return True

    def begin(self, now_s: float) -> None:
        """Start the next step, if there is work."""
        self.clock.advance_to(now_s)
        self.engine.tick()
        if not self.engine.has_work():
            self.busy = False
            return
        self._output = self.engine.step()
        self.end_s = self.clock.now()
        self.busy = True

    def finish(self) -> int:
        """Take the step's output in; return how many requests it ended."""
        output = self._output
        assert output is not None, "no step has begun"
        self._output = None
        stats = output.stats
        self.num_preemptions += stats.num_preemptions
        self.num_recomputed_tokens += stats.num_recomputed_tokens
        self.most_running = max(self.most_running, stats.num_running + len(output.endings))
        self._note_tokens(output)
        if self._measured:
            self.measurements.step(stats)
            flights = self._flights
            self.measurements.tokens([flights[request_id] for request_id in output.request_ids])
        for ending in output.endings:
            self._end(ending.request_id, None if isinstance(ending, Failed) else ending.num_output_tokens)
        return len(output.endings)

    def _note_tokens(self, output: StepOutput) -> None:
        """Note what the gaps of each flight follow from: which steps gave it tokens."""
        self._ends_s.append(self.end_s)
        request_ids, stats = output.request_ids, output.stats
        self._note_firsts(request_ids[stats.num_decodes :])
        if len(request_ids) == self._num_streaming and not self._some_away and not stats.num_preemptions:
            return  # as most steps are: each flight that has a token got one more
        self._note_firsts(request_ids)  # one that had a single token left to compute is among the decodes
        served, step = set(request_ids), len(self._ends_s) - 1
        away = [one for name, one in self._flights.items() if one.first_step >= 0 and name not in served]
        for flight in away:
            flight.missed.append(step)
        self._some_away = bool(away)

    def _note_firsts(self, request_ids: Sequence[str]) -> None:
        step = len(self._ends_s) - 1
        for request_id in request_ids:
            flight = self._flights[request_id]
            if flight.first_step < 0:
                flight.first_step = step
                self._num_streaming += 1

    def _gaps(self, flight: Flight) -> list[float]:
        """Return the times between the tokens of a flight that has got its last one in the latest step."""
        ends_s, first = self._ends_s, flight.first_step
        times_s = ends_s[first:]
        if flight.missed:
            missed = set(flight.missed)
            times_s = [at_s for step, at_s in enumerate(times_s, start=first) if step not in missed]
        return list(map(sub, times_s[1:], times_s))

    def evidence(self, now_s: float) -> Evidence:
        """Return what ``GET /admin/evidence`` answers."""
        self.clock.advance_to(now_s)
        self.engine.tick()
        if not self.busy:
            self.measurements.step(self.engine.state())
        return self.measurements.evidence(
            self._config.served_model_name,
            self.engine.limits(),
            key=self.engine.info.key,
            ready=True,
            draining=False,
            memory=None if self._memory is None else self._memory.state(now_s, self._executor.kv_share),
        )

    def pod_evidence(self, now_s: float) -> PodEvidence:
        return PodEvidence(pod=self.name, evidence=self.evidence(now_s))

    def post(self, update: LimitsUpdate, now_s: float) -> LimitsAck:
        self.clock.advance_to(now_s)
        ack = self.engine.post_limits(update)
        limits = self.engine.limits()
        self.measurements.count_against(limits.objectives, limits.revision)
        return ack

    def kill(self, now_s: float) -> int:
        """Fail everything under way; return how many requests that were."""
        count = len(self._flights)
        self._num_streaming = 0
        self.outcomes += [Outcome(flight.index, now_s, None, None) for flight in self._flights.values()]
        self._flights = {}
        self._output = None
        self.busy = False
        return count

    def _end(self, request_id: str, num_output_tokens: int | None) -> None:
        flight = self._flights.pop(request_id)
        has_tokens = flight.first_step >= 0
        self._num_streaming -= has_tokens
        if self._measured:
            self.measurements.ended(flight, "error" if num_output_tokens is None else "length", num_output_tokens or 0)
        if not has_tokens or num_output_tokens is None:
            self.outcomes.append(Outcome(flight.index, self.end_s, None, None))
            return
        gaps = self._gaps(flight)
        self.gaps.extend(gaps)
        ttft_s = self._ends_s[flight.first_step] - flight.arrival_s
        self.outcomes.append(Outcome(flight.index, self.end_s, ttft_s, percentile(gaps, 0.95)))


def percentile(values: list[float], share: float) -> float | None:
    """Return a quantile by linear interpolation, as ``flyball bench`` does; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


_ZEROS = [0] * 4096


def _request(request_id: str, index: int, arrival: Arrival, prefix_caching: bool) -> Request:
    """Prompts are zeros, up to the last block that is not full: no other prompt continues that one."""
    global _ZEROS
    num_tokens = arrival.input_len
    while len(_ZEROS) < num_tokens:
        _ZEROS = _ZEROS * 2
    token_ids = _ZEROS[:num_tokens]
    names: list[bytes] = []
    if prefix_caching:
        names = block_names(arrival.hash_ids, num_tokens, BLOCK_SIZE)
        token_ids[len(names) * BLOCK_SIZE :] = [index + 1] * (num_tokens - len(names) * BLOCK_SIZE)
    return Request(
        request_id=request_id,
        prompt_token_ids=token_ids,
        sampling=SamplingParams(max_tokens=arrival.output_len, temperature=0.0, seed=0, ignore_eos=True),
        block_hashes=names,
    )


def engine_config(
    *,
    model: str,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    prefix_caching: bool,
    scheduling_policy: str = "fcfs",
    seed: int,
    prior: BootPrior | None,
) -> EngineConfig:
    """Return the settings of a replica. Raises ConfigError for limits that ``flyball serve`` would refuse."""
    return EngineConfig(
        model=model,
        served_model_name=model,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=prefix_caching,
        scheduling_policy=scheduling_policy,
        fair_share=False,
        seed=seed,
        boot_prior=prior,
    )
