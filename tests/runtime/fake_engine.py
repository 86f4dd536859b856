"""A scriptable EngineFront: answers by itself with ``reply``, or waits for the test to emit each event."""

import asyncio
import os
from array import array
from collections.abc import AsyncIterator, Callable

from flyball_protocol import Envelope, KVBlocks, Limits, LimitsAck, LimitsReport, LimitsStatus, LimitsUpdate, StepModel
from flyball_runtime.core.errors import Draining, EmptyPrompt, EngineDead, NotReady, PromptTooLong, TokenOutOfVocabulary
from flyball_runtime.core.lora import LoraConfig
from flyball_runtime.core.request import (
    Failed,
    Finished,
    FinishReason,
    Hypotheses,
    Hypothesis,
    Prompt,
    Request,
    RequestEvent,
    TokenLogprobs,
    Tokens,
)
from flyball_runtime.core.stats import EngineInfo, StepStats
from flyball_runtime.engine.adapters import AdapterAnswer, Adapters, LoadAdapter, UnloadAdapter

LIMITS = Limits(max_num_seqs=8, kv_cache_fraction=1.0, max_num_batched_tokens=64)
ENVELOPE = Envelope(
    max_num_seqs=8,
    max_num_batched_tokens=64,
    min_num_batched_tokens=8,
    num_kv_blocks=100,
    min_kv_cache_fraction=0.1,
    block_size=16,
    max_model_len=1024,
)


STEP_MODEL = StepModel(base_s=0.01, token_s=1e-4, residual_p50=0.04, residual_p95=0.1, num_steps=300, settled=True)


def step_stats(**changes: object) -> StepStats:
    """Stats of an idle step, with changes."""
    fields: dict[str, object] = {
        "duration_s": 0.004,
        "num_tokens": 0,
        "num_prefill_tokens": 0,
        "num_decodes": 0,
        "num_running": 0,
        "num_waiting": 0,
        "blocked_by": "none",
        "kv_blocks": KVBlocks(total=100, capacity=100, free=100, used=0, cached=0),
        "num_preemptions": 0,
        "num_recomputed_tokens": 0,
        "num_prefix_queried_tokens": 0,
        "num_prefix_hit_tokens": 0,
        "revision": 0,
        "target": LIMITS,
        "effective": LIMITS,
        "max_num_seqs": 256,
        "num_cpu_threads": 2,
    }
    return StepStats(**(fields | changes))  # type: ignore[arg-type]


def pooled_states(prompt: list[int]) -> bytes:
    """The made-up vector of a prompt."""
    return array("f", (prompt[0], -prompt[-1], len(prompt), 0)).tobytes()


class FakeEngine:
    """Implements EngineFront.

    Args:
        reply: the output tokens of a request, sent one event each and ended by stop, or by length at max_tokens;
            None: the test calls ``tokens``, ``finish``, ``fail``.

    Attributes:
        requests: every accepted request, in order.
        aborted: ids that ``abort`` was called for while they ran.
        refuse: raised by ``submit`` from the given accepted request on.
        full: raised by ``check_queue``.
    """

    def __init__(self, vocab_size: int, reply: Callable[[Request], list[int]] | None = None) -> None:
        self.engine_info = EngineInfo(
            model="test-model",
            dtype="float32",
            device="cpu",
            kernel_backend="torch",
            max_model_len=1024,
            max_num_batched_tokens=64,
            vocab_size=vocab_size,
            block_size=16,
            kv_windows=(None,),
            num_kv_blocks=100,
            num_start_kv_blocks=100,
            num_parameters=1,
            startup_s={"weights": 0.5, "warm_up": 0.25},
            longest_pause_s=0.5,
        )
        self.reply = reply
        self.ready = True
        self.draining = False
        self.dead_reason: str | None = None
        self.heartbeat_s = 0.0
        self.stats: StepStats | None = step_stats()
        self.num_cached_tokens = 0
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.refuse: tuple[int, Exception] | None = None
        self.full: Exception | None = None
        self.revision = 0
        self.limits_now = LIMITS
        self.adapters = Adapters(LoraConfig(max_cpu_loras=3), self._post)
        self.posted: list[LoadAdapter | UnloadAdapter] = []
        self._streams: dict[str, asyncio.Queue[RequestEvent]] = {}
        self._num_output_tokens: dict[str, int] = {}

    def _post(self, message: LoadAdapter | UnloadAdapter) -> None:
        """Answer at once: an adapter can be used unless its path has ``broken`` in it."""
        self.posted.append(message)
        if isinstance(message, LoadAdapter):
            error = "it is broken." if "broken" in message.path else None
            asyncio.get_running_loop().call_soon(self.adapters.answered, AdapterAnswer(message.number, error))

    # EngineFront

    @property
    def info(self) -> EngineInfo:
        if not self.ready and self.stats is None:
            raise NotReady
        return self.engine_info

    @property
    def num_unfinished(self) -> int:
        return len(self._streams)

    @property
    def engine_pid(self) -> int:
        return os.getpid()

    def check_queue(self, client: str) -> None:
        if self.full is not None:
            raise self.full

    def prepare(
        self, prompts: list[list[int]], num_choices: int, cache_salt: str | None, adapter: int | None = None
    ) -> list[Prompt]:
        for prompt in prompts:
            self._check_prompt(prompt)
        return [Prompt(prompt, []) for prompt in prompts]

    def submit(self, request: Request) -> AsyncIterator[RequestEvent]:
        self._check(request)
        self.requests.append(request)
        if request.adapter is not None:
            self.adapters.opened(request.request_id, request.adapter)
        queue: asyncio.Queue[RequestEvent] = asyncio.Queue()
        self._streams[request.request_id] = queue
        self._num_output_tokens[request.request_id] = 0
        if self.reply is not None:
            self._answer(request, self.reply(request))
        return self._events(queue)

    def abort(self, request_id: str) -> None:
        if request_id in self._streams:
            self.aborted.append(request_id)
            self.finish("abort", request_id)

    async def post_limits(self, update: LimitsUpdate) -> LimitsAck:
        status, reason = LimitsStatus.APPLIED, ""
        wanted = update.limits.applied_to(self.limits_now)
        if update.revision < self.revision:
            status, reason = LimitsStatus.STALE, f"revision {self.revision} is in force"
        elif wanted.max_num_seqs > ENVELOPE.max_num_seqs:
            status, reason = LimitsStatus.REJECTED, f"max_num_seqs is at most {ENVELOPE.max_num_seqs}"
        else:
            self.revision, self.limits_now = update.revision, wanted
        return LimitsAck(
            status=status, revision=self.revision, target=self.limits_now, effective=self.limits_now, reason=reason
        )

    def limits(self) -> LimitsReport:
        return LimitsReport(
            revision=self.revision,
            target=self.limits_now,
            effective=self.limits_now,
            envelope=ENVELOPE,
            last_known_good=LIMITS,
        )

    def latest_stats(self) -> StepStats | None:
        return self.stats

    def heartbeat_age_s(self) -> float:
        return self.heartbeat_s

    def start_drain(self) -> None:
        self.draining = True

    # The script. Without a request id: the last request.

    def tokens(self, token_ids: list[int], request_id: str | None = None) -> None:
        request_id = request_id or self.requests[-1].request_id
        if request_id in self._streams:
            self._num_output_tokens[request_id] += len(token_ids)
            request = next(one for one in self.requests if one.request_id == request_id)
            logprobs = self._logprobs(token_ids, request.sampling.logprobs)
            is_first = self._num_output_tokens[request_id] == len(token_ids)
            prompt = self._logprobs(request.prompt_token_ids[1:] if is_first else [], request.sampling.prompt_logprobs)
            self._streams[request_id].put_nowait(
                Tokens(request_id, token_ids, self.num_cached_tokens, logprobs, prompt)
            )

    def found(self, request: Request, token_ids: list[int]) -> None:
        """End a beam search: it has found these tokens, and others that are one, two, ... tokens shorter."""
        search = request.sampling.beam_search
        assert search is not None
        outputs = [token_ids[: len(token_ids) - rank] for rank in range(search.width)]
        hypotheses = [
            Hypothesis(one, -0.5 - rank, -1.0 - rank, "length", self._logprobs(one, request.sampling.logprobs))
            for rank, one in enumerate(outputs)
        ]
        self._streams[request.request_id].put_nowait(Hypotheses(request.request_id, hypotheses, self.num_cached_tokens))
        self.finish("length", request.request_id)

    def _logprobs(self, token_ids: list[int], count: int | None) -> list[TokenLogprobs]:
        """Made up: -0.5 for the chosen token, which is the likeliest, and less for those with the next ids."""
        if count is None:
            return []
        tops = [-0.5 - rank for rank in range(count)]
        return [TokenLogprobs(one, -0.5, [one + rank for rank in range(count)], tops, 1) for one in token_ids]

    def finish(self, reason: FinishReason = "stop", request_id: str | None = None) -> None:
        request_id = request_id or self.requests[-1].request_id
        if (queue := self._streams.pop(request_id, None)) is not None:
            request = next(one for one in self.requests if one.request_id == request_id)
            num_prompt = len(request.prompt_token_ids)
            self.adapters.ended(request_id)
            pooled = b"" if request.pooling is None or reason == "abort" else pooled_states(request.prompt_token_ids)
            queue.put_nowait(
                Finished(
                    request_id, reason, num_prompt, self._num_output_tokens[request_id], pooled, self.num_cached_tokens
                )
            )

    def fail(self, status: int, code: str, message: str, request_id: str | None = None) -> None:
        request_id = request_id or self.requests[-1].request_id
        if (queue := self._streams.pop(request_id, None)) is not None:
            queue.put_nowait(Failed(request_id, status, code, message))

    def die(self, reason: str) -> None:
        """The engine process ends: every pending request fails, nothing new is taken."""
        self.dead_reason = reason
        error = EngineDead(reason)
        for request_id in list(self._streams):
            self.fail(error.status, error.code, error.message, request_id)

    def _check(self, request: Request) -> None:
        info, prompt = self.info, request.prompt_token_ids
        if self.dead_reason is not None:
            raise EngineDead(self.dead_reason)
        if self.draining:
            raise Draining
        if self.refuse is not None and len(self.requests) >= self.refuse[0]:
            raise self.refuse[1]
        self._check_prompt(prompt)
        if len(prompt) + (request.sampling.max_tokens or 1) > info.max_model_len:
            raise PromptTooLong(len(prompt), request.sampling.max_tokens, info.max_model_len)

    def _check_prompt(self, prompt: list[int]) -> None:
        if not prompt:
            raise EmptyPrompt
        for token_id in prompt:
            if not 0 <= token_id < self.info.vocab_size:
                raise TokenOutOfVocabulary(token_id, self.info.vocab_size)

    def _answer(self, request: Request, token_ids: list[int]) -> None:
        if request.pooling is not None:
            self.finish("stop", request.request_id)
            return
        most = request.sampling.max_tokens or len(token_ids)
        if request.sampling.beam_search is not None:
            self.found(request, token_ids[:most])
            return
        for token_id in token_ids[:most]:
            self.tokens([token_id], request.request_id)
        self.finish("length" if len(token_ids) > most else "stop", request.request_id)

    @staticmethod
    async def _events(queue: "asyncio.Queue[RequestEvent]") -> AsyncIterator[RequestEvent]:
        while True:
            event = await queue.get()
            yield event
            if isinstance(event, Finished | Failed):
                return
