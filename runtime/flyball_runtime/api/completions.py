"""The endpoints that generate text: from a body to a running Generation, and its answer, whole or streamed."""

import asyncio
import json
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec
from fastapi import Request, Response

from flyball_protocol.quoting import quoted
from flyball_runtime.api.anthropic_format import MessageFrame, MessageStream, whole_message
from flyball_runtime.api.anthropic_messages import (
    MESSAGE_NOOPS,
    MessagesRequest,
    TokenCountRequest,
    chat_of_messages,
    in_terms_of_messages,
)
from flyball_runtime.api.chat_format import ChatFormat
from flyball_runtime.api.errors import error_json, json_response
from flyball_runtime.api.event_stream import EventStream
from flyball_runtime.api.generation import CheckedRequest, Choice, Echo, Generation, TokenUsage
from flyball_runtime.api.identity import client_of
from flyball_runtime.api.json_line import json_line
from flyball_runtime.api.logprobs import completion_logprobs, prompt_logprobs
from flyball_runtime.api.message_formats import Parsing
from flyball_runtime.api.response_format import ResponseFrame, ResponseStream, whole_response
from flyball_runtime.api.responses import ResponseRequest, chat_fields, echoed, in_terms_of_responses, known_fields
from flyball_runtime.api.schemas import (
    CHAT_NOOPS,
    COMPLETION_NOOPS,
    ChatRequest,
    CompletionRequest,
    GenerationFields,
    StreamOptions,
    sampling_params,
    urgency_of,
    without_noops,
)
from flyball_runtime.api.server import Json, Server, convert, convert_chat
from flyball_runtime.core.errors import InvalidRequest, RequestError
from flyball_runtime.core.request import Prompt, validate_cache_salt, validate_deadlines
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.text.token_text import TokenText

Messages = TypeVar("Messages", bound=TokenCountRequest)
Frame = TypeVar("Frame", ResponseFrame, MessageFrame)

logger = logging.getLogger(__name__)

_encode = msgspec.json.encode

DONE = b"data: [DONE]\n\n"


def _completion_usage(usage: TokenUsage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.num_prompt,
        "completion_tokens": usage.num_output,
        "total_tokens": usage.num_prompt + usage.num_output,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached},
    }


class CompletionFormat:
    """/v1/completions."""

    id_prefix = "cmpl-"
    response_object = "text_completion"
    chunk_object = "text_completion"
    prompt_in_choice = True

    def __init__(self, token_text: TokenText) -> None:
        self.token_text = token_text
        self._offsets: Counter[int] = Counter()  # characters of the tokens so far, by choice

    def choice(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": choice.take_text(),
            "logprobs": self.logprobs(choice),
            "finish_reason": choice.finish_reason,
        }

    def logprobs(self, choice: Choice) -> dict[str, Any] | None:
        """Those of the tokens since the last call; None if there are none."""
        tokens = choice.take_logprobs()
        if not tokens:
            return None
        logprobs = completion_logprobs(tokens, self.token_text, self._offsets[choice.index])
        self._offsets[choice.index] += sum(map(len, logprobs["tokens"]))
        return logprobs

    def opening(self, index: int) -> bytes | None:
        return None

    def texts(self, choice: Choice) -> list[bytes]:
        """The text that came since the last call, if any."""
        text = choice.take_text()
        return [json_line(text)] if text else []

    def text(self, index: int, text: bytes, logprobs: bytes) -> bytes:
        return self._choice(index, text, logprobs, None)

    def finish(self, choice: Choice, logprobs: bytes) -> bytes:
        return self._choice(choice.index, b'""', logprobs, choice.finish_reason)

    @staticmethod
    def _choice(index: int, text: bytes, logprobs: bytes, reason: str | None) -> bytes:
        return b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}' % (
            index,
            text,
            logprobs,
            _encode(reason),
        )


Format = ChatFormat | CompletionFormat


def _prompt_token_ids(choice: Choice) -> dict[str, Any]:
    return {} if choice.prompt_token_ids is None else {"prompt_token_ids": choice.prompt_token_ids}


def _prompt_extras(choice: Choice, format: Format) -> dict[str, Any]:
    """What is told of a prompt only if it is asked for."""
    extras = _prompt_token_ids(choice)
    if choice.tells_prompt_logprobs:
        extras["prompt_logprobs"] = prompt_logprobs(choice.prompt_logprobs, format.token_text)
    return extras


def _extras(choice: Choice, format: Format) -> dict[str, Any]:
    extras = _prompt_extras(choice, format) if format.prompt_in_choice else {}
    if choice.prompt_token_ids is not None:
        extras["token_ids"] = choice.take_token_ids()
    if choice.score is not None:
        extras["sequence_score"] = choice.score
    return extras


def _whole(generation: Generation, format: Format, frame: "AnswerFrame") -> Response:
    """The answer of a generation that has ended."""
    told = generation.told
    choices = [format.choice(choice) | _extras(choice, format) for choice in told]
    prompt = {} if format.prompt_in_choice else _prompt_extras(told[0], format)
    return json_response(frame.response(choices, generation.usage) | prompt)


class AnswerFrame:
    """What surrounds the choices of one HTTP request: id, object, creation time, model.

    A stream writes one chunk per step and request, so a chunk is its constant bytes around the JSON of its text.
    """

    def __init__(self, format: Format, *, unique: str, created: int, model: str) -> None:
        self._fields = {"id": format.id_prefix + unique, "created": created, "model": model}
        chunk_fields = _encode(self._fields | {"object": format.chunk_object})
        self._chunk_head = b"data: " + chunk_fields.removesuffix(b"}") + b',"choices":['
        self._response_object = format.response_object

    def response(self, choices: list[dict[str, Any]], usage: TokenUsage) -> dict[str, Any]:
        return self._fields | {"object": self._response_object, "choices": choices, "usage": _completion_usage(usage)}

    def chunk(self, choice: bytes, usage: TokenUsage | None = None) -> bytes:
        """One SSE event. ``choice`` may be empty, in the closing usage chunk."""
        tail = b"]}\n\n" if usage is None else b'],"usage":%b}\n\n' % _encode(_completion_usage(usage))
        return self._chunk_head + choice + tail


class ChunkStream(EventStream):
    """Chunks in OpenAI's form, ended by ``[DONE]``. A failure becomes an ``error`` event without it."""

    def __init__(self, generation: Generation, format: Format, frame: AnswerFrame, options: StreamOptions) -> None:
        super().__init__(generation)
        self._format = format
        self._frame = frame
        self._options = options
        self._opened: set[int] = set()

    def events_of(self, choice: Choice) -> bytes:
        return b"".join(self._chunks(choice))

    def closing(self, usage: TokenUsage) -> bytes:
        return self._frame.chunk(b"", usage) + DONE if self._options.include_usage else DONE

    def failed(self, failure: RequestError) -> bytes:
        return b"event: error\ndata: " + error_json(failure) + b"\n\n"

    def _chunks(self, choice: Choice) -> list[bytes]:
        """The events of one choice since the last wake-up: opening, text, finish, as far as there are any."""
        format, texts = self._format, self._format.texts(choice)
        if not texts and choice.finish_reason is None:
            return []
        parts: list[bytes | None] = []
        if opens := choice.index not in self._opened:
            self._opened.add(choice.index)
            parts.append(format.opening(choice.index))
        logprobs = json_line(format.logprobs(choice))
        for text in texts:
            parts.append(format.text(choice.index, text, logprobs))
            logprobs = b"null"
        if choice.finish_reason is not None:
            parts.append(format.finish(choice, logprobs))
        usage = self._running_usage(choice)
        chunks = [self._frame.chunk(part, usage) for part in parts if part is not None]
        return chunks if choice.prompt_token_ids is None else self._with_token_ids(chunks, choice, opens)

    def _with_token_ids(self, chunks: list[bytes], choice: Choice, opens: bool) -> list[bytes]:
        """The prompt's in the first chunk of the choice, the new ones of the output in the last of these."""
        events = [json.loads(chunk.removeprefix(b"data: ")) for chunk in chunks]
        if opens:
            first = events[0]["choices"][0] if self._format.prompt_in_choice else events[0]
            first |= _prompt_token_ids(choice)
        events[-1]["choices"][0]["token_ids"] = choice.take_token_ids()
        return [b"data: %b\n\n" % json_line(event) for event in events]

    def _running_usage(self, choice: Choice) -> TokenUsage | None:
        if not self._options.continuous_usage_stats:
            return None
        return TokenUsage(
            num_prompt=choice.num_prompt_tokens,
            num_output=choice.num_output_tokens,
            num_cached=choice.num_cached_tokens,
        )


class Understood(NamedTuple):
    """A body, and what it asks for."""

    body: GenerationFields
    sampling: SamplingParams
    prompts: list[Prompt]
    adapter: int | None
    parsing: Parsing | None = None
    echoes: list[Echo] = []  # noqa: RUF012  never changed


def _check_choices(body: GenerationFields, num_prompts: int, most: int) -> None:
    """Raise InvalidRequest for too few or too many outputs, whether they are sampled or followed by a beam search."""
    for name, each in (("n", body.num_choices), ("best_of", body.num_outputs)):
        if each < 1:
            raise InvalidRequest(
                f"{name} is {quoted(each)}; it must be at least 1. Raise it or leave it out.", param=name
            )
        if num_prompts * each > most:
            raise InvalidRequest(
                f"{name} is {quoted(each)} with {num_prompts} prompts, {quoted(num_prompts * each)} together; a request may "
                f"ask for at most {most} (--max-choices). Lower {name}, or send fewer prompts.",
                param=name,
            )


@contextmanager
def _in_terms_of(translated: Callable[[InvalidRequest], InvalidRequest]) -> Iterator[None]:
    """Have errors about a chat speak of the body that it was made from."""
    try:
        yield
    except InvalidRequest as error:
        raise translated(error) from None


class CompletionRoutes:
    """The endpoints that generate text."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def chat_completions(self, request: Request) -> Response:
        arrival_s, understood = await self._server.read_to_queue(request, self._chat)
        format = ChatFormat(self._server.codec.token_text, understood.parsing)
        return await self._answer(request, format, understood, arrival_s)

    async def completions(self, request: Request) -> Response:
        arrival_s, understood = await self._server.read_to_queue(request, self._completion)
        return await self._answer(request, CompletionFormat(self._server.codec.token_text), understood, arrival_s)

    async def responses(self, request: Request) -> Response:
        arrival_s, (body, understood) = await self._server.read_to_queue(request, self._response)
        with _in_terms_of(in_terms_of_responses):
            generation = await self._generation(request, understood, arrival_s)
        model = body.model or self._server.settings.model_name
        frame = ResponseFrame(unique=generation.call.unique, created=int(time.time()), model=model, echoed=echoed(body))
        return await self._tell(request, understood, generation, frame, ResponseStream, whole_response)

    async def messages(self, request: Request) -> Response:
        arrival_s, (body, understood) = await self._server.read_to_queue(
            request, partial(self._messages, kind=MessagesRequest)
        )
        with _in_terms_of(in_terms_of_messages):
            generation = await self._generation(request, understood, arrival_s)
        frame = MessageFrame(unique=generation.call.unique, model=body.model or self._server.settings.model_name)
        return await self._tell(request, understood, generation, frame, MessageStream, whole_message)

    async def _tell(
        self,
        request: Request,
        understood: Understood,
        generation: Generation,
        frame: Frame,
        stream: Callable[[Generation, Frame, Parsing], Response],
        whole: Callable[[Generation, Frame, Parsing], dict[str, Any]],
    ) -> Response:
        """The answer that ``stream`` or ``whole`` makes of a generation with one choice."""
        parsing = understood.parsing or self._server.formats.no_parsing()
        if understood.body.stream:
            return stream(generation, frame, parsing)
        async with generation.running(request.receive):
            await generation.wait_all()
            return json_response(whole(generation, frame, parsing))

    async def count_tokens(self, request: Request) -> Response:
        _, (body, understood) = await self._server.read(request, partial(self._messages, kind=TokenCountRequest))
        urgency_of(body, request.headers)  # nothing waits here, but a wrong header is an error on all paths
        return json_response({"input_tokens": len(understood.prompts[0].token_ids)})

    def _chat(self, fields: Json) -> Understood:
        self._server.check_chat(fields)
        body = convert_chat(without_noops(fields, ChatRequest.__struct_fields__, CHAT_NOOPS), ChatRequest)
        sampling = self._check(body, num_prompts=1)
        self._server.formats.check(body)
        sampling = self._server.formats.with_calls(body, sampling, self._server.codec.special_ids)
        text = self._server.codec.render(body)
        ids = self._server.codec.encode(
            [text],
            add_special_tokens=bool(body.add_special_tokens),
            max_tokens=self._server.engine_info().max_model_len,
        )
        adapter = self._server.adapter_of(body.model)
        prompts = self._server.front.prepare(ids, body.num_requests, body.cache_salt, adapter)
        parsing = self._server.formats.parsing(body, text, has_grammar=sampling.grammar is not None)
        return Understood(body, sampling, prompts, adapter, parsing)

    def _response(self, fields: Json) -> tuple[ResponseRequest, Understood]:
        known = known_fields(fields)
        if isinstance(items := fields.get("input"), list):
            self._server.check_count("input", len(items), self._server.settings.max_messages)
        body = convert(known, ResponseRequest)
        with _in_terms_of(in_terms_of_responses):
            return body, self._chat(chat_fields(body))

    def _messages(self, fields: Json, kind: type[Messages]) -> tuple[Messages, Understood]:
        self._server.check_chat(fields)
        body = convert(without_noops(fields, kind.__struct_fields__, MESSAGE_NOOPS), kind)
        with _in_terms_of(in_terms_of_messages):
            return body, self._chat(chat_of_messages(body))

    def _completion(self, fields: Json) -> Understood:
        self._server.check_prompt(fields.get("prompt"))
        body = convert(without_noops(fields, CompletionRequest.__struct_fields__, COMPLETION_NOOPS), CompletionRequest)
        texts, ids = body.prompts()
        sampling = self._check(body, len(texts) + len(ids))
        ids = ids or self._server.codec.encode(
            texts,
            add_special_tokens=body.add_special_tokens is not False,
            max_tokens=self._server.engine_info().max_model_len,
        )
        adapter = self._server.adapter_of(body.model)
        prompts = self._server.front.prepare(ids, body.num_requests, body.cache_salt, adapter)
        return Understood(body, sampling, prompts, adapter, echoes=self._echoes(body, texts, ids))

    def _echoes(self, body: CompletionRequest, texts: list[str], ids: list[list[int]]) -> list[Echo]:
        if not body.echo:
            return []
        return [Echo(text, body.only_echoes) for text in texts or map(self._server.codec.decode, ids)]

    def _check(self, body: GenerationFields, num_prompts: int) -> SamplingParams:
        """Return the sampling of a body, after all that can be refused before any prompt is tokenized."""
        self._server.check_model(body.model)
        body.check_stream_options()
        sampling = self._sampling(body)
        validate_cache_salt(body.cache_salt)
        validate_deadlines(body.ttft_deadline_ms, body.e2e_deadline_ms)
        _check_choices(body, num_prompts, self._server.settings.max_choices)
        return sampling

    def _sampling(self, body: GenerationFields) -> SamplingParams:
        vocab_size = self._server.engine_info().vocab_size
        sampling = sampling_params(body, self._server.settings.default_sampling, vocab_size)
        return self._server.codec.with_bad_words(sampling)

    async def _generation(self, request: Request, understood: Understood, arrival_s: float) -> Generation:
        """The generation of a request. Raises InvalidRequest for a grammar that cannot be used."""
        try:
            call = await self._call(request, understood, arrival_s)
        except InvalidRequest as error:
            if understood.parsing is not None and understood.parsing.forced:
                raise InvalidRequest(f"the parameters of the tools: {error.message}", param="tools") from None
            if error.param == "structured_outputs" and understood.body.structured_outputs is None:
                raise InvalidRequest(error.message, param="response_format") from None
            raise
        server = self._server
        return Generation(call, server.front, server.measured, server.codec, server.settings.stream_interval)

    async def _answer(self, request: Request, format: Format, understood: Understood, arrival_s: float) -> Response:
        body = understood.body
        generation = await self._generation(request, understood, arrival_s)
        model = body.model or self._server.settings.model_name
        frame = AnswerFrame(format, unique=generation.call.unique, created=int(time.time()), model=model)
        if body.stream:
            return ChunkStream(generation, format, frame, body.stream_options or StreamOptions())
        async with generation.running(request.receive):
            await generation.wait_all()
            if body.prompt_logprobs is None:
                return _whole(generation, format, frame)
            return await asyncio.to_thread(_whole, generation, format, frame)  # 10 us for each token of a prompt

    async def _call(self, request: Request, understood: Understood, arrival_s: float) -> CheckedRequest:
        body = understood.body
        sampling = await self._server.with_checked_grammar(understood.sampling)
        return CheckedRequest(
            request_id=request.state.request_id,
            unique=uuid.uuid4().hex,
            arrival_s=arrival_s,
            prompts=understood.prompts,
            sampling=sampling,
            num_choices=body.num_choices if body.use_beam_search else body.num_outputs,
            num_told=body.num_choices if body.num_requests > body.num_choices else None,
            urgency=urgency_of(body, request.headers),
            client=client_of(request),
            cache_salt=body.cache_salt,
            return_token_ids=bool(body.return_token_ids),
            markers=() if understood.parsing is None else understood.parsing.markers,
            prompt_logprobs=body.prompt_logprobs is not None,
            echoes=understood.echoes,
            adapter=understood.adapter,
        )
