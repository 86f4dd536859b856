"""The app of port 8000, and its smaller endpoints: models, tokenize, health and metrics."""

import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse
from starlette.middleware import Middleware

from flyball_protocol import endpoints
from flyball_protocol.errors import MESSAGES_PATH
from flyball_runtime import __version__
from flyball_runtime.api.adapters import AdapterRoutes
from flyball_runtime.api.completions import CompletionRoutes
from flyball_runtime.api.docs_page import page
from flyball_runtime.api.embeddings import EmbeddingRoutes
from flyball_runtime.api.errors import HttpRefusal, install_error_handlers, json_response
from flyball_runtime.api.identity import RequestIdMiddleware
from flyball_runtime.api.keys import ApiKeyAuth, ApiKeys
from flyball_runtime.api.lane import Lanes
from flyball_runtime.api.message_formats import MessageFormats
from flyball_runtime.api.metrics import MetricsCollector
from flyball_runtime.api.openapi import document
from flyball_runtime.api.schemas import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest
from flyball_runtime.api.server import Json, Server, convert, convert_chat
from flyball_runtime.api.settings import ApiSettings
from flyball_runtime.api.text import ChatTokenizer, TextCodec
from flyball_runtime.core.errors import (
    Draining,
    EngineDead,
    InvalidRequest,
    NotReady,
    PromptTooLong,
    TokenOutOfVocabulary,
)
from flyball_runtime.core.room import Room
from flyball_runtime.engine.front import EngineFront
from flyball_runtime.engine.heartbeat import pause_limit
from flyball_runtime.grammar.checker import GrammarChecker

RETRY_AFTER_STUCK_S = 5


class HealthRoutes:
    """/livez, /readyz, /health and /metrics.

    Live means making progress: idle, the engine shows it at least once a second; busy, after each layer of a step. So a hung
    step is seen, and a long step or a long queue is not mistaken for one. Where one layer of the largest step may take longer
    than the flag allows, as measured at start-up, it gets that time. Loading counts as live; how long it may take is the
    start-up probe's business.
    """

    def __init__(self, server: Server) -> None:
        self._server = server

    async def livez(self) -> Response:
        """200 while the engine lives, 503 when a restart is the only way out."""
        check_live(self._server.front, self._server.settings.max_heartbeat_age_s)
        return json_response({"status": "live"})

    async def readyz(self) -> Response:
        """200 while new requests are taken."""
        check_ready(self._server.front, self._server.settings.max_heartbeat_age_s)
        return json_response({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        body, content_type = self._server.metrics.exposition(request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": content_type})


def check_live(front: EngineFront, max_heartbeat_age_s: float) -> None:
    """Raise a 503 when the engine is dead or its loop stuck."""
    if front.dead_reason is not None:
        raise HttpRefusal(503, EngineDead.code, str(EngineDead(front.dead_reason)))
    if (reason := stuck_reason(front, max_heartbeat_age_s)) is not None:
        raise HttpRefusal(503, "engine_stuck", f"{reason}. Restart the replica.", retry_after_s=RETRY_AFTER_STUCK_S)


def stuck_reason(front: EngineFront, max_heartbeat_age_s: float) -> str | None:
    """Return for how long the engine has made no progress if that is too long; None while it loads."""
    if not front.ready and front.latest_stats() is None:
        return None
    limit = pause_limit(max_heartbeat_age_s, front.info.longest_pause_s)
    if (age_s := front.heartbeat_age_s()) <= limit.seconds:
        return None
    return f"the engine has made no progress for {age_s:.1f} s; {limit.source} allows {limit.seconds:.4g} s"


def check_ready(front: EngineFront, max_heartbeat_age_s: float) -> None:
    """Raise a 503 unless the engine is live, loaded and not draining."""
    check_live(front, max_heartbeat_age_s)
    if front.draining:
        raise Draining
    if not front.ready:
        raise NotReady


class ModelRoutes:
    """/v1/models: the served names and those of adapters, in OpenAI's shape with vLLM's max_model_len."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._created = int(time.time())

    async def list_models(self) -> Response:
        names = (*self._server.settings.served_model_names, *self._server.front.adapters.names)
        return json_response({"object": "list", "data": [self._card(name) for name in names]})

    async def retrieve_model(self, model: str) -> Response:
        self._server.check_model(model)
        return json_response(self._card(model))

    def _card(self, name: str) -> dict[str, Any]:
        info, settings = self._server.engine_info(), self._server.settings
        adapter = None if name in settings.served_model_names else self._server.front.adapters.find(name)
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "flyball",
            "root": info.model if adapter is None else adapter.path,
            "parent": None if adapter is None else adapter.parent or settings.model_name,
            "max_model_len": info.max_model_len,
        }


MAX_TOKENIZED = 65536


class TokenizeRoutes:
    """/tokenize and /detokenize, in vLLM's shapes.

    Both take as many tokens as the model does, and MAX_TOKENIZED in any case, so that too long a prompt can be measured.
    """

    def __init__(self, server: Server) -> None:
        self._server = server

    async def tokenize(self, request: Request) -> Response:
        """A text (``prompt``) or a chat (``messages``) as token ids."""
        _, answer = await self._server.read(request, self._tokenized)
        return answer

    async def detokenize(self, request: Request) -> Response:
        """Token ids as text, special tokens included."""
        _, answer = await self._server.read(request, self._detokenized)
        return answer

    def _tokenized(self, fields: Json) -> Response:
        self._server.check_chat(fields)
        if "messages" in fields:
            body: TokenizeChatRequest | TokenizeTextRequest = convert_chat(fields, TokenizeChatRequest)
        else:
            body = convert(fields, TokenizeTextRequest)
        self._server.check_model(body.model)
        max_model_len = self._server.engine_info().max_model_len
        token_ids = self._encode(body)
        strings = self._server.codec.token_strings(token_ids) if body.return_token_strs else None
        return json_response(
            {"count": len(token_ids), "max_model_len": max_model_len, "tokens": token_ids, "token_strs": strings}
        )

    def _detokenized(self, fields: Json) -> Response:
        tokens = fields.get("tokens")
        if isinstance(tokens, list) and len(tokens) > self._most_tokens():
            raise InvalidRequest(
                f"tokens has {len(tokens)} entries; at most {self._most_tokens()} are allowed. Send fewer.",
                param="tokens",
            )
        body = convert(fields, DetokenizeRequest)
        self._server.check_model(body.model)
        vocab_size = self._server.engine_info().vocab_size
        for token_id in body.tokens:
            if not 0 <= token_id < vocab_size:
                raise TokenOutOfVocabulary(token_id, vocab_size)
        return json_response({"prompt": self._server.codec.decode(body.tokens)})

    def _encode(self, body: TokenizeChatRequest | TokenizeTextRequest) -> list[int]:
        codec, most = self._server.codec, self._most_tokens()
        try:
            if isinstance(body, TokenizeChatRequest):
                adds = bool(body.add_special_tokens)
                return codec.encode_chat(body, add_special_tokens=adds, max_tokens=most)
            adds = body.add_special_tokens is not False
            (ids,) = codec.encode([body.prompt], add_special_tokens=adds, max_tokens=most)
            return ids
        except PromptTooLong:
            raise InvalidRequest(
                f"the prompt has more than {most} tokens, the most that are tokenized here. Send a shorter one.",
                param="messages" if isinstance(body, TokenizeChatRequest) else "prompt",
            ) from None

    def _most_tokens(self) -> int:
        return max(self._server.engine_info().max_model_len, MAX_TOKENIZED)


class DocsRoutes:
    """/openapi.json, and /docs, which shows it to a reader."""

    def __init__(self, settings: ApiSettings, *, needs_key: bool) -> None:
        self._settings = settings
        self._needs_key = needs_key

    async def openapi(self) -> Response:
        return json_response(self._document)

    async def page(self) -> Response:
        return HTMLResponse(page(self._document))

    @cached_property
    def _document(self) -> dict[str, Any]:
        return document(self._settings, needs_key=self._needs_key)


PROBE_METHODS = ["GET", "HEAD"]


def create_app(
    front: EngineFront,
    tokenizer: ChatTokenizer,
    settings: ApiSettings,
    metrics: MetricsCollector,
    api_keys: ApiKeys | None = None,
    grammars: GrammarChecker | None = None,
) -> FastAPI:
    """The public app.

    Args:
        tokenizer: the model's, from transformers; its truncation and padding are turned off.
        api_keys: without them, every caller is served.
        grammars: the model's; without them structured output is refused.

    Raises:
        ConfigError: the tokenizer is not a fast one.
    """
    codec = TextCodec(tokenizer)
    server = Server(
        front=front,
        codec=codec,
        settings=settings,
        metrics=metrics,
        room=Room(settings.max_total_body_bytes),
        lanes=Lanes(settings.max_inline_bytes, settings.max_total_body_bytes),
        formats=MessageFormats(
            codec.chat_template,
            settings.tool_call_parser,
            settings.reasoning_parser,
            calls_by_default=settings.enable_auto_tool_choice,
        ),
        grammars=grammars,
    )
    metrics.attach(front)
    auth = [] if api_keys is None else [Middleware(ApiKeyAuth, keys=api_keys)]
    app = bare_app("Flyball", inner=auth, outer=settings.cors.middleware())
    _add_openai_routes(app, server)
    health = HealthRoutes(server)
    app.add_api_route(endpoints.LIVEZ_PATH, health.livez, methods=PROBE_METHODS)
    app.add_api_route(endpoints.READYZ_PATH, health.readyz, methods=PROBE_METHODS)
    app.add_api_route(endpoints.HEALTH_PATH, health.readyz, methods=PROBE_METHODS)
    app.add_api_route(endpoints.METRICS_PATH, health.metrics)
    if not settings.disable_docs:
        docs = DocsRoutes(settings, needs_key=api_keys is not None)
        app.add_api_route(endpoints.OPENAPI_PATH, docs.openapi)
        app.add_api_route(endpoints.DOCS_PATH, docs.page)
    return app


def bare_app(title: str, *, inner: Sequence[Middleware] = (), outer: Sequence[Middleware] = ()) -> FastAPI:
    """An app without routes whose every error has OpenAI's shape. FastAPI's own pages are off: bodies are msgspec's.

    Args:
        inner: sees requests that have their id, and may raise RequestError.
        outer: sees every answer, errors too.
    """
    middleware = [*outer, Middleware(RequestIdMiddleware), *inner]
    app = FastAPI(title=title, version=__version__, openapi_url=None, redirect_slashes=False, middleware=middleware)
    install_error_handlers(app)
    return app


def _add_openai_routes(app: FastAPI, server: Server) -> None:
    completions, models, tokenize = CompletionRoutes(server), ModelRoutes(server), TokenizeRoutes(server)
    embeddings, adapters = EmbeddingRoutes(server), AdapterRoutes(server)
    app.add_api_route("/v1/chat/completions", completions.chat_completions, methods=["POST"])
    app.add_api_route("/v1/completions", completions.completions, methods=["POST"])
    app.add_api_route("/v1/responses", completions.responses, methods=["POST"])
    app.add_api_route(MESSAGES_PATH, completions.messages, methods=["POST"])
    app.add_api_route(f"{MESSAGES_PATH}/count_tokens", completions.count_tokens, methods=["POST"])
    app.add_api_route("/v1/embeddings", embeddings.embeddings, methods=["POST"])
    app.add_api_route("/v1/score", embeddings.score, methods=["POST"])
    app.add_api_route("/v1/models", models.list_models)
    app.add_api_route("/v1/models/{model:path}", models.retrieve_model)
    app.add_api_route("/v1/load_lora_adapter", adapters.load, methods=["POST"])
    app.add_api_route("/v1/unload_lora_adapter", adapters.unload, methods=["POST"])
    app.add_api_route("/tokenize", tokenize.tokenize, methods=["POST"])
    app.add_api_route("/detokenize", tokenize.detokenize, methods=["POST"])
