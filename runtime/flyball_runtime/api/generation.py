"""One HTTP request's engine requests, from submit to their endings.

Every choice (one engine request, or one output that a beam search has found) has a task that takes its events at once, so the
engine's router never waits for a slow reader. Its text gathers until somebody takes it: pieces of a slow reader coalesce, and
memory is bounded by the text of the output.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

from msgspec import Struct, structs
from starlette.types import Receive

from flyball_runtime.api.errors import HttpRefusal, from_failed
from flyball_runtime.api.found import Found
from flyball_runtime.api.schemas import Urgency, choice_sampling
from flyball_runtime.api.text import TextCodec
from flyball_runtime.core.errors import EngineError, RequestError
from flyball_runtime.core.measurements import Measurements, RequestOutcome, RequestTimes
from flyball_runtime.core.pooling import Pooling
from flyball_runtime.core.request import (
    Failed,
    Finished,
    Hypotheses,
    Prompt,
    Request,
    RequestEvent,
    TokenLogprobs,
    Tokens,
)
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.engine.front import EngineFront
from flyball_runtime.text.output import OutputText

logger = logging.getLogger(__name__)


class Echo(NamedTuple):
    """A prompt that its answer begins with.

    Attributes:
        alone: the answer has nothing else; what the engine samples is dropped.
    """

    text: str
    alone: bool


class Choice:
    """One answer to a prompt: takes its events and turns them into text and one ending.

    Attributes:
        prompt_token_ids: None unless the answer tells token ids.
        prompt_logprobs: a prompt's, if the request asks for them, with the first token, which has none.
        finish_reason: set once, when the request has ended well.
        pooled: as in Finished.
        score: as in Hypothesis, of an output that a beam search has found.
    """

    def __init__(
        self,
        index: int,
        request: Request,
        events: AsyncIterator[RequestEvent],
        output: OutputText,
        *,
        keeps_token_ids: bool = False,
        tells_prompt_logprobs: bool = False,
        tells_logprobs: bool = True,
        echo: Echo | None = None,
        stream_interval: int = 1,
    ) -> None:
        self.index = index
        self.request_id = request.request_id
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_cached_tokens = 0
        self.finish_reason: Literal["stop", "length"] | None = None
        self.ended = False
        self.pooled = b""
        self.score: float | None = None
        self._events = events
        self._has_output = False
        self._output = output
        self._stream_interval = stream_interval
        self._next_told = 1
        self.prompt_token_ids = request.prompt_token_ids if keeps_token_ids else None
        self.tells_prompt_logprobs = tells_prompt_logprobs
        self._echo = echo
        self._pieces: list[str] = [] if echo is None else [echo.text]
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._tells_logprobs = tells_logprobs
        self._sum_logprob = 0.0
        self.prompt_logprobs: list[TokenLogprobs] = []
        if request.sampling.prompt_logprobs is not None:
            self.prompt_logprobs.append(TokenLogprobs(request.prompt_token_ids[0], None, [], []))
        self._echoes_logprobs = echo is not None and request.sampling.logprobs is not None and tells_logprobs

    @property
    def num_output_tokens(self) -> int:
        return self._output.num_tokens

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text."""
        return self._output.stop_string

    @property
    def mean_logprob(self) -> float:
        """Of the tokens of the output, if the engine tells their log probabilities."""
        return self._sum_logprob / max(1, self.num_output_tokens)

    def take_text(self) -> str:
        """The text that came since the last call."""
        text = "".join(self._pieces)
        self._pieces.clear()
        return text

    def take_token_ids(self) -> list[int]:
        """Those of the output that came since the last call, if the answer tells them."""
        taken, self._token_ids = self._token_ids, []
        return taken

    def take_logprobs(self) -> list[TokenLogprobs]:
        """Those of the tokens that came since the last call; their text may still be held back."""
        taken, self._logprobs = self._logprobs, []
        return taken

    async def run(
        self,
        measured: Measurements,
        arrival_s: float,
        abort: Callable[[str], None],
        changed: Callable[["Choice"], None],
    ) -> RequestOutcome:
        """Take events until the ending, or until a stop string. ``changed`` is called when there is text to take: the first
        at once, later text when the stream interval's tokens have come.

        At a stop string the output is complete: the engine is told to end the request, and its answer, which may be a
        long step away, changes nothing here.

        Raises:
            RequestError: the request failed.
            EngineError: the events stopped without an ending.
        """
        times = RequestTimes(arrival_s, self.num_prompt_tokens)
        outcome: RequestOutcome = "error"
        try:
            async for event in self._events:
                if isinstance(event, Hypotheses):
                    measured.output(times, self._take_hypothesis(event, changed))
                    continue
                if not isinstance(event, Tokens):
                    outcome = self._end(event)
                    return outcome
                if num_new := self._take_tokens(event, changed):
                    measured.tokens([times], num_new)
                if self._output.stopped:
                    abort(self.request_id)
                    self.finish_reason = outcome = "stop"
                    return outcome
            raise EngineError(f"the events of request {self.request_id} stopped without an ending.")
        except asyncio.CancelledError:
            outcome = "abort"
            raise
        finally:
            measured.ended(times, outcome, self.num_output_tokens)

    def _take_hypothesis(self, event: Hypotheses, changed: Callable[["Choice"], None]) -> int:
        """Take a whole output; return how many tokens it has."""
        (one,) = event.hypotheses
        self.score = one.score
        return self._take_tokens(
            Tokens(event.request_id, one.token_ids, event.num_cached_tokens, one.logprobs), changed
        )

    def _take_tokens(self, event: Tokens, changed: Callable[["Choice"], None]) -> int:
        """Return how many of them belong to the output."""
        self.num_cached_tokens = event.num_cached_tokens
        if event.prompt_logprobs:
            self.prompt_logprobs += event.prompt_logprobs
        if not self._has_output:
            self._has_output = True
            self._begin(changed)
        if self._echo is not None and self._echo.alone:
            return 0
        before = self.num_output_tokens
        text = self._output.add(event.token_ids)
        num_new = self.num_output_tokens - before
        self._sum_logprob += sum(token.logprob or 0.0 for token in event.logprobs[:num_new])
        if self._tells_logprobs:
            self._logprobs += event.logprobs[:num_new]
        if self.prompt_token_ids is not None:
            self._token_ids += event.token_ids[:num_new]
        if text:
            self._pieces.append(text)
        if self._pieces and self.num_output_tokens >= self._next_told:
            self._next_told = self.num_output_tokens + self._stream_interval
            changed(self)
        return num_new

    def _begin(self, changed: Callable[["Choice"], None]) -> None:
        """Put an echo in front of the first output."""
        if self._echoes_logprobs:
            self._logprobs += self.prompt_logprobs
        if self._echo is not None:
            changed(self)

    def _end(self, event: Finished | Failed) -> RequestOutcome:
        if isinstance(event, Failed):
            raise from_failed(event)
        if event.reason == "abort":
            return "abort"
        if event.pooled:
            self.pooled, self.num_cached_tokens = event.pooled, event.num_cached_tokens
        self._pieces.append(self._output.finish())
        ends_early = self._echo is not None and self._echo.alone
        self.finish_reason = "length" if ends_early else "stop" if self._output.stopped else event.reason
        return self.finish_reason


MAX_TOKENS_AT_ONCE = 65536
"""Prompt tokens that are submitted in one turn of the event loop, which takes a millisecond for so many."""


@dataclass(frozen=True, kw_only=True)
class CheckedRequest:
    """A checked and tokenized generation request.

    Attributes:
        request_id: of the HTTP request; engine requests are named ``{request_id}-{unique}-{index}``.
        unique: keeps engine request ids apart when a client uses the same X-Request-Id again.
        arrival_s: when the body was complete, on the metrics' clock.
        markers: special tokens that the text of the output shall have.
        return_token_ids, prompt_logprobs: whether the answer tells them.
        echoes: one for each prompt, or none.
        pooling: as in Request.
        adapter: as in Request.
        num_told: of the choices for each prompt, the best ones that are told; None: all are.
    """

    request_id: str
    unique: str
    arrival_s: float
    prompts: list[Prompt]
    sampling: SamplingParams
    num_choices: int
    urgency: Urgency
    client: str
    cache_salt: str | None
    return_token_ids: bool = False
    markers: tuple[str, ...] = ()
    prompt_logprobs: bool = False
    echoes: Sequence[Echo] = ()
    pooling: Pooling | None = None
    adapter: int | None = None
    num_told: int | None = None

    def engine_requests(self) -> list[Request]:
        """One per choice, prompt by prompt: choice ``index`` answers prompt ``index // num_choices``.

        A beam search is one per prompt, which answers all choices.
        """
        num_each = 1 if self.sampling.beam_search is not None else self.num_choices
        pairs = [(prompt, choice) for prompt in self.prompts for choice in range(num_each)]
        name = f"{self.request_id}-{self.unique}"
        return [
            Request(
                request_id=f"{name}-{index}",
                prompt_token_ids=prompt.token_ids,
                block_hashes=prompt.block_hashes,
                sampling=self._scored(choice_sampling(self.sampling, choice)),
                priority=self.urgency.priority,
                ttft_deadline_ms=self.urgency.ttft_deadline_ms,
                e2e_deadline_ms=self.urgency.e2e_deadline_ms,
                client=self.client,
                cache_salt=self.cache_salt,
                pooling=self.pooling,
                adapter=self.adapter,
                fork_group=f"{name}-{index // num_each}" if num_each > 1 else None,
            )
            for index, (prompt, choice) in enumerate(pairs)
        ]

    def _scored(self, sampling: SamplingParams) -> SamplingParams:
        """Have the engine tell log probabilities, if choices are compared by them."""
        if self.num_told is None or sampling.logprobs is not None:
            return sampling
        return structs.replace(sampling, logprobs=0)


class TokenUsage(Struct, frozen=True, kw_only=True):
    """OpenAI's usage. ``num_cached``: prompt tokens found in the prefix cache."""

    num_prompt: int
    num_output: int
    num_cached: int


class Generation:
    """All choices of one CheckedRequest while they run. Use ``running``.

    Args:
        stream_interval: tokens of a choice from one change that ``wait_changed`` tells to the next.
    Attributes:
        failure: the first choice's failure; the other choices are aborted then.
        disconnected: the client has left; all choices are aborted then.
    """

    def __init__(
        self,
        call: CheckedRequest,
        front: EngineFront,
        measured: Measurements,
        codec: TextCodec,
        stream_interval: int = 1,
    ) -> None:
        self.call = call
        self._front = front
        self._measured = measured
        self._codec = codec
        self._stream_interval = stream_interval
        self.choices: list[Choice] = []
        self.failure: Exception | None = None
        self.disconnected = False
        self._gave_up = False
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._over = asyncio.Event()
        self._ready: dict[Choice, None] = {}

    @asynccontextmanager
    async def running(self, receive: Receive) -> AsyncIterator["Generation"]:
        """Submit all choices or none, and leave none behind however the block ends.

        Raises:
            RequestError: the engine refused one of them.
        """
        await self._submit()
        watcher = asyncio.create_task(self._watch(receive))
        try:
            yield self
        finally:
            watcher.cancel()
            self.abort()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(watcher, *self._tasks, return_exceptions=True)
            self._log_end()

    async def wait_all(self) -> None:
        """Until every choice has ended, or the client has left. Raises the failure of the first choice that fails."""
        await self._over.wait()
        if self.failure is not None:
            raise self.failure

    async def wait_changed(self) -> list[Choice]:
        """Until something happened: the choices with new text or an ending. Look at ``failure`` and ``disconnected`` too."""
        await self._changed.wait()
        self._changed.clear()
        ready = list(self._ready)
        self._ready.clear()
        return ready

    @property
    def ended(self) -> bool:
        return all(choice.ended for choice in self.choices)

    @property
    def told(self) -> list[Choice]:
        """The choices that are told, all or the likeliest of each prompt, per token; their indices are changed to be dense."""
        num, num_told = self.call.num_choices, self.call.num_told
        if num_told is None:
            return self.choices
        groups = (self.choices[start : start + num] for start in range(0, len(self.choices), num))
        best = (sorted(group, key=lambda choice: -choice.mean_logprob)[:num_told] for group in groups)
        told = [choice for group in best for choice in group]
        for index, choice in enumerate(told):
            choice.index = index
        return told

    @property
    def usage(self) -> TokenUsage:
        """So far. A prompt counts once however many choices it has; its first choice says what was cached."""
        firsts = self.choices[:: self.call.num_choices]
        return TokenUsage(
            num_prompt=sum(choice.num_prompt_tokens for choice in firsts),
            num_output=sum(choice.num_output_tokens for choice in self.choices),
            num_cached=sum(choice.num_cached_tokens for choice in firsts),
        )

    def abort(self) -> None:
        """Abort the choices that have not ended."""
        self._gave_up = True
        for choice in self.choices:
            if not choice.ended:
                self._front.abort(choice.request_id)

    async def _submit(self) -> None:
        """Submit all choices. Other requests have turns in between: each choice is encoded and sent for itself."""
        num_tokens = 0
        try:
            for number, request in enumerate(self.call.engine_requests()):
                if num_tokens > MAX_TOKENS_AT_ONCE:
                    num_tokens = 0
                    await asyncio.sleep(0)
                num_tokens += len(request.prompt_token_ids)
                self.choices += self._choices_of(number, request, self._front.submit(request))
        except BaseException as error:
            if isinstance(error, RequestError):
                self._measured.rejected(error.code)
            self.abort()
            raise
        self._measured.arrived(len(self.choices))
        self._tasks = [asyncio.create_task(self._run(choice)) for choice in self.choices]

    def _choices_of(self, number: int, request: Request, events: AsyncIterator[RequestEvent]) -> Iterator[Choice]:
        """Yield the choices that the ``number``-th engine request answers."""
        call, sources = self.call, [events]
        if request.sampling.beam_search is not None:
            found = Found(events)
            sources = [found.choice(rank) for rank in range(call.num_choices)]
        for index, source in enumerate(sources, number * len(sources)):
            yield Choice(
                index,
                request,
                source,
                self._codec.output(request.sampling, call.markers),
                keeps_token_ids=call.return_token_ids,
                tells_prompt_logprobs=call.prompt_logprobs,
                tells_logprobs=call.sampling.logprobs is not None,
                echo=call.echoes[index // call.num_choices] if call.echoes else None,
                stream_interval=self._stream_interval,
            )

    async def _run(self, choice: Choice) -> None:
        try:
            outcome = await choice.run(self._measured, self.call.arrival_s, self._front.abort, self._on_changed)
            if outcome == "abort" and not self._gave_up:
                raise _aborted(choice)
        except Exception as error:  # noqa: BLE001  handed to whoever writes the answer; a bug here must not hang it
            self._fail(error)
        finally:
            choice.ended = True
            self._on_changed(choice)
            if self.ended:
                self._over.set()

    def _fail(self, error: Exception) -> None:
        if self.failure is None:
            self.failure = error
            self._over.set()
            self.abort()

    def _on_changed(self, choice: Choice) -> None:
        self._ready[choice] = None
        self._changed.set()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.disconnected = True
        self.abort()
        self._changed.set()
        self._over.set()

    def _log_end(self) -> None:
        reasons = ",".join(choice.finish_reason or "-" for choice in self.choices[:8])
        how = "client left" if self.disconnected else "failed" if self.failure else f"finished ({reasons})"
        logger.info(
            "request %s %s after %.3f s: %d prompt (%d cached) and %d output tokens",
            self.call.request_id,
            how,
            self._measured.clock.now() - self.call.arrival_s,
            self.usage.num_prompt,
            self.usage.num_cached,
            self.usage.num_output,
        )


def _aborted(choice: Choice) -> HttpRefusal:
    return HttpRefusal(
        500,
        "aborted",
        f"the engine ended this request early, after {choice.num_output_tokens} output tokens. Send it again.",
    )
