"""The engine of one replica, without processes or sockets, and what runs its plans."""

import logging
import random
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from flyball_protocol import LimitsAck, LimitsReport, LimitsUpdate
from flyball_runtime.core.clock import Clock, MonotonicClock
from flyball_runtime.core.config import EngineConfig
from flyball_runtime.core.errors import InvalidHiddenStates, InvalidLogits, InvalidRequest, NoTokenLeft, RequestError
from flyball_runtime.core.grammar import Grammar
from flyball_runtime.core.request import Failed, Finished, FinishReason, Request, Sequence, TokenLogprobs
from flyball_runtime.core.sampling_params import with_seed
from flyball_runtime.core.stats import EngineInfo, Sampled, StepOutput, StepStats
from flyball_runtime.governor import Drafting, GhostCache, Governor, OutputLengths, Work, usable_prior, work_of
from flyball_runtime.kv_cache import HostTier, KVCache
from flyball_runtime.scheduler import (
    BatchPlan,
    Drafter,
    Ending,
    Endings,
    LimitsLedger,
    Scheduler,
    SchedulerConfig,
    Step,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

Handle = Any
"""What ``launch`` gives back, for its own executor only."""


BANNED = "all that its grammar allows is banned by allowed_token_ids, bad_words or logit_bias, or the model's logits hold NaN"

MODEL_STEPS = 64
"""Steps between two reports of the step-time model; an idle engine reports it with its state."""


class Executor(Protocol):
    """Runs every plan once, in the order of their numbers.

    A handle is collected after those launched before it. Between the two calls the step may be running, and the next plan
    may be launched: what it needs of this one's tokens, the executor has itself.
    """

    @property
    def info(self) -> EngineInfo: ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    def compile(self, grammar: Grammar) -> Future[Any]:
        """Prepare a grammar, beside the steps; its sequences are planned once that is done.

        Whoever holds the result keeps the grammar. ``result()`` raises RequestError if the grammar cannot be used.
        """
        ...

    def load_adapter(self, number: int, path: str) -> Future[None]:
        """Read a LoRA adapter, beside the steps; plans may name it once that is done.

        ``result()`` raises ConfigError if it cannot be used.
        """
        ...

    def unload_adapter(self, number: int) -> None:
        """Forget an adapter that no later plan names."""
        ...

    def launch(self, plan: BatchPlan) -> Handle:
        """Start a step, and return at once if the device works by itself."""
        ...

    def decodes_ahead(self, plan: BatchPlan) -> bool:
        """Return whether plans that go on like this one can be launched together. Asked with ``num_scheduler_steps`` alone."""
        ...

    def launch_decodes(self, plans: list[BatchPlan]) -> list[Handle]:
        """Run such plans, of the same sequences, in their order; tokens behind a sequence's end are none."""
        ...

    def resize(self, num_blocks: int) -> None:
        """Have memory for KV blocks ``0..num_blocks - 1``, and give back what lies above, after what was launched before."""
        ...

    def collect(self, handle: Handle) -> Sampled:
        """Wait for a step; return a token for each entry that samples, and how many drafts are accepted."""
        ...


class InThread:
    """An executor whose steps run in a thread of their own, beside whoever launches them.

    A CPU works only while somebody calls it; the ops leave Python's lock to others meanwhile.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="flyball-step")

    @property
    def info(self) -> EngineInfo:
        return self._executor.info

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._executor.eos_token_ids

    def compile(self, grammar: Grammar) -> Future[Any]:
        return self._executor.compile(grammar)

    def load_adapter(self, number: int, path: str) -> Future[None]:
        return self._executor.load_adapter(number, path)

    def unload_adapter(self, number: int) -> None:
        self._worker.submit(self._executor.unload_adapter, number).result()

    def launch(self, plan: BatchPlan) -> Future[Sampled]:
        return self._worker.submit(self._run, plan)

    def decodes_ahead(self, plan: BatchPlan) -> bool:
        return False

    def launch_decodes(self, plans: list[BatchPlan]) -> list[Future[Sampled]]:
        return [self.launch(plan) for plan in plans]

    def resize(self, num_blocks: int) -> None:
        self._worker.submit(self._executor.resize, num_blocks).result()

    def collect(self, handle: Future[Sampled]) -> Sampled:
        return handle.result()

    def _run(self, plan: BatchPlan) -> Sampled:
        return self._executor.collect(self._executor.launch(plan))


Progress = Callable[[], object]
"""Called several times within each step."""


COMPILE_WAIT_S = 0.005
"""How long a step without work waits for a grammar, before requests that have come meanwhile are looked after."""


LONGEST_AHEAD_S = 0.5
"""Most seconds of steps that are planned together: so long nothing else is looked after."""


class _InFlight(NamedTuple):
    """A step that was launched.

    Attributes:
        seconds: that it took, if it was planned together with others: its share, if it was launched together with them.
        shows_time: whether the governor is to learn from it; of steps launched together, from one.
    """

    step: Step
    work: Work
    handle: Handle
    started_s: float
    predicted_s: float | None
    after_idle: bool
    seconds: float | None = None
    shows_time: bool = True


class Engine:
    """One step is plan -> launch -> collect -> commit. Not thread-safe: one loop owns it.

    Args:
        executor: runs the plans.
        clock: steps are timed by it, and leases run by it.
    Attributes:
        info: the executor's.
        governor: learns the step time, and paces steps by it.
        lengths: of the requests that ended, whatever ended them.
    """

    def __init__(self, config: EngineConfig, executor: Executor, clock: Clock | None = None) -> None:
        """Raises ConfigError when the KV cache cannot hold one sequence of the model's length."""
        self._executor = executor
        self._clock = clock or MonotonicClock()
        info = self.info = executor.info
        prior, refused = usable_prior(config.boot_prior, info.key)
        if refused:
            logger.warning("%s. Starting without it; step times are learned from the start.", refused)
        self.governor = Governor(prior)
        host = None
        if info.num_swap_slots:
            host = HostTier(info.num_swap_slots, block_copy_s=info.block_copy_s, prefill_s=self.governor.prefill_s)
        self.kv_cache = KVCache(
            info.num_kv_blocks, info.block_size, config.enable_prefix_caching, info.kv_windows, host
        )
        self.lengths = OutputLengths()
        self._ghost = GhostCache(info.num_kv_blocks, len(info.kv_windows)) if config.enable_prefix_caching else None
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_model_len=info.max_model_len,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=info.max_num_batched_tokens,
                enable_chunked_prefill=config.enable_chunked_prefill,
                num_start_blocks=info.num_start_kv_blocks,
                policy=config.scheduling_policy,
                fair_share=config.fair_share,
                max_loras=0 if config.lora is None else config.lora.max_loras,
            ),
            self.kv_cache,
            pace=self.governor,
            forecast=self.governor,
            lengths=self.lengths,
            drafter=None if config.speculative_config is None else Drafter(config.speculative_config),
        )
        self._ledger = LimitsLedger(self.scheduler, self._clock, config.boot_prior, config.kv_drain_timeout_s)
        self._sequences: dict[str, Sequence] = {}
        self._compiling: dict[str, Sequence] = {}  # wait for their grammars before they are queued
        self._grammars: dict[str, Future[Any]] = {}  # of all unfinished sequences that have one
        self._refused: list[Failed] = []
        self._rng = random.Random(config.seed)
        self._has_draft_model = config.speculative_config is not None and config.speculative_config.model is not None
        self._max_in_flight = 2 if config.async_scheduling else 1
        self._num_scheduler_steps = config.num_scheduler_steps
        self._in_flight: deque[_InFlight] = deque()
        self._last_end_s = self._clock.now()
        self._idle = True
        self._num_disturbed = 0  # steps to come whose time says little about what they compute
        self._num_blocks_there = info.num_start_kv_blocks  # as the executor was told last
        self._num_cpu_threads = 0

    def submit(self, request: Request) -> Failed | None:
        """Queue a request that ``validate_request`` let through, or return why it cannot run now."""
        sampling = with_seed(request.sampling, self._rng)
        sequence = Sequence(
            msgspec.structs.replace(request, sampling=sampling),
            max_model_len=self.info.max_model_len,
            eos_token_ids=self._executor.eos_token_ids,
        )
        sequence.arrived_s = self._clock.now()
        try:
            if sampling.changes_logits:
                sampling.check_choice_is_left(sequence.stop_token_ids, self.info.vocab_size)
            if sampling.grammar is None:
                self._queue(sequence)
            else:
                self._compile(sequence, sampling.grammar)
        except RequestError as error:
            return _failed(request.request_id, error)
        return None

    def _queue(self, sequence: Sequence) -> None:
        self.scheduler.submit(sequence)
        self._sequences[sequence.request_id] = sequence

    def _compile(self, sequence: Sequence, grammar: Grammar) -> None:
        """Queue a sequence once its grammar is there."""
        if sequence.request_id in self._grammars:
            raise InvalidRequest(f"request_id {sequence.request_id} is in use; wait for it to end or choose another.")
        self._grammars[sequence.request_id] = self._executor.compile(grammar)
        self._compiling[sequence.request_id] = sequence
        self._take_compiled()

    def _take_compiled(self) -> None:
        done = [request_id for request_id in self._compiling if self._grammars[request_id].done()]
        for request_id in done:
            sequence = self._compiling.pop(request_id)
            try:
                self._grammars[request_id].result()
                self._queue(sequence)
            except RequestError as error:
                del self._grammars[request_id]
                self._refused.append(_failed(request_id, error))

    def abort(self, request_id: str) -> Finished | None:
        """End a request now; None when it has ended already. Its blocks are free once no step in flight touches them."""
        self._grammars.pop(request_id, None)
        if (waiting := self._compiling.pop(request_id, None)) is not None:
            return _finished(waiting, "abort")
        if not self.scheduler.abort(request_id):
            return None
        seq = self._sequences.pop(request_id)
        self._learn_from(seq)
        return _finished(seq, "abort")

    def load_adapter(self, number: int, path: str) -> Future[None]:
        """Read a LoRA adapter, beside the steps; requests may have it once that is done. See ``Executor.load_adapter``."""
        return self._executor.load_adapter(number, path)

    def unload_adapter(self, number: int) -> None:
        """Forget an adapter that no unfinished request has."""
        self.scheduler.forget_adapter(number)
        self._executor.unload_adapter(number)

    def has_work(self) -> bool:
        return bool(self._sequences or self._in_flight or self._compiling or self._refused)

    def step(self) -> StepOutput:
        """Launch what can be planned, then wait for the oldest step. Call it only while ``has_work``.

        With ``async_scheduling`` the step after that one is planned and launched before, and runs on meanwhile. If there
        is nothing to do but to wait for grammars, that is done for a moment.
        """
        if self._compiling:
            self._take_compiled()
        while len(self._in_flight) < self._max_in_flight and self._launch():
            pass
        if self._in_flight:
            return self._collect()
        if self._compiling or self._refused:
            return self._wait_for_grammars()
        raise RuntimeError(f"{len(self._sequences)} requests are unfinished, but the scheduler plans nothing")

    def post_limits(self, update: LimitsUpdate) -> LimitsAck:
        ack = self._ledger.post(update)
        self.scheduler.set_objectives(self._ledger.objectives)
        return ack

    def limits(self) -> LimitsReport:
        return self._ledger.report()

    def tick(self) -> LimitsReport | None:
        """Do what time has come for between steps; return the limits if a lease that ran out has moved them."""
        moved = self._ledger.tick()
        if not self._in_flight:
            self.scheduler.give_back()
            self._fit_memory()
        return self.limits() if moved else None

    def state(self) -> StepStats:
        """The state between steps."""
        return self._stats(None, 0.0)

    def _launch(self) -> bool:
        """Plan and launch the next step; False when there is none, or none before another is collected."""
        started_s = self._clock.now()
        step = self.scheduler.plan(started_s)
        if step is None:
            return False
        if self.kv_cache.size > self._num_blocks_there:
            self._fit_memory()
        if self._ghost is not None:
            for seq in step.admitted:
                self._ghost.look_up(seq.block_hashes, seq.num_prompt_tokens, self.info.block_size)
        work, after_idle = work_of(step.plan), self._idle
        predicted_s = self.governor.predict(work)
        if predicted_s is not None and self._has_draft_model:
            predicted_s += self.governor.drafting_s(_drafting(step))
        ahead = self._plan_ahead(step, predicted_s) if self._num_scheduler_steps > 1 else []
        if ahead:
            self._launch_ahead([step, *ahead], started_s, after_idle)
        else:
            handle = self._executor.launch(step.plan)
            self._in_flight.append(_InFlight(step, work, handle, started_s, predicted_s, after_idle))
        self._idle = False
        self._fit_memory()  # the step may have moved blocks out of what is given back
        return True

    def _plan_ahead(self, step: Step, predicted_s: float | None) -> list[Step]:
        """Plan further steps, as long as they are decodes of the same sequences, none of which has all its tokens.

        Only where nothing else is there to run, and how long a step takes is known. The last one may be another step, such as
        one that moves blocks.
        """
        if predicted_s is None or self._compiling or self.scheduler.num_waiting:
            return []
        if len(step.sequences) < self.scheduler.num_running:
            return []
        most = min(self._num_scheduler_steps, int(LONGEST_AHEAD_S / max(predicted_s, 1e-6)))
        steps = [step]
        while len(steps) < most and not steps[-1].last and self._goes_on(steps[-1], step):
            following = self.scheduler.plan(self._clock.now())
            if following is None:
                break
            steps.append(following)
        return steps[1:]

    def _goes_on(self, step: Step, first: Step) -> bool:
        """Return whether a step, or ``first`` itself, can be launched together with ``first``."""
        is_same = step.sequences == first.sequences and not step.num_beams
        return is_same and self._executor.decodes_ahead(step.plan)

    def _launch_ahead(self, steps: list[Step], started_s: float, after_idle: bool) -> None:
        """Launch steps that were planned one behind the other, together if they go on."""
        if self.kv_cache.size > self._num_blocks_there:
            self._fit_memory()
        num = len(steps) if self._goes_on(steps[-1], steps[0]) else len(steps) - 1
        for group in (steps[:num], steps[num:]):
            if not group:
                continue
            plans = [step.plan for step in group]
            handles = self._executor.launch_decodes(plans) if len(plans) > 1 else [self._executor.launch(plans[0])]
            end_s = self._clock.now()
            seconds, middle = (end_s - started_s) / len(group), len(group) // 2
            for index, (step, handle) in enumerate(zip(group, handles, strict=True)):
                work = work_of(step.plan)
                predicted_s = self.governor.predict(work)
                self._in_flight.append(
                    _InFlight(step, work, handle, started_s, predicted_s, after_idle, seconds, index == middle)
                )
            started_s = end_s

    def _fit_memory(self) -> None:
        """Have as much memory for KV blocks as the scheduler counts on."""
        if self.kv_cache.size != self._num_blocks_there:
            self._num_blocks_there = self.kv_cache.size
            self._executor.resize(self._num_blocks_there)
            self._num_disturbed = self._max_in_flight + 1

    def _wait_for_grammars(self) -> StepOutput:
        if not self._refused:
            wait([self._grammars[one] for one in self._compiling], COMPILE_WAIT_S, FIRST_COMPLETED)
            self._take_compiled()
        return StepOutput([], [], self._take_refused(), self.state())

    def _take_refused(self) -> list[Finished | Failed]:
        refused, self._refused = self._refused, []
        return list(refused)

    def _collect(self) -> StepOutput:
        """Wait for the oldest step in flight, and record what it computed."""
        oldest = self._in_flight.popleft()
        step = oldest.step
        sampled = self._executor.collect(oldest.handle)
        self._num_cpu_threads = sampled.num_cpu_threads
        spoiled: Collection[int] = ()
        if sampled.pooled:
            spoiled = {entry for entry, vector in sampled.pooled.items() if vector is None}
        if sampled.drafts:
            step.fill_drafts(sampled.drafts)
        ended = self.scheduler.commit(step, sampled.token_ids, spoiled, sampled.num_accepted, sampled.logprobs)
        endings = self._end_all(step, sampled, ended) if ended else []
        if self._refused:
            endings += self._take_refused()
        request_ids, token_ids = _new_tokens(step)
        now_s = self._clock.now()
        if oldest.seconds is None:
            self._learn(oldest, now_s - self._last_end_s - sampled.swapping_s, sampled.drafting_s)
            # a step that was launched behind another one began when that ended
            duration_s = now_s - max(oldest.started_s, self._last_end_s)
        else:
            duration_s = oldest.seconds
            if oldest.shows_time:
                self._learn(oldest, duration_s - sampled.swapping_s, 0.0)
        self._last_end_s = now_s
        self._idle = not self.has_work()
        return StepOutput(
            request_ids=request_ids,
            token_ids=token_ids,
            endings=endings,
            stats=self._stats(step, duration_s, oldest.predicted_s),
            num_cached_tokens=step.num_cached_tokens,
            logprobs=_by_request(step, sampled.logprobs) if sampled.logprobs else {},
            hypotheses=step.hypotheses,
            prompt_logprobs=_of_entries(step, sampled.prompt_logprobs) if sampled.prompt_logprobs else {},
        )

    def _learn(self, done: _InFlight, seconds: float, drafting_s: float) -> None:
        """Have the governor learn from a step, unless its time says little about what it computed.

        Args:
            seconds: from the end of the step before to its own, as a stream sees it, less what copies to and from host
                memory took.
            drafting_s: the part of them in which a draft model drafted.
        """
        if self._num_disturbed:
            self._num_disturbed -= 1
        elif not done.after_idle and not done.step.num_moved_blocks:
            self.governor.observe(done.work, seconds - drafting_s)
            if self._has_draft_model:
                self.governor.observe_drafting(_drafting(done.step), drafting_s)

    def _learn_from(self, seq: Sequence) -> None:
        """Take in what a request that has ended says of others: its length, and which blocks may be asked for again."""
        if self._ghost is not None and seq.num_output_tokens:
            self._ghost.use(seq.block_hashes)
        self.lengths.observe(
            seq.num_prompt_tokens, seq.num_output_tokens, num_cached_tokens=seq.num_cached_tokens, route=seq.client
        )

    def _end_all(self, step: Step, sampled: Sampled, ended: Endings) -> list[Finished | Failed]:
        pooled = _of_entries(step, sampled.pooled)
        stuck = {step.sampled[index].request_id: reason for index, reason in (sampled.stuck or {}).items()}
        return [
            self._end(seq, ending, stuck.get(seq.request_id), pooled.get(seq.request_id) or b"")
            for seq, ending in ended
        ]

    def _end(self, seq: Sequence, ending: Ending, stuck: str | None, pooled: bytes) -> Finished | Failed:
        del self._sequences[seq.request_id]
        self._grammars.pop(seq.request_id, None)
        if ending != "failed":
            self._learn_from(seq)
            return _finished(seq, ending, pooled)
        if seq.pooling is not None:
            error: RequestError = InvalidHiddenStates()
        elif seq.sampling.grammar is not None:
            error = NoTokenLeft(seq.num_output_tokens, stuck or BANNED)
        else:
            error = InvalidLogits(seq.num_output_tokens)
        logger.error("request_id=%s failed: %s", seq.request_id, error)
        return _failed(seq.request_id, error)

    def _stats(self, step: Step | None, duration_s: float, predicted_s: float | None = None) -> StepStats:
        scheduler, done = self.scheduler, step or _NO_STEP
        is_due = step is None or step.plan.number % MODEL_STEPS == 0
        num_drafts = len(done.drafts)
        return StepStats(
            duration_s=duration_s,
            predicted_s=predicted_s,
            num_allocated_kv_blocks=self.kv_cache.size,
            step_model=self.governor.model if is_due else None,
            lengths=self.lengths.snapshot() if is_due else None,
            prefix_hits=self._ghost.curve() if is_due and self._ghost is not None else (),
            num_tokens=done.num_tokens,
            num_prefill_tokens=done.plan.num_prefill_tokens,
            num_decodes=done.num_decodes + num_drafts,
            num_drafts=num_drafts,
            num_draft_tokens=sum(done.plan.num_drafts) if num_drafts else 0,
            num_accepted_tokens=sum(done.num_accepted) if num_drafts else 0,
            num_swapped_out_blocks=len(done.swap_outs),
            num_swapped_in_blocks=len(done.swap_ins),
            num_host_hit_tokens=done.num_host_hit_tokens,
            host_usage=self.kv_cache.host_usage,
            num_cpu_threads=self._num_cpu_threads,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + len(self._compiling),
            blocked_by=done.blocked_by,
            kv_blocks=self.kv_cache.counts(),
            num_preemptions=len(done.preempted),
            num_recomputed_tokens=done.num_recomputed_tokens,
            num_prefix_queried_tokens=done.num_prefix_queried_tokens,
            num_prefix_hit_tokens=done.num_prefix_hit_tokens,
            revision=self._ledger.revision,
            target=scheduler.limits,
            effective=scheduler.effective,
            max_num_seqs=scheduler.envelope.max_num_seqs,
        )


_NO_STEP = Step.of_decodes([], [])
"""What an engine does that is idle."""
_NO_STEP.seal(0)


def _drafting(step: Step) -> Drafting:
    starts = step.starts[len(step.starts) - len(step.drafts) :]
    return Drafting(len(starts), sum(step.plan.num_drafts), sum(starts) // max(1, len(starts)))


def _new_tokens(step: Step) -> tuple[list[str], list[int]]:
    """Return what a step gave the sequences that have got tokens: the request id of each token, and the token."""
    sequences = step.got_tokens
    if not step.drafts:
        return [seq.request_id for seq in sequences], [seq.token_ids[-1] for seq in sequences]
    counts = [step.num_taken.get(seq.request_id, 1) for seq in sequences]
    request_ids = [seq.request_id for seq, count in zip(sequences, counts, strict=True) for _ in range(count)]
    return request_ids, [
        token for seq, count in zip(sequences, counts, strict=True) for token in seq.token_ids[-count:]
    ]


def _of_entries(step: Step, values: Mapping[int, T]) -> dict[str, T]:
    """Return what a step gave some entries of its plan, by request id."""
    return {step.sequences[entry].request_id: value for entry, value in values.items()}


def _by_request(step: Step, logprobs: dict[int, TokenLogprobs]) -> dict[str, TokenLogprobs]:
    """Return the log probabilities of the sequences that have got a token, by request id."""
    sequences, ids = step.sampled, {seq.request_id for seq in step.got_tokens}
    named = ((sequences[index].request_id, one) for index, one in logprobs.items())
    return {request_id: one for request_id, one in named if request_id in ids}


def _failed(request_id: str, error: RequestError) -> Failed:
    return Failed(request_id, error.status, error.code, error.message, error.retry_after_s)


def _finished(seq: Sequence, reason: FinishReason, pooled: bytes = b"") -> Finished:
    num_cached = seq.num_cached_tokens if pooled else 0
    return Finished(seq.request_id, reason, seq.num_prompt_tokens, seq.num_output_tokens, pooled, num_cached)
