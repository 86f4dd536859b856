"""/v1/chat/completions and /v1/completions: from a body to a running Generation and its answer."""

import time
import uuid

from fastapi import Request, Response

from flyball_protocol.quoting import quoted
from flyball_runtime.api.body import convert, parse_object
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
from flyball_runtime.core.errors import InvalidRequest
from flyball_runtime.core.sampling import SamplingParams
from flyball_runtime.engine.validate import validate_cache_salt


class CompletionRoutes:
    """The endpoints that generate text."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def chat_completions(self, request: Request) -> Response:
        fields = parse_object(await self._server.read_body(request))
        arrival_s = self._server.measured.clock.now()
        self._server.check_messages(fields.get("messages"))
        body = convert(without_noops(fields, ChatRequest.__struct_fields__, CHAT_NOOPS), ChatRequest)
        self._check(body)
        prompt = await self._server.codec.encode_chat(
            body,
            add_special_tokens=bool(body.add_special_tokens),
            max_tokens=self._server.engine_info().max_model_len,
            client=client_of(request),
        )
        return await self._answer(request, body, ChatFormat(), [prompt], arrival_s)

    async def completions(self, request: Request) -> Response:
        fields = parse_object(await self._server.read_body(request))
        arrival_s = self._server.measured.clock.now()
        self._server.check_prompt(fields.get("prompt"))
        body = convert(without_noops(fields, CompletionRequest.__struct_fields__, COMPLETION_NOOPS), CompletionRequest)
        self._check(body)
        prompts = await self._encode_prompts(body, client_of(request))
        return await self._answer(request, body, CompletionFormat(), prompts, arrival_s)

    def _check(self, body: GenerationFields) -> None:
        """What can be refused before any text is tokenized."""
        self._server.check_model(body.model)
        if body.stream_options is not None:
            _check_stream_options(body.stream_options, body.stream)
        self._sampling(body)
        validate_cache_salt(body.cache_salt)

    def _sampling(self, body: GenerationFields) -> SamplingParams:
        return sampling_params(body, self._server.settings.default_sampling, self._server.engine_info().vocab_size)

    async def _encode_prompts(self, body: CompletionRequest, client: str) -> list[list[int]]:
        prompts = split_prompts(body.prompt)
        ids = [prompt for prompt in prompts if not isinstance(prompt, str)]
        return ids or await self._server.codec.encode(
            [prompt for prompt in prompts if isinstance(prompt, str)],
            add_special_tokens=body.add_special_tokens is not False,
            max_tokens=self._server.engine_info().max_model_len,
            client=client,
        )

    async def _answer(
        self, request: Request, body: GenerationFields, format: Format, prompts: list[list[int]], arrival_s: float
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

    def _call(self, request: Request, body: GenerationFields, prompts: list[list[int]], arrival_s: float) -> Call:
        num_choices = 1 if body.n is None else body.n
        most = self._server.settings.max_choices // len(prompts)
        if not 1 <= num_choices <= most:
            raise InvalidRequest(
                f"n is {quoted(num_choices)}; with {len(prompts)} prompts it may be 1 to {most}.", param="n"
            )
        return Call(
            request_id=request.state.request_id,
            unique=uuid.uuid4().hex,
            arrival_s=arrival_s,
            prompts=prompts,
            sampling=self._sampling(body),
            num_choices=num_choices,
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


def _check_stream_options(options: StreamOptions, stream: bool | None) -> None:
    if not stream:
        raise InvalidRequest("stream_options needs stream to be true. Leave it out.", param="stream_options")
    if options.include_obfuscation:
        raise InvalidRequest(
            "stream_options.include_obfuscation is not supported by this server. Leave it out or send false.",
            param="stream_options.include_obfuscation",
        )


def split_prompts(prompt: str | list[str | int | list[int]]) -> list[str] | list[list[int]]:
    """The prompts of a completion request: one text or list of ids, or several of one kind.

    Raises:
        InvalidRequest: no prompts, or kinds mixed.
    """
    texts = [prompt] if isinstance(prompt, str) else [item for item in prompt if isinstance(item, str)]
    ids = [] if isinstance(prompt, str) else [item for item in prompt if isinstance(item, int)]
    lists = [] if isinstance(prompt, str) else [item for item in prompt if isinstance(item, list)]
    kinds = [kind for kind in (texts, [ids] if ids else [], lists) if kind]
    if len(kinds) == 1:
        return kinds[0]
    raise InvalidRequest(
        "prompt is empty, or mixes texts, token ids and lists of token ids. Send a text, a list of texts, a list of token "
        "ids, or a list of such lists.",
        param="prompt",
    )
