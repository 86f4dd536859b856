"""What a client writes reaches answers and logs on one line, without control characters, and short."""

import json
import logging
from typing import Any

import httpx
import pytest

from runtime.api.support import MODEL, chat, error_of

pytestmark = pytest.mark.anyio

FORGED = "x\n2026-01-01 INFO forged \x1b[31m \u202e \x00"
LONG = "y" * 50_000
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def bodies(name: str) -> list[tuple[str, Any]]:
    """Bodies with ``name`` in every place where a client may write what it likes."""
    message = {"role": "user", "content": "a"}
    return [
        (CHAT, chat(**{name: 1})),
        (CHAT, {"messages": [message | {name: 1}]}),
        (CHAT, {"messages": [message | {"role": name}]}),
        (CHAT, {"messages": [message | {"content": [{"type": "text", "text": "", name: 1}]}]}),
        (CHAT, {"messages": [message | {"content": [{"type": name, "text": ""}]}]}),
        (CHAT, chat(stream=True, stream_options={name: True})),
        (CHAT, chat() | {"model": name}),
        (CHAT, chat(seed=name, temperature=name)),
        (COMPLETIONS, {"prompt": "a", name: 1}),
        (COMPLETIONS, {"prompt": {name: 1}}),
        ("/tokenize", {"prompt": "a", name: 1}),
        ("/tokenize", {"messages": [message], name: 1}),
        ("/detokenize", {"tokens": [1], name: 1}),
        ("/detokenize", {"tokens": [1], "model": name}),
        (CHAT, {"messages": [message], "stop": ["a", name * 2], "n": 10**9}),
    ]


def assert_harmless(texts: list[str]) -> None:
    for text in texts:
        assert text.isprintable(), "a control character got through"
        assert len(text) < 2000, "what a client wrote was not cut"


@pytest.mark.parametrize("name", [FORGED, LONG], ids=["forged", "long"])
@pytest.mark.parametrize("number", range(len(bodies("x"))))
async def test_names_and_values_of_fields(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture, name: str, number: int
) -> None:
    path, body = bodies(name)[number]
    with caplog.at_level(logging.INFO, "flyball_runtime"):
        error = error_of(await client.post(path, json=body))
    assert_harmless([error["message"], error["param"] or "", *(record.getMessage() for record in caplog.records)])


@pytest.mark.parametrize("number", [10**4000, -(10**4000)], ids=["above", "below"])
@pytest.mark.parametrize("field", ["max_tokens", "n", "seed", "stop_token_ids", "prompt"])
async def test_numbers_of_many_digits(client: httpx.AsyncClient, field: str, number: int) -> None:
    value = [number] if field in ("stop_token_ids", "prompt") else number
    body = json.dumps({"prompt": "a"} | {field: value})
    error = error_of(await client.post(COMPLETIONS, content=body))
    assert_harmless([error["message"]])


@pytest.mark.parametrize(
    "path", ["/a%0d%0a2026-01-01%20forged%1b[31m", "/" + LONG, "/v1/models/%0aforged", f"/v1/models/{LONG}"]
)
async def test_paths(client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture, path: str) -> None:
    with caplog.at_level(logging.INFO, "flyball_runtime"):
        error = error_of(await client.get(path))
    assert_harmless([error["message"], *(record.getMessage() for record in caplog.records)])


async def test_methods_and_request_ids(client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "flyball_runtime"):
        answers = [
            await client.request("Z" * 10_000, "/livez"),
            await client.get("/livez", headers={"X-Request-Id": LONG}),
            await client.get("/livez", headers={"X-Request-Id": "\x1b[31m"}),
        ]
    messages = [error_of(answer)["message"] for answer in answers]
    assert_harmless([*messages, *(record.getMessage() for record in caplog.records)])


async def test_what_a_chat_template_raises(client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"messages\n": 1}}
    assert (await client.post(CHAT, json=body)).status_code == 200
    body["chat_template_kwargs"] = {"tokenize": 1, "mood": FORGED}
    assert_harmless([error_of(await client.post(CHAT, json=body))["message"]])


async def test_the_admin_port_quotes_too(admin: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "flyball_runtime"):
        for body in (
            {FORGED: 1},
            {LONG: 1},
            {"revision": 1, "limits": {FORGED: 1}},
            {"revision": FORGED, "limits": {}},
        ):
            error = error_of(await admin.post("/admin/limits", json=body))
            assert_harmless([error["message"], error["param"] or ""])
    assert_harmless([record.getMessage() for record in caplog.records])
