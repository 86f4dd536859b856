"""The API process's side of the engine: spawns the engine process and exchanges messages with it."""

import asyncio
import itertools
import logging
import math
import multiprocessing
import os
import socket
import time
import traceback
from contextlib import suppress
from typing import Self

import msgspec

from flyball_protocol import LimitsAck, LimitsReport, LimitsUpdate
from flyball_runtime.core.clock import Clock, MonotonicClock
from flyball_runtime.core.config import EngineConfig
from flyball_runtime.core.errors import (
    AdapterNotFound,
    ConfigError,
    Draining,
    EngineDead,
    EngineError,
    InvalidRequest,
    NotReady,
    QueuedTokensFull,
    QueueFull,
    TooManyPromptTokens,
)
from flyball_runtime.core.request import Prompt, Request, validate_prompt, validate_settings
from flyball_runtime.core.stats import EngineInfo, StepOutput, StepStats
from flyball_runtime.engine.adapters import AdapterAnswer, Adapters
from flyball_runtime.engine.channel import ApiEnd
from flyball_runtime.engine.front import EngineObserver, RequestStream, RetryAfter, Router
from flyball_runtime.engine.heartbeat import Heartbeat
from flyball_runtime.engine.process import (
    STACKS_SIGNAL,
    Abort,
    Died,
    FromEngine,
    LimitsAnswer,
    LimitsMoved,
    PostLimits,
    Ready,
    StopEngine,
    Submit,
    ToEngine,
    decode_from_engine,
    encode_message,
    run_engine,
)
from flyball_runtime.kv_cache import hash_prompt
from flyball_runtime.scheduler import BlockedBy

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0

LAST_WORDS_S = 0.2
"""How long to read on when the engine process has ended, should another process hold its end of the channel open."""


class EngineClient:
    """Implements EngineFront over an engine process of its own. Lives on one event loop.

    Use as ``async with EngineClient(config) as client``; ``await client.wait_ready()`` for the model to be loaded.
    """

    def __init__(
        self, config: EngineConfig, observer: EngineObserver | None = None, clock: Clock | None = None
    ) -> None:
        self._config = config
        self._observer = observer
        self._clock = clock or MonotonicClock()
        self._router = Router()
        self._retry_after = RetryAfter()
        self._info: EngineInfo | None = None
        self._limits: LimitsReport | None = None
        self._lease_end_s: float | None = None
        self._stats: StepStats | None = None
        self._blocked = False  # whether the last step left requests waiting
        self._heartbeat = Heartbeat()
        self._draining = False
        self._refusing = False
        self._last_request_s = -math.inf
        self._dead: Exception | None = None
        self._stopping = False
        self._acks: dict[int, asyncio.Future[LimitsAck]] = {}  # by post_id
        self._post_ids = itertools.count()
        self._channel = ApiEnd(self._read, self._cannot_read)
        self.adapters = Adapters(config.lora, self._post)
        self._started = asyncio.Event()
        self._drained = asyncio.Event()
        self.died = asyncio.Event()

    async def __aenter__(self) -> Self:
        ours, theirs = socket.socketpair()
        await self._channel.open(ours)
        self._process = multiprocessing.get_context("spawn").Process(
            target=run_engine,
            args=(self._config, theirs, self._heartbeat, os.getpid(), time.time()),
            name="flyball-engine",
            daemon=False,
        )
        self._process.start()
        theirs.close()  # else the channel would stay open when the engine is gone
        asyncio.get_running_loop().add_reader(self._process.sentinel, self._process_ended)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop the engine process; requests still open fail with EngineDead."""
        self._stopping = True
        if self._process.is_alive():
            self._post(StopEngine())
            await asyncio.to_thread(self._process.join, STOP_TIMEOUT_S)
        if self._process.is_alive():
            logger.warning("the engine process did not stop within %g s and is killed", STOP_TIMEOUT_S)
            self._process.kill()
            await asyncio.to_thread(self._process.join)
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        self._fail_everything(EngineError("it was stopped"))
        self._channel.close()

    async def wait_ready(self) -> EngineInfo:
        """Return once the model is loaded. Raises ConfigError or EngineError when it cannot be."""
        await self._started.wait()
        if self._dead is not None:
            raise self._dead
        return self.info

    # --- EngineFront ---------------------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise NotReady
        return self._info

    @property
    def ready(self) -> bool:
        return self._info is not None and self._dead is None and not self._draining

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def dead_reason(self) -> str | None:
        return None if self._dead is None else str(self._dead)

    @property
    def num_unfinished(self) -> int:
        return len(self._router)

    def check_queue(self, client: str) -> None:
        self._check_accepting()
        self._check_queue(client, num_tokens=1)

    def prepare(
        self, prompts: list[list[int]], num_choices: int, cache_salt: str | None, adapter: int | None = None
    ) -> list[Prompt]:
        num_tokens, most = num_choices * sum(map(len, prompts)), self._max_queued_tokens()
        if num_tokens > most:
            raise TooManyPromptTokens(num_tokens, most)
        return [self._prepared(prompt, cache_salt, adapter) for prompt in prompts]

    def submit(self, request: Request) -> RequestStream:
        self._check_accepting()
        self._last_request_s = self._clock.now()
        if not request.block_hashes:
            prompt = self._prepared(request.prompt_token_ids, request.cache_salt, request.adapter)
            request = msgspec.structs.replace(request, block_hashes=prompt.block_hashes)
        validate_settings(request, max_model_len=self.info.max_model_len, vocab_size=self.info.vocab_size)
        if (beam_search := request.sampling.beam_search) is not None:
            beam_search.check_seats(self.limits().envelope.max_num_seqs)
        if request.adapter is not None and request.adapter not in self.adapters:
            raise AdapterNotFound("the adapter was unloaded before this request could be accepted.", param="model")
        self._check_queue(request.client, len(request.prompt_token_ids))
        if request.request_id in self._router:
            raise InvalidRequest(f"request_id {request.request_id} is in use; wait for it to end or choose another.")
        if not self._router:
            self._retry_after.forget()
        self._post(Submit(request))
        if request.adapter is not None:
            self.adapters.opened(request.request_id, request.adapter)
        return self._router.open(request.request_id, request.client, len(request.prompt_token_ids))

    def abort(self, request_id: str) -> None:
        if request_id in self._router:
            self._post(Abort(request_id))

    async def post_limits(self, update: LimitsUpdate) -> LimitsAck:
        if self._dead is not None:
            raise EngineDead(str(self._dead))
        if self._info is None:
            raise NotReady
        post_id = next(self._post_ids)
        self._post(PostLimits(post_id, update))
        answer = self._acks[post_id] = asyncio.get_running_loop().create_future()
        try:
            return await answer
        finally:
            self._acks.pop(post_id, None)

    def limits(self) -> LimitsReport:
        if self._limits is None:
            raise NotReady
        if self._lease_end_s is None:
            return self._limits
        left_s = max(0.0, self._lease_end_s - self._clock.now())
        return msgspec.structs.replace(self._limits, lease_expires_in_s=left_s)

    def latest_stats(self) -> StepStats | None:
        return self._stats

    def heartbeat_age_s(self) -> float:
        return self._heartbeat.age_s()

    def seconds_since_request(self) -> float:
        """Return how long ago the latest request came; infinity before the first."""
        return self._clock.now() - self._last_request_s

    def announce_drain(self) -> None:
        """Turn /readyz red, so that no more requests are sent here, and accept those that come all the same."""
        self._draining = True

    def start_drain(self) -> None:
        if not self._refusing:
            logger.info("draining: new requests are refused, %d are still running", self.num_unfinished)
        self._draining = self._refusing = True
        self._note_drained()

    @property
    def engine_pid(self) -> int:
        if self._process.pid is None:
            raise NotReady
        return self._process.pid

    def log_stacks(self) -> None:
        """Have the engine write to the log what each of its threads is doing."""
        os.kill(self.engine_pid, STACKS_SIGNAL)

    async def wait_drained(self) -> None:
        """Return once draining has begun and every accepted request has ended."""
        await self._drained.wait()

    def fail_unfinished(self, reason: str) -> None:
        """End every open request with a 503: the drain's deadline has passed."""
        self._router.fail_all(503, "stopped", f"{reason}. Retry; another replica will answer.")

    # --- the wire ------------------------------------------------------------------------------------------------

    def _check_accepting(self) -> None:
        if self._dead is not None:
            raise EngineDead(str(self._dead))
        if self._refusing:
            raise Draining
        if self._info is None:
            raise NotReady

    def _check_queue(self, client: str, num_tokens: int) -> None:
        """Refuse a request that would have to wait behind ``max_queued_requests`` others, or ``max_queued_tokens``.

        A client below its share of a queue that others have filled may still wait, until twice as many do.
        """
        router = self._router
        num_waiting, most = self.num_unfinished - self._num_seats(), self._config.max_queued_requests
        if not self._may_wait(client, num_waiting + 1, router.num_streams_of(client) + 1, most):
            raise QueueFull(most, self._retry_after.estimate_s(num_waiting, self._clock.now()))
        num_queued, most = router.num_queued_tokens, self._max_queued_tokens()
        if not self._may_wait(client, num_queued + num_tokens, router.num_queued_tokens_of(client) + num_tokens, most):
            retry_after_s = self._retry_after.estimate_s(self.num_unfinished, self._clock.now())
            raise QueuedTokensFull(num_queued, num_tokens, most, retry_after_s)

    def _may_wait(self, client: str, total: int, own: int, most: int) -> bool:
        """Return whether ``total`` may wait, ``own`` of them of this client: ``most``, or else twice as many and its share.

        The share is an even split among the clients that are present, this one included.
        """
        num_clients = self._router.num_clients + (self._router.num_streams_of(client) == 0)
        return total <= most or (self._config.fair_share and total <= 2 * most and own <= most // num_clients)

    def _max_queued_tokens(self) -> int:
        """Return how many prompt tokens may wait: a longest prompt in any case."""
        return max(self._config.max_queued_tokens, self.info.max_model_len)

    def _num_seats(self) -> int:
        """Return how many requests run or can start to run in the next step.

        The last report is a step old, and a burst fits between two steps. So free seats count as taken by the requests
        that the engine has not planned yet, unless the last step could not fill its seats.
        """
        if self._blocked and self._stats is not None:
            return self._stats.num_running
        return self.limits().effective.max_num_seqs

    def _prepared(self, token_ids: list[int], cache_salt: str | None, adapter: int | None) -> Prompt:
        """Check and hash a prompt here: it takes as long as the rest of its admission, and the engine has its step to make."""
        validate_prompt(token_ids, max_model_len=self.info.max_model_len, vocab_size=self.info.vocab_size)
        if not self._config.enable_prefix_caching:
            return Prompt(token_ids, [])
        return Prompt(token_ids, hash_prompt(token_ids, self._config.block_size, cache_salt, adapter))

    def _post(self, message: ToEngine) -> None:
        """Send a message. Nothing is sent, and the encoder's error raised, if it cannot be encoded."""
        self._channel.send(encode_message(message))

    def _read(self, frame: bytes) -> None:
        self._handle(decode_from_engine(frame))

    def _cannot_read(self, error: Exception) -> None:
        """Fail what is open: unread, every stream would hang."""
        logger.critical("cannot read messages of the engine:\n%s", "".join(traceback.format_exception(error)))
        self._fail_everything(EngineError(f"reading its messages failed: {type(error).__name__}: {error}"))

    def _handle(self, message: FromEngine) -> None:
        match message:
            case StepOutput():
                self._router.note_cached(message.num_cached_tokens)
                self._router.note_logprobs(message.logprobs)
                self._router.note_prompt_logprobs(message.prompt_logprobs)
                self._router.push_tokens(message.request_ids, message.token_ids)
                self._router.note_hypotheses(message.hypotheses)
                for ending in message.endings:
                    self._router.end(ending)
                    self.adapters.ended(ending.request_id)
                    self._retry_after.record_ending(self._clock.now())
                self._note_stats(message.stats)
                self._note_drained()
            case LimitsAnswer(post_id, ack, report):
                self._note_limits(report)
                if (answer := self._acks.get(post_id)) is not None and not answer.done():
                    answer.set_result(ack)
            case AdapterAnswer():
                self.adapters.answered(message)
            case LimitsMoved(report):
                self._note_limits(report)
            case Ready(info, report):
                self._note_limits(report)
                self._info = info
                self._started.set()
            case Died(reason, is_config_error):
                self._fail_everything(ConfigError(reason) if is_config_error else EngineError(reason))

    def _note_limits(self, report: LimitsReport) -> None:
        left_s = report.lease_expires_in_s
        self._limits, self._lease_end_s = report, None if left_s is None else self._clock.now() + left_s
        if self._observer is not None:
            self._observer.count_against(report.objectives, report.revision)

    def _note_stats(self, stats: StepStats) -> None:
        self._stats = stats
        self._retry_after.learn(stats)
        if stats.num_tokens or not stats.num_running:  # else a report between two steps, which has planned nothing
            self._blocked = stats.blocked_by != BlockedBy.NONE
        if self._limits is not None:
            self._limits = msgspec.structs.replace(
                self._limits, revision=stats.revision, target=stats.target, effective=stats.effective
            )
        if self._observer is not None:
            self._observer.step(stats)

    def _note_drained(self) -> None:
        if self._refusing and not self._router:
            self._drained.set()

    def _process_ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        if not self._stopping:
            asyncio.create_task(self._fail_after_last_words())  # noqa: RUF006 - ends by itself, at once

    async def _fail_after_last_words(self) -> None:
        """The process is gone, but what it sent last (a reason, perhaps) may not have been read yet."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._channel.closed.wait(), LAST_WORDS_S)
        await asyncio.to_thread(self._process.join, STOP_TIMEOUT_S)  # its files close first, then it has an exit code
        self._fail_everything(EngineError(f"the engine process ended with exit code {self._process.exitcode}"))

    def _fail_everything(self, error: Exception) -> None:
        if self._dead is None:
            self._dead = error
        dead = EngineDead(str(self._dead))
        self._router.fail_all(dead.status, dead.code, dead.message)
        self.adapters.fail_all(dead)
        for answer in self._acks.values():
            if not answer.done():
                answer.set_exception(dead)
        self._started.set()
        self.died.set()
        self._note_drained()
