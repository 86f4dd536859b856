"""The engine of one replica, without processes or sockets: submit, step, abort, limits."""

import logging
import random
import time
from collections.abc import Callable

import msgspec

from flyball_protocol import LimitsAck, LimitsReport, LimitsUpdate
from flyball_runtime.core.clock import Clock, MonotonicClock
from flyball_runtime.core.config import EngineConfig
from flyball_runtime.core.errors import InvalidLogits, RequestError
from flyball_runtime.core.request import Failed, Finished, FinishReason, Request
from flyball_runtime.core.sequence import Sequence
from flyball_runtime.core.stats import EngineInfo, StepStats
from flyball_runtime.engine.messages import StepOutput
from flyball_runtime.engine.runner import ModelRunner
from flyball_runtime.engine.validate import validate_request
from flyball_runtime.kv_cache import KVCache
from flyball_runtime.model.sampler import with_seed
from flyball_runtime.scheduler import BatchPlan, LimitsLedger, Scheduler, SchedulerConfig

logger = logging.getLogger(__name__)


class Engine:
    """One step is plan -> run -> commit. Not thread-safe: one loop owns it."""

    def __init__(
        self,
        config: EngineConfig,
        clock: Clock | None = None,
        *,
        import_s: float = 0.0,
        on_progress: Callable[[], object] = lambda: None,
    ) -> None:
        """Load the model and allocate the KV cache.

        Args:
            import_s: seconds that went into starting the process, reported as a stage of start-up.
            on_progress: called several times within each step.
        Raises:
            ConfigError: the model or the machine makes it impossible.
        """
        clock = clock or MonotonicClock()
        self._runner = ModelRunner(config, on_progress)
        info = self._runner.info
        self.info: EngineInfo = msgspec.structs.replace(info, startup_s={"import": round(import_s, 4)} | info.startup_s)
        self.kv_cache = KVCache(info.num_kv_blocks, info.block_size, config.enable_prefix_caching)
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_model_len=info.max_model_len,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                enable_chunked_prefill=config.enable_chunked_prefill,
                policy=config.scheduling_policy,
                fair_share=config.fair_share,
            ),
            self.kv_cache,
        )
        self._ledger = LimitsLedger(self.scheduler, clock, config.boot_prior)
        self._sequences: dict[str, Sequence] = {}
        self._rng = random.Random(config.seed)

    def submit(self, request: Request) -> Failed | None:
        """Queue a request, or return why it cannot run."""
        info = self.info
        try:
            validate_request(request, max_model_len=info.max_model_len, vocab_size=info.vocab_size)
            request = msgspec.structs.replace(request, sampling=with_seed(request.sampling, self._rng))
            sequence = Sequence(request, max_model_len=info.max_model_len, eos_token_ids=self._runner.eos_token_ids)
            self.scheduler.submit(sequence)
        except RequestError as error:
            return Failed(request.request_id, error.status, error.code, error.message, error.retry_after_s)
        self._sequences[request.request_id] = sequence
        return None

    def abort(self, request_id: str) -> Finished | None:
        """End a request now and free its blocks; None when it has ended already."""
        if not self.scheduler.abort(request_id):
            return None
        return self._ending(self._sequences.pop(request_id), "abort")

    def has_work(self) -> bool:
        return bool(self._sequences)

    def step(self) -> StepOutput:
        """Compute one step of whatever is waiting or running. Call it only while ``has_work``."""
        start_s = time.perf_counter()
        plan = self.scheduler.plan()
        if plan is None:
            raise RuntimeError(f"{len(self._sequences)} requests are unfinished, but the scheduler plans nothing")
        sampled = self._runner.run(plan)
        endings: list[Finished | Failed] = []
        if None in sampled:  # before the commit, which puts blocks into the prefix cache
            endings += [self._fail(seq) for seq, token in zip(plan.sampled, sampled, strict=True) if token is None]
        results = self.scheduler.commit(plan, sampled)
        endings += [self._ending(self._sequences.pop(seq.request_id), reason) for seq, reason in results if reason]
        return StepOutput(
            request_ids=[seq.request_id for seq, _ in results],
            token_ids=[seq.token_ids[-1] for seq, _ in results],
            endings=endings,
            stats=self._stats(plan, time.perf_counter() - start_s),
            num_cached_tokens=plan.num_cached_tokens(),
        )

    def post_limits(self, update: LimitsUpdate) -> LimitsAck:
        return self._ledger.post(update)

    def limits(self) -> LimitsReport:
        return self._ledger.report()

    def tick(self) -> LimitsReport | None:
        """Let a lease run out when its time has come; return the limits if that has moved them."""
        return self.limits() if self._ledger.tick() else None

    def state(self) -> StepStats:
        """The state between steps."""
        return self._stats(None, 0.0)

    def _fail(self, seq: Sequence) -> Failed:
        """End a sequence whose logits are unusable."""
        error = InvalidLogits(seq.num_output_tokens)
        logger.error("request_id=%s failed: %s", seq.request_id, error)
        self.scheduler.fail(seq)
        del self._sequences[seq.request_id]
        return Failed(seq.request_id, error.status, error.code, error.message)

    def _ending(self, seq: Sequence, reason: FinishReason) -> Finished:
        return Finished(seq.request_id, reason, seq.num_prompt_tokens, seq.num_output_tokens)

    def _stats(self, plan: BatchPlan | None, duration_s: float) -> StepStats:
        scheduler = self.scheduler
        return StepStats(
            duration_s=duration_s,
            num_tokens=plan.num_tokens if plan else 0,
            num_prefill_tokens=plan.num_prefill_tokens if plan else 0,
            num_decodes=plan.num_decodes if plan else 0,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            blocked_by=scheduler.blocked_by if plan else "none",
            kv_blocks=self.kv_cache.counts(),
            num_preemptions=len(plan.preempted) if plan else 0,
            num_recomputed_tokens=plan.num_recomputed_tokens if plan else 0,
            num_prefix_queried_tokens=plan.num_prefix_queried_tokens if plan else 0,
            num_prefix_hit_tokens=plan.num_prefix_hit_tokens if plan else 0,
            revision=self._ledger.revision,
            target=scheduler.limits,
            effective=scheduler.effective,
        )
