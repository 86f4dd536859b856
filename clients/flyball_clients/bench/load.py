"""The load: requests sent in a closed or an open loop, and a record of each."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing

import aiohttp
from msgspec import Struct

from flyball_clients.bench.workload import RequestPlan, RequestWriter
from flyball_clients.endpoint import Api, Endpoint
from flyball_clients.errors import EndpointError
from flyball_clients.stream import Chunk, stream_chunks


class RequestRecord(Struct, kw_only=True):
    """Measurements of one request, filled in while it runs.

    Attributes:
        arrival_s: when it was due: the schedule of an open loop, the moment of sending in a closed one.
        sent_s: when it was sent. ``sent_s - arrival_s`` is the generator's lateness.
        first_token_s, last_token_s: arrival of the first and last chunk with a token; None when none came.
        gaps_s: times between consecutive chunks with tokens. A chunk may hold several tokens; the gap is not divided.
        input_tokens, output_tokens: the server's ``usage``; without one, output is the count of chunks and input None.
        tokens_from_usage: which of the two.
        error: kind of failure, None for success.
    """

    index: int
    arrival_s: float
    sent_s: float
    end_s: float = 0.0
    first_token_s: float | None = None
    last_token_s: float | None = None
    gaps_s: list[float] = []
    input_tokens: int | None = None
    output_tokens: int = 0
    tokens_from_usage: bool = False
    error: str | None = None
    error_message: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def ttft_s(self) -> float | None:
        """From sending."""
        return None if self.first_token_s is None else self.first_token_s - self.sent_s

    @property
    def ttft_from_arrival_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def e2e_s(self) -> float | None:
        """From sending to the last token."""
        return None if self.last_token_s is None else self.last_token_s - self.sent_s

    @property
    def e2e_from_arrival_s(self) -> float | None:
        return None if self.last_token_s is None else self.last_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None for fewer than two tokens."""
        if self.first_token_s is None or self.last_token_s is None or self.output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.output_tokens - 1)


class Sender:
    """Sends requests on one session. Its clock starts at 0 when it is created."""

    def __init__(self, session: aiohttp.ClientSession, endpoint: Endpoint, api: Api) -> None:
        self._session = session
        self._endpoint = endpoint
        self._api = api
        self._started = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._started

    async def send(self, index: int, body: bytes, arrival_s: float | None = None) -> RequestRecord:
        """Send one request and wait for its end. A failure is written into the record, not raised.

        Args:
            arrival_s: when it was due; None for now.
        """
        sent_s = self.now()
        record = RequestRecord(index=index, arrival_s=sent_s if arrival_s is None else arrival_s, sent_s=sent_s)
        finish_s = None
        try:
            async with aclosing(stream_chunks(self._session, self._endpoint, self._api, body)) as chunks:
                async for chunk in chunks:
                    self._note(record, chunk)
                    if chunk.finished and finish_s is None:
                        finish_s = self.now()
        except EndpointError as exc:
            record.error, record.error_message = exc.kind, str(exc)
        record.end_s = self.now()
        _settle(record, finish_s)
        return record

    def _note(self, record: RequestRecord, chunk: Chunk) -> None:
        if chunk.carries_token:
            now = self.now()
            if record.last_token_s is None:
                record.first_token_s = now
            else:
                record.gaps_s.append(now - record.last_token_s)
            record.last_token_s = now
        if chunk.usage is not None:
            record.tokens_from_usage = True
            record.input_tokens = chunk.usage.prompt_tokens
            record.output_tokens = chunk.usage.completion_tokens


def _settle(record: RequestRecord, finish_s: float | None) -> None:
    """Fill in what is known only after the end of the stream."""
    if not record.tokens_from_usage:
        record.output_tokens = 0 if record.first_token_s is None else len(record.gaps_s) + 1
    if record.first_token_s is None and record.output_tokens:  # no token had text, e.g. only end-of-sequence
        record.first_token_s = record.last_token_s = finish_s


class LoadObserver:
    """Is called when a request is sent and when it ends. A progress bar overrides its methods."""

    def planned(self, total: int) -> None:
        """Called once, before the first request, with the number of requests."""

    def sent(self) -> None:
        """Called when a request is sent."""

    def ended(self, record: RequestRecord) -> None:
        """Called when a request has ended, successfully or not."""


class LoadGenerator:
    """Sends planned requests and collects their records.

    Args:
        stop_after_s: start nothing after this time on the sender's clock; what is in flight finishes.
    """

    def __init__(
        self, sender: Sender, writer: RequestWriter, observer: LoadObserver, stop_after_s: float | None = None
    ) -> None:
        self._sender = sender
        self._writer = writer
        self._observer = observer
        self._stop_after_s = float("inf") if stop_after_s is None else stop_after_s
        self.records: list[RequestRecord] = []

    async def run_closed(self, plans: list[RequestPlan], concurrency: int) -> None:
        """Keep ``concurrency`` requests in flight: when one ends, the next starts."""
        queue = self._until_deadline(plans, lambda plan: self._sender.now())
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(concurrency, len(plans))):
                tasks.create_task(self._drain(queue))

    async def run_open(self, plans: list[RequestPlan]) -> None:
        """Send each request at its ``offset_s``, however many are still unanswered.

        The body is written before the wait, so that writing it does not delay the request.
        """
        async with asyncio.TaskGroup() as tasks:
            for plan in self._until_deadline(plans, lambda plan: max(plan.offset_s or 0.0, self._sender.now())):
                body = self._writer.body(plan)
                await asyncio.sleep(max(0.0, (plan.offset_s or 0.0) - self._sender.now()))
                tasks.create_task(self._send(plan, body))

    def _until_deadline(
        self, plans: list[RequestPlan], starts_at: Callable[[RequestPlan], float]
    ) -> Iterator[RequestPlan]:
        for plan in plans:
            if starts_at(plan) > self._stop_after_s:
                return
            yield plan

    async def _drain(self, queue: Iterator[RequestPlan]) -> None:
        for plan in queue:
            await self._send(plan, self._writer.body(plan))

    async def _send(self, plan: RequestPlan, body: bytes) -> None:
        self._observer.sent()
        record = await self._sender.send(plan.index, body, plan.offset_s)
        self.records.append(record)
        self._observer.ended(record)
