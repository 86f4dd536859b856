"""One engine request as the API sees it: events in, text and one ending out."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Literal

from flyball_runtime.api.errors import from_failed
from flyball_runtime.core.errors import EngineError
from flyball_runtime.core.measurements import Measurements, Outcome, RequestTimes
from flyball_runtime.core.request import Failed, Finished, Request, RequestEvent, Tokens
from flyball_runtime.text.output import OutputText


class Choice:
    """One engine request: takes its events and turns them into text and one ending.

    Attributes:
        finish_reason: set once, when the request has ended well.
    """

    def __init__(self, index: int, request: Request, events: AsyncIterator[RequestEvent], output: OutputText) -> None:
        self.index = index
        self.request_id = request.request_id
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_cached_tokens = 0
        self.finish_reason: Literal["stop", "length"] | None = None
        self.ended = False
        self._events = events
        self._output = output
        self._pieces: list[str] = []

    @property
    def num_output_tokens(self) -> int:
        return self._output.num_tokens

    def take_text(self) -> str:
        """The text that came since the last call."""
        text = "".join(self._pieces)
        self._pieces.clear()
        return text

    async def run(
        self,
        measured: Measurements,
        arrival_s: float,
        abort: Callable[[str], None],
        changed: Callable[["Choice"], None],
    ) -> Outcome:
        """Take events until the ending, or until a stop string. ``changed`` is called when there is text to take.

        At a stop string the output is complete: the engine is told to end the request, and its answer, which may be a
        long step away, changes nothing here.

        Raises:
            RequestError: the request failed.
            EngineError: the events stopped without an ending.
        """
        times = RequestTimes(arrival_s, self.num_prompt_tokens)
        outcome: Outcome = "error"
        try:
            async for event in self._events:
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

    def _take_tokens(self, event: Tokens, changed: Callable[["Choice"], None]) -> int:
        """Return how many of them belong to the output."""
        self.num_cached_tokens = event.num_cached_tokens
        before = self.num_output_tokens
        text = self._output.add(event.token_ids)
        if text:
            self._pieces.append(text)
            changed(self)
        return self.num_output_tokens - before

    def _end(self, event: Finished | Failed) -> Outcome:
        if isinstance(event, Failed):
            raise from_failed(event)
        if event.reason == "abort":
            return "abort"
        self._pieces.append(self._output.finish())
        self.finish_reason = "stop" if self._output.stopped else event.reason
        return self.finish_reason
