"""What the API tests share: requests, readers of answers, and a real server."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send
from transformers import PreTrainedTokenizerFast

ADMIN_TOKEN = "admin-token"
MODEL = "test-model"


def bounded(app: ASGIApp) -> ASGIApp:
    """The app, whose requests fail a test instead of hanging it."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        async with asyncio.timeout(10):
            await app(scope, receive, send)

    return call


def asgi_client(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(bounded(app)), base_url="http://test")


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)


def chat(content: Any = "Hi", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}]} | fields


def sse_events(text: str) -> list[Any]:
    """The data of each event: parsed JSON, or "[DONE]"."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def is_a(kind: type, answer: dict[str, Any]) -> None:
    """Check that an answer is of this kind of ``api/answers.py``, and has no field that the kind does not have."""
    assert msgspec.to_builtins(msgspec.convert(answer, kind)) == answer


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error of a response, after checking its shape."""
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"] and body["error"]["type"] and body["error"]["code"]
    assert response.headers["x-request-id"]
    return body["error"]


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop run until ``condition`` holds; a condition that never comes true is a failure."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


@asynccontextmanager
async def served(app: FastAPI, **options: Any) -> AsyncIterator[tuple[str, int]]:
    """The app behind a real uvicorn on a free loopback port."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", **options))
    task = asyncio.create_task(server.serve([listener]))
    try:
        await until(lambda: server.started)
        yield "127.0.0.1", listener.getsockname()[1]
    finally:
        server.should_exit = True
        await task
        listener.close()
