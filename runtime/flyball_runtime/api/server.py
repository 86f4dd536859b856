"""What every route needs: the engine's front, the tokenizer, the settings and the metrics."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from fastapi import Request

from flyball_runtime.api.body import Json, parse_object, read_body
from flyball_runtime.api.errors import UnknownModel
from flyball_runtime.api.lane import Lanes
from flyball_runtime.api.metrics import Metrics
from flyball_runtime.api.settings import ApiSettings
from flyball_runtime.api.text import TextCodec
from flyball_runtime.core.errors import EngineDead, InvalidRequest, PromptTooLong
from flyball_runtime.core.measurements import Measurements
from flyball_runtime.core.room import Room
from flyball_runtime.core.stats import EngineInfo
from flyball_runtime.engine.front import EngineFront

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Server:
    front: EngineFront
    codec: TextCodec
    settings: ApiSettings
    metrics: Metrics
    room: Room
    lanes: Lanes

    @property
    def measured(self) -> Measurements:
        return self.metrics.measured

    async def read(
        self, request: Request, understand: Callable[[Json], T], check: Callable[[], None] = lambda: None
    ) -> tuple[float, T]:
        """Read the body and return when it was complete, on the clock of ``measured``, and what ``understand`` makes of it.

        Args:
            understand: all work in proportion to a body. With a long one it runs in a thread (``lane.py``), so it must leave
                alone what lives on the event loop.
            check: called when the body is there, before any work on it, to refuse it.
        """
        body = await read_body(request, self.room, self.settings.max_body_bytes, self.settings.body_timeout_s)
        arrival_s = self.measured.clock.now()
        check()
        return arrival_s, await self.lanes.run(request, len(body), lambda: understand(parse_object(body)))

    def engine_info(self) -> EngineInfo:
        """Facts about the engine. Raises NotReady while it loads, EngineDead after its end."""
        if self.front.dead_reason is not None:
            raise EngineDead(self.front.dead_reason)
        return self.front.info

    def check_model(self, model: str | None) -> None:
        """Raise UnknownModel unless ``model`` is served here; a request without one means the only one there is."""
        if model is not None and model not in self.settings.served_model_names:
            raise UnknownModel(model, self.settings.served_model_names)

    def check_prompt(self, prompt: object) -> None:
        """Raise PromptTooLong or InvalidRequest for more prompts or token ids than can run, before they are looked at.

        Args:
            prompt: the field as it came; what is no list is not judged.
        """
        if not isinstance(prompt, list) or not prompt:
            return
        if isinstance(prompt[0], int):
            self._check_num_ids(prompt)
            return
        self.check_count("prompt", len(prompt), self.settings.max_prompts)
        for one in prompt:
            self._check_num_ids(one)

    def _check_num_ids(self, prompt: object) -> None:
        max_model_len = self.engine_info().max_model_len
        if isinstance(prompt, list) and len(prompt) > max_model_len:
            raise PromptTooLong(len(prompt), None, max_model_len)

    def check_messages(self, messages: object) -> None:
        """Raise InvalidRequest for too many messages, before they are looked at."""
        if isinstance(messages, list):
            self.check_count("messages", len(messages), self.settings.max_messages)

    @staticmethod
    def check_count(param: str, count: int, most: int) -> None:
        """Raise InvalidRequest unless ``1 <= count <= most``."""
        if not 1 <= count <= most:
            raise InvalidRequest(f"{param} has {count} entries; 1 to {most} are allowed.", param=param)
