"""The app of port 8000: OpenAI's endpoints, health and metrics."""

from fastapi import FastAPI
from starlette.middleware import Middleware

from flyball_protocol import endpoints
from flyball_runtime import __version__
from flyball_runtime.api.completions import CompletionRoutes
from flyball_runtime.api.errors import install_error_handlers
from flyball_runtime.api.health import HealthRoutes
from flyball_runtime.api.lane import Lanes
from flyball_runtime.api.metrics import Metrics
from flyball_runtime.api.models import ModelRoutes
from flyball_runtime.api.request_id import RequestIdMiddleware
from flyball_runtime.api.server import Server
from flyball_runtime.api.settings import ApiSettings
from flyball_runtime.api.text import ChatTokenizer, TextCodec
from flyball_runtime.api.tokenize import TokenizeRoutes
from flyball_runtime.core.room import Room
from flyball_runtime.engine.front import EngineFront

PROBE_METHODS = ["GET", "HEAD"]


def create_app(front: EngineFront, tokenizer: ChatTokenizer, settings: ApiSettings, metrics: Metrics) -> FastAPI:
    """The public app. ``tokenizer`` is the model's, from transformers; its truncation and padding are turned off.

    Raises:
        ConfigError: the tokenizer is not a fast one.
    """
    server = Server(
        front=front,
        codec=TextCodec(tokenizer),
        settings=settings,
        metrics=metrics,
        room=Room(settings.max_total_body_bytes),
        lanes=Lanes(settings.max_inline_bytes, settings.max_total_body_bytes),
    )
    metrics.attach(front)
    app = bare_app("Flyball")
    _add_openai_routes(app, server)
    health = HealthRoutes(server)
    app.add_api_route(endpoints.LIVEZ_PATH, health.livez, methods=PROBE_METHODS)
    app.add_api_route(endpoints.READYZ_PATH, health.readyz, methods=PROBE_METHODS)
    app.add_api_route(endpoints.HEALTH_PATH, health.readyz, methods=PROBE_METHODS)
    app.add_api_route(endpoints.METRICS_PATH, health.metrics)
    return app


def bare_app(title: str, *inner: Middleware) -> FastAPI:
    """An app without routes whose every error has OpenAI's shape. No schema pages: bodies are msgspec's, not FastAPI's."""
    middleware = [Middleware(RequestIdMiddleware), *inner]
    app = FastAPI(title=title, version=__version__, openapi_url=None, redirect_slashes=False, middleware=middleware)
    install_error_handlers(app)
    return app


def _add_openai_routes(app: FastAPI, server: Server) -> None:
    completions, models, tokenize = CompletionRoutes(server), ModelRoutes(server), TokenizeRoutes(server)
    app.add_api_route("/v1/chat/completions", completions.chat_completions, methods=["POST"])
    app.add_api_route("/v1/completions", completions.completions, methods=["POST"])
    app.add_api_route("/v1/models", models.list_models)
    app.add_api_route("/v1/models/{model:path}", models.retrieve_model)
    app.add_api_route("/tokenize", tokenize.tokenize, methods=["POST"])
    app.add_api_route("/detokenize", tokenize.detokenize, methods=["POST"])
