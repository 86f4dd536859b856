"""CORS: off unless origins are named; preflights need no key; errors can be read by the page too."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from transformers import PreTrainedTokenizerFast

from flyball_protocol import endpoints
from flyball_runtime import cli
from flyball_runtime.api import ApiSettings, MetricsCollector, create_app
from flyball_runtime.api.cors import Cors
from flyball_runtime.api.keys import ApiKeys
from flyball_runtime.core.clock import FakeClock
from runtime.api.support import MODEL, asgi_client, error_of
from runtime.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

PAGE = "https://app.example"
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


@pytest.fixture
def settings() -> ApiSettings:
    return ApiSettings(served_model_names=(MODEL,), cors=Cors(allowed_origins=(PAGE,)))


@pytest.fixture
def app(
    engine: FakeEngine, tokenizer: PreTrainedTokenizerFast, settings: ApiSettings, metrics: MetricsCollector
) -> FastAPI:
    return create_app(engine, tokenizer, settings, metrics, ApiKeys(None, "key-of-a-test", FakeClock()))


async def test_a_preflight_needs_no_key_and_the_request_does(client: httpx.AsyncClient) -> None:
    preflight = await client.options("/v1/chat/completions", headers=PREFLIGHT)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == PAGE
    assert preflight.headers["access-control-allow-headers"] == "authorization,content-type"
    refused = await client.get("/v1/models", headers={"Origin": PAGE})
    assert error_of(refused)["code"] == "invalid_api_key"
    assert refused.headers["access-control-allow-origin"] == PAGE, "else the page could not read why"
    served = await client.get("/v1/models", headers={"Origin": PAGE, "Authorization": "Bearer key-of-a-test"})
    assert served.headers["access-control-allow-origin"] == PAGE
    assert "X-Request-Id" in served.headers["access-control-expose-headers"]
    assert "access-control-allow-credentials" not in served.headers


async def test_other_pages_are_not_allowed(client: httpx.AsyncClient) -> None:
    headers = PREFLIGHT | {"Origin": "https://evil.example"}
    assert (await client.options("/v1/chat/completions", headers=headers)).status_code == 400
    answer = await client.get("/health", headers=headers)
    assert "access-control-allow-origin" not in answer.headers


async def test_it_is_off_by_default(
    engine: FakeEngine, tokenizer: PreTrainedTokenizerFast, metrics: MetricsCollector
) -> None:
    app = create_app(engine, tokenizer, ApiSettings(served_model_names=(MODEL,)), metrics)
    async with asgi_client(app) as client:
        for response in (
            await client.options("/v1/models", headers=PREFLIGHT),
            await client.get("/v1/models", headers={"Origin": PAGE}),
        ):
            assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--allowed-origins", '["app.example"]'],
            "'app.example'; each entry must be \"*\" or like https://app.example",
        ),
        (["--allowed-origins", '["https://app.example/"]'], "without a path"),
        (["--allowed-origins", "[]"], "--allowed-origins is an empty list"),
        (["--allowed-origins", '["*"]', "--allow-credentials"], "Name the origins"),
        (["--allowed-origins", '["*"]', "--allowed-methods", '["GET POST"]'], "'GET POST'"),
        (["--allowed-methods", '["GET"]'], "no effect without --allowed-origins"),
        (["--allow-credentials"], "no effect without --allowed-origins"),
    ],
)
def test_what_cannot_work_stops_start_up(
    flags: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[Any]
) -> None:
    monkeypatch.setattr("flyball_runtime.model.hub.find_checkpoint", lambda *_: tmp_path)
    assert cli.main(["serve", "model", *flags]) == endpoints.EXIT_CONFIG_ERROR
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("value", ["https://app.example", '"*"', "[1]", ""])
def test_what_is_no_json_list_is_a_usage_error(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "model", "--allowed-origins", value])
    assert "is not a JSON list of texts, like" in capsys.readouterr().err
