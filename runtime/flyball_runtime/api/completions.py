"""/v1/chat/completions and /v1/completions: from a body to a running Generation and its answer."""

import time
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import Request, Response

from flyball_protocol.quoting import quoted
from flyball_runtime.api.body import Json, convert
from flyball_runtime.api.client_id import client_of
from flyball_runtime.api.errors import json_response
from flyball_runtime.api.generation import Call, Generation
from flyball_runtime.api.schemas import (
    ChatRequest,
    CompletionRequest,
    GenerationFields,
    StreamOptions,
    sampling_params,
)
from flyball_runtime.api.server import Server
from flyball_runtime.api.sse import EventStream, StreamPlan
from flyball_runtime.api.unsupported import CHAT_NOOPS, COMPLETION_NOOPS, without_noops
from flyball_runtime.api.wire import ChatFormat, CompletionFormat, Envelope, Format
from flyball_runtime.core.errors import InvalidRequest, RequestError, UnfitPrompt
from flyball_runtime.core.request import Prompt, SamplingParams, validate_cache_salt

T = TypeVar("T")


class CompletionRoutes:
    """The endpoints that generate text."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def chat_completions(self, request: Request) -> Response:
        arrival_s, (body, prompts) = await self._read(request, self._chat)
        return await self._answer(request, body, ChatFormat(), prompts, arrival_s)

    async def completions(self, request: Request) -> Response:
        arrival_s, (body, prompts) = await self._read(request, self._completion)
        return await self._answer(request, body, CompletionFormat(), prompts, arrival_s)

    async def _read(self, request: Request, understand: Callable[[Json], T]) -> tuple[float, T]:
        """Like Server.read, but nothing is done for a body that cannot wait now. What the engine refuses is counted."""
        try:
            return await self._server.read(request, understand, lambda: self._check_queue(request))
        except UnfitPrompt as error:
            self._server.measured.rejected(error.code)
            raise

    def _check_queue(self, request: Request) -> None:
        try:
            self._server.front.check_queue(client_of(request))
        except RequestError as error:
            self._server.measured.rejected(error.code)
            raise

    def _chat(self, fields: Json) -> tuple[ChatRequest, list[Prompt]]:
        self._server.check_messages(fields.get("messages"))
        body = convert(without_noops(fields, ChatRequest.__struct_fields__, CHAT_NOOPS), ChatRequest)
        self._check(body, num_prompts=1)
        ids = self._server.codec.encode_chat(
            body,
            add_special_tokens=bool(body.add_special_tokens),
            max_tokens=self._server.engine_info().max_model_len,
        )
        return body, self._server.front.prepare([ids], _num_choices(body), body.cache_salt)

    def _completion(self, fields: Json) -> tuple[CompletionRequest, list[Prompt]]:
        self._server.check_prompt(fields.get("prompt"))
        body = convert(without_noops(fields, CompletionRequest.__struct_fields__, COMPLETION_NOOPS), CompletionRequest)
        texts, ids = split_prompts(body.prompt)
        self._check(body, len(texts) + len(ids))
        ids = ids or self._server.codec.encode(
            texts,
            add_special_tokens=body.add_special_tokens is not False,
            max_tokens=self._server.engine_info().max_model_len,
        )
        return body, self._server.front.prepare(ids, _num_choices(body), body.cache_salt)

    def _check(self, body: GenerationFields, num_prompts: int) -> None:
        """What can be refused before any text is tokenized."""
        self._server.check_model(body.model)
        if body.stream_options is not None:
            _check_stream_options(body.stream_options, body.stream)
        self._sampling(body)
        validate_cache_salt(body.cache_salt)
        most = self._server.settings.max_choices // num_prompts
        if not 1 <= _num_choices(body) <= most:
            raise InvalidRequest(
                f"n is {quoted(_num_choices(body))}; with {num_prompts} prompts it may be 1 to {most}.", param="n"
            )

    def _sampling(self, body: GenerationFields) -> SamplingParams:
        return sampling_params(body, self._server.settings.default_sampling, self._server.engine_info().vocab_size)

    async def _answer(
        self, request: Request, body: GenerationFields, format: Format, prompts: list[Prompt], arrival_s: float
    ) -> Response:
        call = self._call(request, body, prompts, arrival_s)
        generation = Generation(call, self._server.front, self._server.measured, self._server.codec)
        model = body.model or self._server.settings.model_name
        envelope = Envelope(format, unique=call.unique, created=int(time.time()), model=model)
        if body.stream:
            return EventStream(generation, _stream_plan(body.stream_options or StreamOptions(), format, envelope))
        async with generation.running(request.receive):
            await generation.wait_all()
            choices = [format.choice(choice) for choice in generation.choices]
            return json_response(envelope.response(choices, generation.usage))

    def _call(self, request: Request, body: GenerationFields, prompts: list[Prompt], arrival_s: float) -> Call:
        return Call(
            request_id=request.state.request_id,
            unique=uuid.uuid4().hex,
            arrival_s=arrival_s,
            prompts=prompts,
            sampling=self._sampling(body),
            num_choices=_num_choices(body),
            priority=body.priority or 0,
            client=client_of(request),
            cache_salt=body.cache_salt,
        )


def _stream_plan(options: StreamOptions, format: Format, envelope: Envelope) -> StreamPlan:
    return StreamPlan(
        format=format,
        envelope=envelope,
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
    )


def _num_choices(body: GenerationFields) -> int:
    return 1 if body.n is None else body.n


def _check_stream_options(options: StreamOptions, stream: bool | None) -> None:
    if not stream:
        raise InvalidRequest("stream_options needs stream to be true. Leave it out.", param="stream_options")
    if options.include_obfuscation:
        raise InvalidRequest(
            "stream_options.include_obfuscation is not supported by this server. Leave it out or send false.",
            param="stream_options.include_obfuscation",
        )


def split_prompts(prompt: str | list[str | int | list[int]]) -> tuple[list[str], list[list[int]]]:
    """The prompts of a completion request: texts, or lists of ids. One of the two is empty.

    Raises:
        InvalidRequest: no prompts, or kinds mixed.
    """
    items: list[Any] = [prompt] if isinstance(prompt, str) else prompt
    kinds = set(map(type, items))  # without a turn of Python's for each of a million ids
    if kinds == {str}:
        return items, []
    if kinds == {int}:
        return [], [items]
    if kinds == {list}:
        return [], items
    raise InvalidRequest(
        "prompt is empty, or mixes texts, token ids and lists of token ids. Send a text, a list of texts, a list of token "
        "ids, or a list of such lists.",
        param="prompt",
    )
