"""What the API sees of an engine, and the streams of its open requests."""

import asyncio
import math
from collections import Counter, deque
from collections.abc import AsyncIterator
from typing import Protocol

from flyball_protocol import LimitsAck, LimitsReport, LimitsUpdate, Objectives
from flyball_runtime.core.request import (
    Failed,
    Finished,
    Hypotheses,
    Hypothesis,
    Prompt,
    Request,
    RequestEvent,
    TokenLogprobs,
    Tokens,
)
from flyball_runtime.core.stats import EngineInfo, StepStats
from flyball_runtime.engine.adapters import Adapters


class EngineObserver(Protocol):
    """Told about every engine step, and the objectives in force, on the API process's event loop."""

    def step(self, stats: StepStats) -> None: ...

    def count_against(self, objectives: Objectives | None, revision: int) -> None: ...


class EngineFront(Protocol):
    """A running engine. Every request accepted by ``submit`` ends in exactly one Finished or Failed."""

    @property
    def info(self) -> EngineInfo:
        """Facts fixed at start-up. Raises NotReady before the engine is up."""
        ...

    @property
    def ready(self) -> bool: ...

    @property
    def draining(self) -> bool: ...

    @property
    def dead_reason(self) -> str | None:
        """Why the engine process ended, or None while it lives."""
        ...

    @property
    def engine_pid(self) -> int:
        """Of the process that runs the steps. Raises NotReady before it runs."""
        ...

    @property
    def num_unfinished(self) -> int:
        """Requests accepted and not yet ended."""
        ...

    @property
    def adapters(self) -> Adapters:
        """The LoRA adapters that requests may have."""
        ...

    def check_queue(self, client: str) -> None:
        """Refuse what ``submit`` would refuse now whatever the request is, so that no work is done for it in vain.

        Raises:
            RequestError: as ``submit``, when nothing of this client can be taken now.
        """
        ...

    def prepare(
        self, prompts: list[list[int]], num_choices: int, cache_salt: str | None, adapter: int | None = None
    ) -> list[Prompt]:
        """Check the prompts of one HTTP request and name their KV blocks, once for all of their choices.

        It takes about 60 ns a token, and any thread may call it.

        Raises:
            RequestError: a prompt can never run (PromptTooLong, EmptyPrompt, TokenOutOfVocabulary), or all of them with all
                their choices never fit into the queue (TooManyPromptTokens).
        """
        ...

    def submit(self, request: Request) -> AsyncIterator[RequestEvent]:
        """Queue a request; the iterator yields Tokens any number of times, then one Finished or Failed.

        Of a beam search it yields one Hypotheses in the place of Tokens.

        Raises:
            RequestError: at once, when the request can never run (PromptTooLong, EmptyPrompt, TokenOutOfVocabulary,
                InvalidRequest, AdapterNotFound) or not now (QueueFull, QueuedTokensFull, Draining, NotReady,
                EngineDead).
        """
        ...

    def abort(self, request_id: str) -> None:
        """End a request early; idempotent. Its iterator ends with ``Finished(reason="abort")``."""
        ...

    async def post_limits(self, update: LimitsUpdate) -> LimitsAck: ...

    def limits(self) -> LimitsReport: ...

    def latest_stats(self) -> StepStats | None: ...

    def heartbeat_age_s(self) -> float:
        """Seconds since the engine last made progress: idle at least once a second, busy after each layer of a step."""
        ...

    def start_drain(self) -> None:
        """Refuse new requests from now on; running and waiting ones go on to their end."""
        ...


class RequestStream:
    """The events of one request, for one reader.

    Tokens that arrive while the reader is busy merge into one Tokens event, so a slow reader costs memory for its token
    ids (at most ``max_tokens``) and never for events.
    """

    def __init__(self, request_id: str, client: str, num_prompt_tokens: int) -> None:
        self.request_id = request_id
        self.client = client
        self.num_queued_tokens = num_prompt_tokens  # 0 from the first output token on
        self.num_cached_tokens = 0
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._hypotheses: list[Hypothesis] = []
        self._ending: Finished | Failed | None = None
        self._exhausted = False
        self._news = asyncio.Event()

    def push_token(self, token_id: int) -> None:
        self._token_ids.append(token_id)
        self._news.set()

    def push_logprobs(self, logprobs: TokenLogprobs) -> None:
        """Those of the token that is pushed next."""
        self._logprobs.append(logprobs)

    def push_prompt_logprobs(self, logprobs: list[TokenLogprobs]) -> None:
        """More of those that the first tokens bring along."""
        self._prompt_logprobs += logprobs

    def push_hypotheses(self, hypotheses: list[Hypothesis]) -> None:
        """All that a beam search has found; the ending follows at once."""
        self._hypotheses = hypotheses

    def end(self, ending: Finished | Failed) -> None:
        """Set the ending; the first one counts."""
        if self._ending is None:
            self._ending = ending
            self._news.set()

    def __aiter__(self) -> AsyncIterator[RequestEvent]:
        return self

    async def __anext__(self) -> RequestEvent:
        if self._exhausted:
            raise StopAsyncIteration
        await self._news.wait()
        if self._token_ids:
            tokens = Tokens(
                self.request_id, self._token_ids, self.num_cached_tokens, self._logprobs, self._prompt_logprobs
            )
            self._token_ids, self._logprobs, self._prompt_logprobs = [], [], []
            if self._ending is None:
                self._news.clear()
            return tokens
        if self._hypotheses:
            found, self._hypotheses = self._hypotheses, []
            return Hypotheses(self.request_id, found, self.num_cached_tokens)
        self._exhausted = True
        if self._ending is None:
            raise RuntimeError(f"stream of {self.request_id} woke without news")
        return self._ending


class Router:
    """The open streams by request id. Lives on one event loop."""

    def __init__(self) -> None:
        self._streams: dict[str, RequestStream] = {}
        self._num_streams_of: Counter[str] = Counter()  # by client
        self._num_queued_tokens_of: Counter[str] = Counter()  # by client

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._streams

    @property
    def num_clients(self) -> int:
        return len(self._num_streams_of)

    def num_streams_of(self, client: str) -> int:
        return self._num_streams_of[client]

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens of the requests that have no output yet."""
        return self._num_queued_tokens_of.total()

    def num_queued_tokens_of(self, client: str) -> int:
        return self._num_queued_tokens_of[client]

    def open(self, request_id: str, client: str = "", num_prompt_tokens: int = 0) -> RequestStream:
        stream = RequestStream(request_id, client, num_prompt_tokens)
        self._streams[request_id] = stream
        self._num_streams_of[client] += 1
        self._num_queued_tokens_of[client] += num_prompt_tokens
        return stream

    def push_tokens(self, request_ids: list[str], token_ids: list[int]) -> None:
        """Deliver one step's tokens. Those of requests that ended meanwhile are dropped."""
        streams = self._streams
        for request_id, token_id in zip(request_ids, token_ids, strict=True):
            if (stream := streams.get(request_id)) is not None:
                if stream.num_queued_tokens:
                    self._leave_queue(stream)
                stream.push_token(token_id)

    def note_logprobs(self, logprobs: dict[str, TokenLogprobs]) -> None:
        """Keep what one step says of tokens that ``push_tokens`` delivers next."""
        for request_id, one in logprobs.items():
            if (stream := self._streams.get(request_id)) is not None:
                stream.push_logprobs(one)

    def note_prompt_logprobs(self, logprobs: dict[str, list[TokenLogprobs]]) -> None:
        """Keep what one step says of prompts."""
        for request_id, scores in logprobs.items():
            if (stream := self._streams.get(request_id)) is not None:
                stream.push_prompt_logprobs(scores)

    def note_hypotheses(self, hypotheses: dict[str, list[Hypothesis]]) -> None:
        """Keep what beam searches have found whose requests ``end`` next."""
        for request_id, found in hypotheses.items():
            if (stream := self._streams.get(request_id)) is not None:
                stream.push_hypotheses(found)

    def note_cached(self, num_cached_tokens: dict[str, int]) -> None:
        """Keep how many prompt tokens of each request the prefix cache held; its next tokens say so."""
        for request_id, num in num_cached_tokens.items():
            if (stream := self._streams.get(request_id)) is not None:
                stream.num_cached_tokens = num

    def end(self, ending: Finished | Failed) -> None:
        if (stream := self._streams.pop(ending.request_id, None)) is not None:
            stream.end(ending)
            self._leave_queue(stream)
            _take(self._num_streams_of, stream.client, 1)

    def fail_all(self, status: int, code: str, message: str) -> None:
        for request_id in list(self._streams):
            self.end(Failed(request_id, status, code, message))

    def _leave_queue(self, stream: RequestStream) -> None:
        _take(self._num_queued_tokens_of, stream.client, stream.num_queued_tokens)
        stream.num_queued_tokens = 0


def _take(counts: Counter[str], client: str, amount: int) -> None:
    """Subtract; a count of 0 is no entry, so that clients which have left take no memory."""
    counts[client] -= amount
    if not counts[client]:
        del counts[client]


_WINDOW = 64
_MAX_S = 60


class RetryAfter:
    """Estimates how long the present queue takes to be served, from the rate of the last endings.

    Until there is one, from what was learned of step times and lengths.
    """

    def __init__(self) -> None:
        self._ended_at_s: deque[float] = deque(maxlen=_WINDOW)
        self._predicted_each_s = 0.0

    def learn(self, stats: StepStats) -> None:
        """Predict how often a request ends when all seats are taken: each decodes, and the prompts of others are computed."""
        model, lengths, num = stats.step_model, stats.lengths, stats.effective.max_num_seqs
        if model is None or lengths is None:
            return
        starts = num / lengths.output_tokens  # a step
        step_s = model.predict(
            round(starts * lengths.computed_prompt_tokens),
            num,
            round(num * lengths.context_tokens),
            round(starts * lengths.computed_prompt_tokens_squared / 2),
        )
        self._predicted_each_s = step_s / starts

    def record_ending(self, now_s: float) -> None:
        self._ended_at_s.append(now_s)

    def forget(self) -> None:
        """Start anew after a time without requests, which says nothing about how fast they end."""
        self._ended_at_s.clear()

    def estimate_s(self, num_waiting: int, now_s: float) -> int:
        """Whole seconds from 1 to 60; 1 while nothing is known. Grows when endings stop."""
        seconds_each = self._predicted_each_s
        if self._ended_at_s:
            seconds_each = (now_s - self._ended_at_s[0]) / len(self._ended_at_s)
        return min(_MAX_S, max(1, math.ceil(num_waiting * seconds_each)))
