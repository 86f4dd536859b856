"""Closed and open loops: who decides when the next request goes."""

import asyncio
from collections.abc import Callable, Iterator

from flyball_runtime.bench.record import RequestRecord
from flyball_runtime.bench.sender import Sender
from flyball_runtime.bench.workload import RequestPlan, RequestWriter


class LoadObserver:
    """Told about each request as it is sent and as it ends; a progress bar overrides what it wants to know."""

    def planned(self, total: int) -> None:
        """Called once, before the first request, with how many there are."""

    def sent(self) -> None:
        """Called when a request goes out."""

    def ended(self, record: RequestRecord) -> None:
        """Called when it has ended, well or not."""


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
        """Keep ``concurrency`` requests in flight: each ending starts the next."""
        queue = self._until_deadline(plans, lambda plan: self._sender.now())
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(concurrency, len(plans))):
                tasks.create_task(self._drain(queue))

    async def run_open(self, plans: list[RequestPlan]) -> None:
        """Send each request at its ``offset_s``, however many are still unanswered.

        The body is written before the wait, so that writing it delays nobody's arrival.
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
