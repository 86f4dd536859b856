"""Bad requests: every answer has OpenAI's error shape, names the field, and reaches nobody else."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from transformers import PreTrainedTokenizerFast

from flyball_runtime.api import ApiSettings, MetricsCollector, create_app
from flyball_runtime.api.server import MAX_DROPPED_BODIES
from flyball_runtime.core.errors import ConfigError, Draining, EngineDead, QueuedTokensFull, QueueFull, RequestError
from runtime.api.support import asgi_client, chat, error_of
from runtime.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "truncated"),
        (b"{", "truncated"),
        (b'{"a": NaN}', "NaN"),
        (b"\xff\xfe", "not JSON in UTF-8"),
        (b'{"prompt": "\xff"}', "utf-8"),
        (b'{"prompt": "\\ud800"}', "not JSON in UTF-8"),
        (b'{"temperature": 1e999}', "out of range"),
        (b"[" * 60_000, "depth"),
        (b"[1]", "object, not list"),
        (b"null", "object, not NoneType"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize", "/detokenize"])
async def test_bodies_that_are_no_json_object(client: httpx.AsyncClient, path: str, body: bytes, says: str) -> None:
    response = await client.post(path, content=body)
    error = error_of(response)
    assert (response.status_code, error["code"], error["type"]) == (400, "invalid_json", "invalid_request_error")
    assert says in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 257}, "stop"),
        ({"stop_token_ids": [10**9]}, "stop_token_ids"),
        ({"stop_token_ids": [1] * 129}, "stop_token_ids"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": "much"}, "frequency_penalty"),
        ({"frequency_penalty": False}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {"-5": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"bad_words": "word"}, "bad_words"),
        ({"bad_words": ["x"] * 129}, "bad_words"),
        ({"n": 0}, "n"),
        ({"n": 10**6}, "n"),
        ({"priority": 2**40}, "priority"),
        ({"ttft_deadline_ms": 0}, "ttft_deadline_ms"),
        ({"ttft_deadline_ms": "soon"}, "ttft_deadline_ms"),
        ({"e2e_deadline_ms": -1.5}, "e2e_deadline_ms"),
        ({"e2e_deadline_ms": 1e12}, "e2e_deadline_ms"),
        ({"ttft_deadline_ms": 200, "e2e_deadline_ms": 100}, "e2e_deadline_ms"),
        ({"deadline_ms": 200}, "deadline_ms"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "x" * 1025}, "cache_salt"),
        ({"cache_salt": 7}, "cache_salt"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"nope": 1}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}] * 2049}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "user", "content": ""}]}, "messages"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "messages"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "messages"),
    ],
)
async def test_values_out_of_range_name_their_field(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], param: str
) -> None:
    response = await client.post(CHAT, json=chat() | fields)
    error = error_of(response)
    assert response.status_code == 400, error
    assert error["param"] is not None and error["param"].startswith(param), error
    assert not engine.requests


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({}, "invalid_request"),
        ({"prompt": None}, "invalid_request"),
        ({"prompt": []}, "invalid_request"),
        ({"prompt": ""}, "empty_prompt"),
        ({"prompt": [[]]}, "empty_prompt"),
        ({"prompt": ["a", 1]}, "invalid_request"),
        ({"prompt": ["a", [1]]}, "invalid_request"),
        ({"prompt": [1, [1]]}, "invalid_request"),
        ({"prompt": [True]}, "invalid_request"),
        ({"prompt": [1.5]}, "invalid_request"),
        ({"prompt": ["a"] * 257}, "invalid_request"),
        ({"prompt": [-1]}, "token_out_of_vocabulary"),
        ({"prompt": [2**70]}, "token_out_of_vocabulary"),
        ({"prompt": [5] * 1024}, "context_length_exceeded"),
        ({"prompt": "a", "max_tokens": 2**70}, "context_length_exceeded"),
        ({"prompt": "a", "echo": 1}, "invalid_request"),
        ({"prompt": "a", "max_tokens": 0}, "invalid_request"),
        ({"prompt": "a", "echo": True, "max_tokens": -1}, "invalid_request"),
        ({"prompt": "a", "echo": True, "logprobs": 2, "prompt_logprobs": 3}, "invalid_request"),
        ({"prompt": "a", "echo": True, "logprobs": 21}, "invalid_request"),
        ({"prompt": "a", "prompt_logprobs": 21}, "invalid_request"),
        ({"prompt": "a", "prompt_logprobs": -1}, "invalid_request"),
        ({"prompt": "a", "prompt_logprobs": True}, "invalid_request"),
        ({"prompt": "a", "prompt_logprobs": 1, "stream": True}, "invalid_request"),
        ({"prompt": "a", "logprobs": 21}, "invalid_request"),
        ({"prompt": "a", "logprobs": -1}, "invalid_request"),
        ({"prompt": "a", "logprobs": True}, "invalid_request"),
        ({"prompt": "a", "messages": []}, "invalid_request"),
    ],
)
async def test_prompts_that_cannot_run(client: httpx.AsyncClient, engine: FakeEngine, body: Any, code: str) -> None:
    response = await client.post(COMPLETIONS, json=body)
    assert (response.status_code, error_of(response)["code"]) == (400, code)
    assert engine.num_unfinished == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"echo": 0},
        {"echo": True},
        {"truncate_prompt_tokens": 5},
        {"temprature": 1},
    ],
)
async def test_what_is_not_supported_is_named(client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    response = await client.post(CHAT, json=chat(**fields))
    (name,) = fields
    error = error_of(response)
    assert response.status_code == 400 and error["param"] == name and repr(name) in error["message"]


async def test_all_unknown_fields_are_named_and_a_flood_of_them_is_cut(client: httpx.AsyncClient) -> None:
    error = error_of(await client.post(CHAT, json=chat(one=1, two=2)))
    assert "'one', 'two'" in error["message"]
    flood = {f"{number}" + "x" * 100: 1 for number in range(100)}
    error = error_of(await client.post(CHAT, json=chat(**flood)))
    assert "and 92 more" in error["message"] and len(error["message"]) < 1000


async def test_defaults_of_unsupported_fields_and_hints_pass(client: httpx.AsyncClient) -> None:
    noops = {"logprobs": False, "tools": None, "tool_choice": "auto", "response_format": {"type": "text"}}
    more = {"frequency_penalty": 0.0, "presence_penalty": 0, "logit_bias": {}, "min_tokens": 0, "n": 1, "store": False}
    hints = {"user": "ann", "metadata": {"team": "x"}, "safety_identifier": "s", "prompt_cache_key": "k"}
    response = await client.post(CHAT, json=chat(**noops, **more, **hints))
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nope", 404, "not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("POST", CHAT + "/", 404, "not_found"),
        ("GET", "/redoc", 404, "not_found"),
    ],
)
async def test_routing_errors(client: httpx.AsyncClient, method: str, path: str, status: int, code: str) -> None:
    response = await client.request(method, path)
    assert (response.status_code, error_of(response)["code"]) == (status, code)
    assert "allow" in response.headers or status != 405


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize", "/detokenize"])
async def test_unknown_model(client: httpx.AsyncClient, path: str) -> None:
    body = {CHAT: chat(), "/detokenize": {"tokens": [1]}}.get(path, {"prompt": "a"})
    response = await client.post(path, json=body | {"model": "gpt-9"})
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "gpt-9" in error["message"] and "test-model, alias" in error["message"]


async def test_body_over_the_limit_announced_or_chunked(client: httpx.AsyncClient, settings: ApiSettings) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        nonlocal num_sent
        for _ in range(1000):
            num_sent += 1
            yield b" " * 1024

    num_sent = 0
    for content in (b" " * (settings.max_body_bytes + 1), chunks()):
        response = await client.post(CHAT, content=content)
        assert (response.status_code, error_of(response)["code"]) == (413, "body_too_large")
        assert str(settings.max_body_bytes) in error_of(response)["message"]
    most = (1 + MAX_DROPPED_BODIES) * settings.max_body_bytes
    assert num_sent <= most // 1024 + 2, "a body without end was read on and on"


async def test_the_body_that_has_been_arriving_for_longest_gives_way(
    engine: FakeEngine, tokenizer: PreTrainedTokenizerFast, metrics: MetricsCollector
) -> None:
    async def slow() -> AsyncIterator[bytes]:
        yield b" " * 40_000
        arriving.set()
        await asyncio.Event().wait()

    arriving = asyncio.Event()
    settings = ApiSettings(served_model_names=("m",), max_body_bytes=50_000, max_total_body_bytes=50_000)
    async with asgi_client(create_app(engine, tokenizer, settings, metrics)) as client:
        waiting = asyncio.create_task(client.post(COMPLETIONS, content=slow()))
        await arriving.wait()
        answer = await client.post(COMPLETIONS, content=b'{"prompt": "a"}' + b" " * 40_000)
        assert answer.status_code == 200
        refused = await waiting
        assert (refused.status_code, error_of(refused)["code"]) == (503, "no_room")
        assert "--max-total-body-bytes" in error_of(refused)["message"]
        assert (refused.headers["retry-after"], refused.headers["connection"]) == ("1", "close")


@pytest.mark.parametrize("error", [QueuedTokensFull(9, 9, 10, 3), QueueFull(10, 3), Draining(2), EngineDead("killed")])
@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_engine_refuses(
    client: httpx.AsyncClient, engine: FakeEngine, metrics: MetricsCollector, error: RequestError, stream: bool
) -> None:
    engine.refuse = (0, error)
    response = await client.post(CHAT, json=chat(stream=stream))
    assert (response.status_code, error_of(response)["code"]) == (error.status, error.code)
    retry_after = None if error.retry_after_s is None else str(error.retry_after_s)
    assert response.headers.get("retry-after") == retry_after
    assert f'flyball_requests_rejected_total{{reason="{error.code}"}} 1.0' in metrics.exposition("")[0].decode()


async def test_not_ready(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.ready, engine.stats = False, None
    for method, path, body in [
        ("POST", CHAT, chat()),
        ("GET", "/v1/models", None),
        ("POST", "/tokenize", {"prompt": ""}),
    ]:
        response = await client.request(method, path, json=body)
        assert (response.status_code, error_of(response)["code"]) == (503, "not_ready")
        assert response.headers["retry-after"]


async def test_detokenize_out_of_vocabulary(client: httpx.AsyncClient) -> None:
    for token_id in (-1, 10**6, 2**70):
        response = await client.post("/detokenize", json={"tokens": [5, token_id]})
        assert (response.status_code, error_of(response)["code"]) == (400, "token_out_of_vocabulary")


async def test_no_chat_template(
    engine: FakeEngine, tokenizer: PreTrainedTokenizerFast, settings: ApiSettings, metrics: MetricsCollector
) -> None:
    plain = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    async with asgi_client(create_app(engine, plain, settings, metrics)) as client:
        error = error_of(await client.post(CHAT, json=chat()))
    assert error["param"] == "messages" and "no chat template" in error["message"]


async def test_a_bug_is_a_500_and_its_traceback_is_logged(
    app: FastAPI, client: httpx.AsyncClient, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(request: Any) -> list[int]:
        raise ZeroDivisionError("secret detail")

    engine.reply = broken
    response = await client.post(CHAT, json=chat(), headers={"X-Request-Id": "find-me"})
    error = error_of(response)
    assert (response.status_code, error["code"], error["type"]) == (500, "internal_error", "server_error")
    assert "find-me" in error["message"] and "secret" not in response.text
    assert "secret detail" in caplog.text and "find-me" in caplog.text


async def test_a_bug_while_submitting_leaves_no_choice_behind(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.reply, engine.refuse = None, (1, ZeroDivisionError("bug"))
    response = await client.post(COMPLETIONS, json={"prompt": "a", "n": 2})
    assert response.status_code == 500 and engine.num_unfinished == 0 and len(engine.aborted) == 1


async def test_request_id_is_echoed_and_names_the_engine_request(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for _ in range(2):
        response = await client.post(CHAT, json=chat(), headers={"X-Request-Id": "abc.1"})
        assert response.headers["x-request-id"] == "abc.1"
    first, second = (request.request_id for request in engine.requests)
    assert first.startswith("abc.1-") and second.startswith("abc.1-") and first != second


@pytest.mark.parametrize("request_id", ["", "a b", "x" * 129, "a\x7fb"])
async def test_request_id_that_cannot_be_logged(client: httpx.AsyncClient, request_id: str) -> None:
    response = await client.get("/livez", headers={"X-Request-Id": request_id})
    assert response.status_code == 400 and error_of(response)["param"] == "X-Request-Id"


@pytest.mark.parametrize(
    "changes",
    [
        {"served_model_names": ()},
        {"max_body_bytes": 0},
        {"max_total_body_bytes": 4 * 1024 * 1024 - 1},
        {"write_timeout_s": -1.0},
        {"body_timeout_s": float("inf")},
        {"header_timeout_s": float("nan")},
    ],
)
async def test_settings_out_of_range(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes)).replace("_", ".")):
        ApiSettings(**({"served_model_names": ("m",)} | changes))


async def test_tokenizer_without_a_fast_backend(
    engine: FakeEngine, settings: ApiSettings, metrics: MetricsCollector
) -> None:
    with pytest.raises(ConfigError, match="a fast tokenizer"):
        create_app(engine, object(), settings, metrics)  # type: ignore[arg-type]
