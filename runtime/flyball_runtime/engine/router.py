"""Hands each token to the stream of its request; every stream ends in exactly one Finished or Failed."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable

from flyball_runtime.core.request import Failed, Finished, RequestEvent, Tokens


class RequestStream:
    """The events of one request, for one reader.

    Tokens that arrive while the reader is busy merge into one Tokens event, so a slow reader costs memory for its token
    ids (at most ``max_tokens``) and never for events.
    """

    def __init__(self, request_id: str, on_close: Callable[[str], None], client: str, num_prompt_tokens: int) -> None:
        self.request_id = request_id
        self.client = client
        self.num_queued_tokens = num_prompt_tokens  # 0 from the first output token on
        self._on_close = on_close
        self.num_cached_tokens = 0
        self._token_ids: list[int] = []
        self._ending: Finished | Failed | None = None
        self._exhausted = False
        self._news = asyncio.Event()

    def push_token(self, token_id: int) -> None:
        self._token_ids.append(token_id)
        self._news.set()

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
            tokens, self._token_ids = Tokens(self.request_id, self._token_ids, self.num_cached_tokens), []
            if self._ending is None:
                self._news.clear()
            return tokens
        self._exhausted = True
        if self._ending is None:
            raise RuntimeError(f"stream of {self.request_id} woke without news")
        return self._ending

    async def aclose(self) -> None:
        """Stop reading. A request that has not ended is aborted."""
        self._exhausted = True
        if self._ending is None:
            self._on_close(self.request_id)


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

    def open(
        self, request_id: str, on_close: Callable[[str], None], client: str = "", num_prompt_tokens: int = 0
    ) -> RequestStream:
        stream = RequestStream(request_id, on_close, client, num_prompt_tokens)
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
