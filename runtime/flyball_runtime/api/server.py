"""What every route shares: engine, tokenizer, settings and metrics, and how a body is read within limits and decoded.

Decoding takes time in proportion to the body. Each of its two steps holds Python's lock: 10 and 20 ms for 4 MB of token
ids, less for text. So long bodies are decoded in a thread, one at a time (``lane.py``).
"""

import asyncio
import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from fastapi import Request
from starlette.requests import ClientDisconnect

from flyball_protocol.quoting import MAX_QUOTED_CHARS, one_line
from flyball_runtime.api.errors import (
    BodyNotRead,
    BodyTimeout,
    BodyTooLarge,
    ClientLeft,
    HttpRefusal,
    NoRoomForBody,
    UnknownModel,
)
from flyball_runtime.api.http_protocol import DROP_TIMEOUT_S
from flyball_runtime.api.identity import client_of
from flyball_runtime.api.lane import Lanes
from flyball_runtime.api.message_formats import MessageFormats
from flyball_runtime.api.messages import MAX_TOOLS, arguments_in, check_tools
from flyball_runtime.api.metrics import MetricsCollector
from flyball_runtime.api.schemas import ChatRequest, TokenizeChatRequest
from flyball_runtime.api.settings import ApiSettings
from flyball_runtime.api.text import TextCodec
from flyball_runtime.core.errors import EngineDead, InvalidRequest, PromptTooLong, RequestError, UnfitPrompt
from flyball_runtime.core.measurements import Measurements
from flyball_runtime.core.room import Room, RoomFull, RoomShare
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.core.stats import EngineInfo
from flyball_runtime.engine.front import EngineFront
from flyball_runtime.grammar.checker import GrammarChecker

T = TypeVar("T")

Chats = TypeVar("Chats", ChatRequest, TokenizeChatRequest)

Json = dict[str, object]

MAX_DROPPED_BODIES = 8
"""How much of a body that is too long is taken in and dropped, in longest allowed bodies."""

MAX_STRUCTURE = 65536
"""Most texts, brackets and braces of a body: 2048 messages of several parts have a tenth of them."""

MAX_DEPTH = 64

MAX_FIELD_CHARS = 160

_STRUCTURE = re.compile(rb'["\[\]{}](?:(?<=")[^"\\]*+(?:\\.[^"\\]*+)*+"?)?+', re.DOTALL)
"""A text, or one bracket or brace outside of texts. A text without its end matches too: else each quote in it is tried anew.

It begins with a set of characters, which is searched for in a quarter of the time of other patterns.
"""

_FIELD_PATH = re.compile(r" - at `(?:key in )?\$\.?([^`]*)`\Z")


async def read_body(request: Request, room: Room, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body, which is counted in ``room`` while it arrives.

    Raises:
        BodyTooLarge: more than ``max_bytes`` are announced, or came.
        BodyTimeout: it took longer than ``timeout_s``.
        NoRoomForBody: others came faster, and there is no room for all.
        ClientLeft: it broke off.
    """
    announced = request.headers.get("content-length", "")
    try:
        if announced.isdecimal() and int(announced) > max_bytes:
            raise BodyTooLarge(max_bytes)
        with room.share() as share:
            async with share.arriving(timeout_s):
                return await _read_up_to(request, share, max_bytes)
    except BodyTooLarge as error:
        refused: BodyNotRead = error
    except RoomFull:
        refused = NoRoomForBody(room.max_bytes)
    except TimeoutError:
        raise BodyTimeout(timeout_s) from None
    except ClientDisconnect:
        raise ClientLeft from None
    await _drop_rest(request, MAX_DROPPED_BODIES * max_bytes)
    raise refused


async def _read_up_to(request: Request, share: RoomShare, max_bytes: int) -> bytes:
    received = bytearray()  # one block, which the allocator gives back whole; parts would leave holes
    try:
        async for part in request.stream():
            if len(received) + len(part) > max_bytes:
                raise BodyTooLarge(max_bytes)
            share.grow(len(part))
            received += part
        return bytes(received)
    finally:
        received.clear()  # an error's traceback would keep it


async def _drop_rest(request: Request, max_bytes: int) -> None:
    """Take in what the client is sending, within bounds, so that it gets to read its answer.

    Closing a connection with bytes unread resets it, which takes the answer from the client as well. Who waits for
    leave to send (Expect) reads the answer first.
    """
    if "expect" in request.headers:
        return
    with contextlib.suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(DROP_TIMEOUT_S):
            async for part in request.stream():
                max_bytes -= len(part)
                if max_bytes < 0:
                    return


def parse_object(body: bytes) -> Json:
    """The body as a JSON object. Raises InvalidRequest, code ``invalid_json``, for anything else."""
    check_structure(body)
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise HttpRefusal(
            400,
            "invalid_json",
            f"the body is not JSON in UTF-8: {one_line(str(error))}. NaN and Infinity are not JSON.",
        ) from None
    if not isinstance(value, dict):
        raise HttpRefusal(400, "invalid_json", f"the body must be a JSON object, not {type(value).__name__}.")
    return value


def check_structure(body: bytes) -> None:
    """Raise InvalidRequest when a body has too many texts, lists and objects, or nests them too deeply.

    Decoding holds Python's lock to its end, and 4 MB of ``[],[],[],`` take a second. Reading the structure alone stops at the
    bound. Numbers do not count: a body full of them is decoded in a tenth of the time.
    """
    depth = 0
    for number, token in enumerate(_STRUCTURE.finditer(body)):
        opened = body[token.start()] in b"[{"
        depth += opened - (body[token.start()] in b"]}")
        if depth > MAX_DEPTH:
            raise HttpRefusal(
                400,
                "invalid_json",
                f"the depth of lists and objects in the body is over {MAX_DEPTH}. Send a flatter one.",
            )
        if number >= MAX_STRUCTURE:
            raise InvalidRequest(
                f"the body has more than {MAX_STRUCTURE} texts, brackets and braces. Send fewer and longer ones."
            )


def convert(value: Json, kind: type[T]) -> T:
    """``value`` as a ``kind``. Raises InvalidRequest that names the field, like ``messages[0].role``."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise invalid_field(error) from None


def convert_chat(value: Json, kind: type[Chats]) -> Chats:
    """Like ``convert``. Raises InvalidRequest for tools that cannot be called, too."""
    chat = convert(value, kind)
    check_structure(arguments_in(chat.messages))
    check_tools(chat.tools or [], chat.tool_choice if isinstance(chat, ChatRequest) else None)
    return chat


def decode(body: bytes, kind: type[T]) -> T:
    """parse_object and convert in one."""
    return convert(parse_object(body), kind)


def invalid_field(error: msgspec.ValidationError) -> InvalidRequest:
    """What msgspec found, with the path of the field. The names of unknown fields in it are the client's."""
    text = str(error)
    found = _FIELD_PATH.search(text)
    what, path = (text, "") if found is None else (text[: found.start()], found.group(1))
    where = f" - at `{path}`" if path else ""
    return InvalidRequest(f"{one_line(what, MAX_FIELD_CHARS)}{where}.", param=path or _named_field(what))


def _named_field(what: str) -> str | None:
    found = re.search(r"field `([^`]+)`", what)
    return one_line(found.group(1), MAX_QUOTED_CHARS) if found else None


@dataclass(frozen=True, kw_only=True)
class Server:
    """Attributes:
    grammars: None if there is no checkpoint to check them for; then none are served.
    """

    front: EngineFront
    codec: TextCodec
    settings: ApiSettings
    metrics: MetricsCollector
    room: Room
    lanes: Lanes
    formats: MessageFormats
    grammars: GrammarChecker | None

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

    async def read_to_queue(self, request: Request, understand: Callable[[Json], T]) -> tuple[float, T]:
        """Like ``read``, but nothing is done for a body that cannot wait now. What the engine refuses is counted."""
        try:
            return await self.read(request, understand, lambda: self._check_queue(request))
        except UnfitPrompt as error:
            self.measured.rejected(error.code)
            raise

    def _check_queue(self, request: Request) -> None:
        try:
            self.front.check_queue(client_of(request))
        except RequestError as error:
            self.measured.rejected(error.code)
            raise

    async def with_checked_grammar(self, sampling: SamplingParams) -> SamplingParams:
        """Return the settings with their grammar in the engine's form, once it is known to do no harm there.

        Raises:
            RequestError: it cannot be used, or not now.
        """
        if sampling.grammar is None:
            return sampling
        try:
            if self.grammars is None:
                raise InvalidRequest("structured output is not served here. Leave it out.", param="structured_outputs")
            grammar = await asyncio.wrap_future(self.grammars.check(sampling.grammar))
        except RequestError as error:
            self.measured.rejected(error.code)
            raise
        return msgspec.structs.replace(sampling, grammar=grammar)

    def engine_info(self) -> EngineInfo:
        """Facts about the engine. Raises NotReady while it loads, EngineDead after its end."""
        if self.front.dead_reason is not None:
            raise EngineDead(self.front.dead_reason)
        return self.front.info

    def adapter_of(self, model: str | None) -> int | None:
        """Return the number of the LoRA adapter that ``model`` names, or None if it names the served model.

        A request without a model means the served one. Raises UnknownModel.
        """
        served = self.settings.served_model_names
        if model is None or model in served:
            return None
        if (adapter := self.front.adapters.find(model)) is not None:
            return adapter.number
        raise UnknownModel(model, served + self.front.adapters.names)

    def check_model(self, model: str | None) -> None:
        """Raise UnknownModel unless ``model`` or an adapter of this name is served here."""
        self.adapter_of(model)

    def check_prompt(self, prompt: object, param: str = "prompt") -> None:
        """Raise PromptTooLong or InvalidRequest for more prompts or token ids than can run, before they are looked at.

        Args:
            prompt: the field ``param`` as it came; what is no list is not judged.
        """
        if not isinstance(prompt, list) or not prompt:
            return
        if isinstance(prompt[0], int):
            self._check_num_ids(prompt)
            return
        self.check_count(param, len(prompt), self.settings.max_prompts)
        for one in prompt:
            self._check_num_ids(one)

    def _check_num_ids(self, prompt: object) -> None:
        max_model_len = self.engine_info().max_model_len
        if isinstance(prompt, list) and len(prompt) > max_model_len:
            raise PromptTooLong(len(prompt), None, max_model_len)

    def check_chat(self, fields: Json) -> None:
        """Raise InvalidRequest for too many messages or tools, before they are looked at."""
        messages, tools = fields.get("messages"), fields.get("tools")
        if isinstance(messages, list):
            self.check_count("messages", len(messages), self.settings.max_messages)
        if isinstance(tools, list) and tools:
            self.check_count("tools", len(tools), MAX_TOOLS)

    @staticmethod
    def check_count(param: str, count: int, most: int) -> None:
        """Raise InvalidRequest unless ``1 <= count <= most``."""
        if not 1 <= count <= most:
            raise InvalidRequest(f"{param} has {count} entries; 1 to {most} are allowed.", param=param)
