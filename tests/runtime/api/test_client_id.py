"""Which requests count as one client's, and whom the server believes about it."""

from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from transformers import PreTrainedTokenizerFast

from flyball_runtime.api import ApiSettings, MetricsCollector, create_app
from flyball_runtime.core.errors import ConfigError
from runtime.api.support import MODEL, served
from runtime.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

COMPLETION = {"prompt": [5], "max_tokens": 1}


async def client_names(app: FastAPI, engine: FakeEngine, *sent: tuple[str, dict[str, str]]) -> list[str]:
    """Return the engine's names for requests from addresses with headers."""
    engine.requests.clear()
    for host, headers in sent:
        transport = httpx.ASGITransport(app, client=(host, 1234))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as client:
            assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200
    return [request.client for request in engine.requests]


def key(value: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {value}"}


async def test_a_client_is_its_key_wherever_it_is(app: FastAPI, engine: FakeEngine) -> None:
    one, same, other = await client_names(
        app, engine, ("192.0.2.1", key("k1")), ("192.0.2.2", key("k1")), ("192.0.2.1", key("k2"))
    )
    assert one == same != other


async def test_without_a_key_it_is_its_address(app: FastAPI, engine: FakeEngine) -> None:
    one, same, other, keyed = await client_names(
        app,
        engine,
        ("192.0.2.1", {}),
        ("192.0.2.1", {"Authorization": " "}),
        ("192.0.2.2", {}),
        ("192.0.2.3", {"Authorization": "192.0.2.1"}),
    )
    assert one == same
    assert len({one, other, keyed}) == 3, "a key that reads like an address is a key"


async def test_the_addresses_of_one_ipv6_network_are_one_client(app: FastAPI, engine: FakeEngine) -> None:
    one, same, other, four, mapped, no_address = await client_names(
        app,
        engine,
        ("2001:db8:0:1::1", {}),
        ("2001:db8:0:1:ffff::9", {}),
        ("2001:db8:0:2::1", {}),
        ("192.0.2.1", {}),
        ("::ffff:192.0.2.1", {}),
        ("testclient", {}),
    )
    assert one == same
    assert four == mapped
    assert len({one, other, four, no_address}) == 4


async def test_a_name_does_not_show_whose_it_is(
    app: FastAPI, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("DEBUG"):
        names = await client_names(app, engine, ("192.0.2.1", key("sk-secret")), ("192.0.2.1", {}))
    for name in names:
        assert "sk-secret" not in name and "192.0.2.1" not in name
        assert name not in caplog.text
    assert "sk-secret" not in caplog.text


async def test_every_choice_is_its_clients(app: FastAPI, engine: FakeEngine) -> None:
    transport = httpx.ASGITransport(app, client=("192.0.2.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        await client.post("/v1/completions", json=COMPLETION | {"n": 3})
        await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}]})
    assert len(engine.requests) == 4
    assert len({request.client for request in engine.requests}) == 1


@pytest.mark.parametrize(
    ("trusted", "believed"),
    [({}, True), ({"forwarded_allow_ips": "127.0.0.0/8"}, True), ({"forwarded_allow_ips": "192.0.2.0/24"}, False)],
)
async def test_only_a_trusted_proxy_names_the_client(
    engine: FakeEngine,
    tokenizer: PreTrainedTokenizerFast,
    metrics: MetricsCollector,
    trusted: dict[str, Any],
    believed: bool,
) -> None:
    settings = ApiSettings(served_model_names=(MODEL,), **trusted)
    app = create_app(engine, tokenizer, settings, metrics)
    async with served(app, **settings.uvicorn_options()) as (host, port), httpx.AsyncClient() as client:
        for address in ("198.51.100.1", "198.51.100.2", "1.1.1.1, 198.51.100.1"):
            headers = {"X-Forwarded-For": address}
            await client.post(f"http://{host}:{port}/v1/completions", json=COMPLETION, headers=headers)
    one, other, forged = (request.client for request in engine.requests)
    assert (one != other) == believed
    assert one == forged, "what the proxy added last counts"


@pytest.mark.parametrize("listed", ["localhost", "", "10.0.0.1,,::1", "10.0.0.1/8", "10.0.0.0/33"])
def test_a_proxy_that_is_no_address_stops_start_up(listed: str) -> None:
    with pytest.raises(ConfigError, match="--forwarded-allow-ips"):
        ApiSettings(served_model_names=(MODEL,), forwarded_allow_ips=listed)
