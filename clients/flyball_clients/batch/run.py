"""A whole batch: check, resume, ask, write, count."""

import asyncio
import contextlib
import random
import sqlite3
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import msgspec
from msgspec import Struct

from flyball_clients.batch.backend import Answer, Backend, Stopped, open_backend
from flyball_clients.batch.output import Failure, OutputFile, Response, Row
from flyball_clients.batch.progress import Counts, Progress
from flyball_clients.batch.requests import BatchRequest, Index, InputFile
from flyball_clients.batch.settings import BatchSettings
from flyball_clients.errors import ConfigError, EndpointError, HttpError, RequestTimeout, Unreachable
from flyball_clients.stream import ReportedUsage, error_message

BUSY = frozenset({429, 503})
"""Statuses that say something of the server and nothing of the request, which waits and comes again."""

GATEWAY = frozenset({502, 504})
"""Statuses of a proxy whose server broke off: perhaps by this request, so it comes again a few times only."""

UNAUTHORIZED = 401
"""It would be the answer to every request."""

Outcome = Answer | EndpointError

FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0
SYNC_INTERVAL_S = 5.0


class _Tokens(Struct):
    """Token counts under the names of most endpoints, and under those of /v1/responses."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


class _Counted(Struct):
    usage: _Tokens | None = None


def run_batch(settings: BatchSettings, counts: Counts, progress: Progress) -> None:
    """Do what the output lacks. Failed requests are counted in ``counts``, not raised.

    Raises:
        ConfigError: wrong files, or an engine that cannot start.
        Stopped: the server refuses everything, or the engine died.
    """
    _check_paths(settings)
    try:
        with InputFile(settings.source, settings.max_body_bytes) as source, contextlib.closing(Index()) as index:
            source.check(index)
            with OutputFile(settings.target, index) as target:
                counts.resume(index.total, index.num_done(), target.num_failed)
                if counts.num_left:
                    asyncio.run(_answer_rest(settings, source, index, target, counts, progress))
    except sqlite3.Error as error:
        raise ConfigError(
            f"the names of the requests cannot be kept in a temporary file: {error}. Set TMPDIR to a folder that has room."
        ) from None


async def _answer_rest(
    settings: BatchSettings, source: InputFile, index: Index, target: OutputFile, counts: Counts, progress: Progress
) -> None:
    async with open_backend(settings) as backend, _synced(target):
        progress.start()
        await _Batch(settings, backend, source, target, counts).run(index)


def _check_paths(settings: BatchSettings) -> None:
    with contextlib.suppress(OSError):  # one of them does not exist, which opening it will tell
        if settings.source.samefile(settings.target):
            raise ConfigError(f"{settings.target} is both the input and the output. Name another output.")


@asynccontextmanager
async def _synced(target: OutputFile) -> AsyncIterator[None]:
    async def sync_now_and_then() -> None:
        while True:
            await asyncio.sleep(SYNC_INTERVAL_S)
            await asyncio.to_thread(target.sync)

    task = asyncio.create_task(sync_now_and_then())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


class _Batch:
    """The requests in flight: each worker takes the next one when its last is answered."""

    def __init__(
        self, settings: BatchSettings, backend: Backend, source: InputFile, target: OutputFile, counts: Counts
    ) -> None:
        self._settings = settings
        self._backend = backend
        self._source = source
        self._target = target
        self._counts = counts
        self._served_s = self._now()  # when the server last did something else than refuse

    async def run(self, index: Index) -> None:
        try:
            with contextlib.closing(index.remaining()) as remaining:
                await self._work_all(remaining)
        except* (ConfigError, Stopped) as errors:
            raise errors.exceptions[0] from None
        finally:
            self._counts.stop_clock()

    async def _work_all(self, remaining: Iterator[tuple[str, int]]) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._settings.in_flight, self._counts.num_left)):
                group.create_task(self._work(remaining))

    async def _work(self, remaining: Iterator[tuple[str, int]]) -> None:
        for custom_id, offset in remaining:
            request = self._source.read(custom_id, offset)
            row, usage = await self._row(request)
            self._target.write(row)
            self._counts.note(row, usage)

    async def _row(self, request: BatchRequest) -> tuple[Row, ReportedUsage | None]:
        row_id = f"batch_req_{uuid.uuid4().hex}"
        try:
            answer = await self._ask(request)
        except Stopped:
            raise
        except EndpointError as error:
            return Row(row_id, request.custom_id, None, Failure(error.kind, str(error))), None
        body = _compact(answer.body)
        response = Response(answer.status, answer.request_id, body)
        return Row(row_id, request.custom_id, response, _failure(answer, body)), _usage(answer)

    async def _ask(self, request: BatchRequest) -> Answer:
        """Return the answer. The request is sent again while the server is busy, and a few times if its connection breaks.

        Raises:
            EndpointError: it got no answer.
            Stopped: the key is wrong, or all requests have been refused for ``give_up_after_s``.
        """
        num_broken, pause_s = 0, FIRST_PAUSE_S
        while not _is_final(outcome := await self._attempt(request)):
            if _is_busy(outcome):
                self._check_patience(outcome)
            elif (num_broken := num_broken + 1) > self._settings.max_retries:
                break
            asked_s = outcome.retry_after_s if isinstance(outcome, Answer) else None
            await asyncio.sleep(min(MAX_PAUSE_S, pause_s if asked_s is None else asked_s) * random.uniform(1.0, 1.2))
            pause_s *= 2
        self._served_s = self._now()
        if isinstance(outcome, EndpointError):
            raise outcome
        if outcome.status == UNAUTHORIZED:
            raise Stopped(str(HttpError(outcome.status, error_message(outcome.body))))
        return outcome

    async def _attempt(self, request: BatchRequest) -> Outcome:
        try:
            return await self._backend.post(request.url, bytes(request.body))
        except Stopped:
            raise
        except EndpointError as error:
            return error

    def _check_patience(self, refusal: Outcome) -> None:
        """Raise Stopped when the server has done nothing but refuse for too long."""
        if self._now() - self._served_s <= self._settings.give_up_after_s:
            return
        last = refusal if isinstance(refusal, EndpointError) else HttpError(refusal.status, error_message(refusal.body))
        raise Stopped(f"every request was refused for {self._settings.give_up_after_s:g} s, the last one by: {last}")

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _is_final(outcome: Outcome) -> bool:
    """Return whether another attempt would end in the same way, or take as long."""
    if isinstance(outcome, Answer):
        return outcome.status not in BUSY | GATEWAY
    return isinstance(outcome, RequestTimeout)


def _is_busy(outcome: Outcome) -> bool:
    return outcome.status in BUSY if isinstance(outcome, Answer) else isinstance(outcome, Unreachable)


def _compact(body: bytes) -> msgspec.Raw | None:
    """Return JSON without line ends; None for what is not JSON."""
    try:
        body.decode()
        return msgspec.Raw(msgspec.json.format(body, indent=-1))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _failure(answer: Answer, body: msgspec.Raw | None) -> Failure | None:
    """Return what went wrong, by the status; None for a good answer."""
    if answer.status != 200:
        return Failure(f"http_{answer.status}", error_message(answer.body))
    if body is None:
        return Failure("bad_answer", f"the server sent {answer.body[:80]!r}, which is not JSON.")
    return None


def _usage(answer: Answer) -> ReportedUsage | None:
    try:
        found = msgspec.json.decode(answer.body, type=_Counted).usage
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    if found is None:
        return None
    return ReportedUsage(found.prompt_tokens or found.input_tokens, found.completion_tokens or found.output_tokens)
