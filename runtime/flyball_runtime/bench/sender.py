"""One request, sent and timed."""

import time
from contextlib import aclosing

import aiohttp

from flyball_runtime.bench.record import RequestRecord
from flyball_runtime.client.chunk import Chunk
from flyball_runtime.client.endpoint import Api, Endpoint
from flyball_runtime.client.errors import EndpointError
from flyball_runtime.client.stream import stream_chunks


class Sender:
    """Sends requests on one session; its clock starts at 0 when it is made."""

    def __init__(self, session: aiohttp.ClientSession, endpoint: Endpoint, api: Api) -> None:
        self._session = session
        self._endpoint = endpoint
        self._api = api
        self._started = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._started

    async def send(self, index: int, body: bytes, arrival_s: float | None = None) -> RequestRecord:
        """Send one request and wait for its end; a failure is written into the record and not raised.

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
    """Fill in what only the end of the stream tells."""
    if not record.tokens_from_usage:
        record.output_tokens = 0 if record.first_token_s is None else len(record.gaps_s) + 1
    if record.first_token_s is None and record.output_tokens:  # every token was without text, e.g. only end-of-sequence
        record.first_token_s = record.last_token_s = finish_s
