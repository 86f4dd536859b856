"""LoRA adapters over HTTP: chosen by the request's model, listed, loaded and unloaded; with a fake engine."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from transformers import PreTrainedTokenizerFast

from flyball_runtime.api import ApiSettings, MetricsCollector, create_app
from flyball_runtime.api.answers import ModelList
from flyball_runtime.api.keys import ApiKeys
from flyball_runtime.core.errors import AdapterNotFound, EngineDead
from flyball_runtime.engine.adapters import LoadAdapter, UnloadAdapter
from runtime.api.support import MODEL, asgi_client, chat, error_of, is_a, until
from runtime.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture
def adapters(tmp_path: Path) -> Path:
    """The folder of which adapters may be loaded, and one outside."""
    root = tmp_path / "adapters"
    for folder in (root / "sql", root / "chat", root / "broken", tmp_path / "outside"):
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text("{}")
    (root / "link").symlink_to(tmp_path / "outside")
    (root / "empty").mkdir()
    return root


@pytest.fixture
def app(engine: FakeEngine, tokenizer: PreTrainedTokenizerFast, metrics: MetricsCollector, adapters: Path) -> FastAPI:
    settings = ApiSettings(served_model_names=(MODEL, "alias"), lora_dir=adapters.resolve())
    return create_app(engine, tokenizer, settings, metrics)


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with asgi_client(app) as client:
        yield client


async def load(client: httpx.AsyncClient, name: str = "sql", path: str = "sql", **fields: Any) -> httpx.Response:
    return await client.post(LOAD, json={"lora_name": name, "lora_path": path} | fields)


async def unload(client: httpx.AsyncClient, name: str = "sql") -> httpx.Response:
    return await client.post(UNLOAD, json={"lora_name": name})


async def test_a_loaded_adapter_is_listed_used_and_unloaded(
    client: httpx.AsyncClient, engine: FakeEngine, adapters: Path
) -> None:
    answer = await load(client)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    assert engine.posted == [LoadAdapter(0, str(adapters / "sql"))]
    listed = (await client.get("/v1/models")).json()
    is_a(ModelList, listed)
    assert [(one["id"], one["parent"]) for one in listed["data"]] == [(MODEL, None), ("alias", None), ("sql", MODEL)]
    assert listed["data"][2]["root"] == str(adapters / "sql")
    assert (await client.get("/v1/models/sql")).json() == listed["data"][2]
    answer = await unload(client)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
    assert engine.posted[1:] == [UnloadAdapter(0)]
    assert len((await client.get("/v1/models")).json()["data"]) == 2
    error = error_of(await client.post("/v1/completions", json={"model": "sql", "prompt": "Hi"}))
    assert error["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat()),
        ("/v1/completions", {"prompt": ["Hi", "Ho"], "n": 2}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}),
        ("/v1/embeddings", {"input": ["Hi", "Ho"]}),
        ("/v1/score", {"text_1": "Hi", "text_2": "Ho"}),
    ],
)
async def test_every_endpoint_takes_the_name_as_a_model(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    await load(client, "other", "chat")
    await load(client)
    answer = await client.post(path, json=body | {"model": "sql"})
    assert (answer.status_code, answer.json()["model"]) == (200, "sql")
    assert {request.adapter for request in engine.requests} == {1}
    await client.post(path, json=body | {"model": MODEL})
    assert engine.requests[-1].adapter is None


async def test_texts_are_tokenized_for_an_adapter_too(client: httpx.AsyncClient) -> None:
    await load(client)
    assert (await client.post("/tokenize", json={"model": "sql", "prompt": "Hi"})).status_code == 200


async def test_an_adapter_in_use_is_unloaded_when_its_requests_have_ended(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    """Its name takes no more requests meanwhile, and may be that of another one."""
    await load(client)
    engine.reply = None
    running = asyncio.create_task(client.post("/v1/completions", json={"model": "sql", "prompt": "Hi"}))
    await until(lambda: len(engine.requests) == 1)
    assert (await unload(client)).status_code == 200
    assert UnloadAdapter(0) not in engine.posted
    assert (await client.post("/v1/completions", json={"model": "sql", "prompt": "Hi"})).status_code == 404
    assert (await load(client, path="chat")).status_code == 200
    engine.tokens([5])
    engine.finish()
    assert (await running).status_code == 200
    assert engine.posted[-1] == UnloadAdapter(0)
    assert engine.adapters.names == ("sql",)


async def test_loading_in_place_takes_the_place_of_another_one(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await load(client)
    error = error_of(await load(client, path="chat"))
    assert (error["code"], error["param"]) == ("invalid_adapter", "lora_name")
    assert (await load(client, path="broken", load_inplace=True)).status_code == 400
    assert engine.adapters.find("sql").number == 0, "the old one stays"
    assert (await load(client, path="chat", load_inplace=True)).status_code == 200
    assert engine.posted[-1] == UnloadAdapter(0)
    await client.post("/v1/completions", json={"model": "sql", "prompt": "Hi"})
    assert engine.requests[-1].adapter == 2


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"lora_path": "nowhere"}, 404, "where no adapter_config.json is"),
        ({"lora_path": "empty"}, 404, "where no adapter_config.json is"),
        ({"lora_path": "sql/adapter_config.json"}, 404, "where no adapter_config.json is"),
        ({"lora_path": "broken"}, 400, "it is broken"),
        ({"lora_path": "../outside"}, 400, "must be a folder in"),
        ({"lora_path": "link"}, 400, "must be a folder in"),
        ({"lora_path": "/etc"}, 400, "must be a folder in"),
        ({"lora_path": "a\0b"}, 400, "cannot be read"),
        ({"lora_path": "x" * 5000}, 400, "cannot be read"),
        ({"lora_path": 5}, 400, "lora_path"),
        ({"lora_name": ""}, 400, "1 to 256 characters"),
        ({"lora_name": "x" * 257}, 400, "1 to 256 characters"),
        ({"lora_name": "a\nb"}, 400, "printable"),
        ({"lora_name": MODEL}, 400, "is the served model"),
        ({"lora_name": None}, 400, "lora_name"),
        ({"load_inplace": "yes"}, 400, "load_inplace"),
        ({"is_3d_lora_weight": True}, 400, "is_3d_lora_weight"),
        ({"lora_rank": 5}, 400, "unknown field 'lora_rank'"),
    ],
)
async def test_what_cannot_be_loaded_is_refused(
    client: httpx.AsyncClient, engine: FakeEngine, body: dict[str, Any], status: int, says: str
) -> None:
    answer = await client.post(LOAD, json={"lora_name": "sql", "lora_path": "sql"} | body)
    assert answer.status_code == status
    message = error_of(answer)["message"]
    assert says in message and len(message) < 600
    assert engine.adapters.names == ()


async def test_there_are_only_so_many(client: httpx.AsyncClient) -> None:
    for name in ("a", "b", "c"):
        assert (await load(client, name)).status_code == 200
    assert "3 adapters are loaded" in error_of(await load(client, "d"))["message"]
    await unload(client, "a")
    assert (await load(client, "d")).status_code == 200


@pytest.mark.parametrize("body", [{"lora_name": "sql"}, {"lora_name": "sql", "lora_int_id": 5}, {}])
async def test_what_is_not_loaded_cannot_be_unloaded(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    answer = await client.post(UNLOAD, json=body)
    assert answer.status_code == (404 if list(body) == ["lora_name"] else 400)
    error_of(answer)


async def test_an_adapter_that_goes_before_its_request_is_submitted(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await load(client)
    engine.refuse = (0, AdapterNotFound("the adapter was unloaded.", param="model"))
    answer = await client.post("/v1/completions", json={"model": "sql", "prompt": "Hi"})
    assert (answer.status_code, error_of(answer)["code"]) == (404, "adapter_not_found")


async def test_loading_ends_with_the_engine(client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: Any) -> None:
    """What waits for its answer fails, and so does what comes before anybody else has noticed."""
    monkeypatch.setattr(engine.adapters, "_post", lambda message: None)
    loading = asyncio.create_task(load(client))
    await until(lambda: bool(engine.adapters._loading))
    engine.adapters.fail_all(EngineDead("it was killed"))
    for answer in (await loading, await load(client, "other")):
        assert (answer.status_code, error_of(answer)["code"]) == (500, "engine_dead")


async def test_both_are_closed_by_default(
    engine: FakeEngine, tokenizer: PreTrainedTokenizerFast, metrics: MetricsCollector
) -> None:
    app = create_app(engine, tokenizer, ApiSettings(served_model_names=(MODEL,)), metrics)
    async with asgi_client(app) as client:
        for answer in (await load(client), await unload(client)):
            assert (answer.status_code, error_of(answer)["code"]) == (403, "lora_updates_closed")
    assert engine.posted == []


async def test_both_need_a_key_where_requests_do(
    engine: FakeEngine, tokenizer: PreTrainedTokenizerFast, settings: ApiSettings, clock: Any
) -> None:
    keys = ApiKeys(None, "a-key-of-this-server", clock)
    app = create_app(engine, tokenizer, settings, MetricsCollector(model_name=MODEL, clock=clock), keys)
    async with asgi_client(app) as client:
        assert [(await load(client)).status_code, (await unload(client)).status_code] == [401, 401]


async def test_the_document_has_both(client: httpx.AsyncClient) -> None:
    paths = (await client.get("/openapi.json")).json()["paths"]
    assert {LOAD, UNLOAD} <= paths.keys()
    assert "403" in json.dumps(paths[LOAD])
