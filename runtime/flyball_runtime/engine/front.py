"""What the API layer sees of an engine: EngineClient implements it, tests fake it."""

from collections.abc import AsyncIterator
from typing import Protocol

from flyball_protocol import LimitsAck, LimitsReport, LimitsUpdate
from flyball_runtime.core.request import Prompt, Request, RequestEvent
from flyball_runtime.core.stats import EngineInfo, StepStats


class EngineObserver(Protocol):
    """Told about every engine step, on the API process's event loop."""

    def step(self, stats: StepStats) -> None: ...


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
    def num_unfinished(self) -> int:
        """Requests accepted and not yet ended."""
        ...

    def check_queue(self, client: str) -> None:
        """Refuse what ``submit`` would refuse now whatever the request is, so that no work is done for it in vain.

        Raises:
            RequestError: as ``submit``, when nothing of this client can be taken now.
        """
        ...

    def prepare(self, prompts: list[list[int]], num_choices: int, cache_salt: str | None) -> list[Prompt]:
        """Check the prompts of one HTTP request and name their KV blocks, once for all of their choices.

        It takes about 60 ns a token, and any thread may call it.

        Raises:
            RequestError: a prompt can never run (PromptTooLong, EmptyPrompt, TokenOutOfVocabulary), or all of them with all
                their choices never fit into the queue (TooManyPromptTokens).
        """
        ...

    def submit(self, request: Request) -> AsyncIterator[RequestEvent]:
        """Queue a request; the iterator yields Tokens any number of times, then one Finished or Failed.

        Raises:
            RequestError: at once, when the request can never run (PromptTooLong, EmptyPrompt, TokenOutOfVocabulary,
                InvalidRequest) or not now (QueueFull, QueuedTokensFull, Draining, NotReady,
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
