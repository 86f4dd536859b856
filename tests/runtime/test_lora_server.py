"""LoRA adapters on a running server: at the start, loaded and unloaded while others stream, and refused at the start."""

import concurrent.futures
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from adapters import make_adapter, merged
from checkpoints import make_checkpoint
from engines import Reference, random_prompts
from replicas import Replica, replica

pytestmark = pytest.mark.slow

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PROMPTS = random_prompts([9, 40])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    base = make_checkpoint(folder / "base", "qwen3")
    for index, name in enumerate(("first", "second")):
        make_adapter(folder / "adapters" / name, base, seed=index)
    make_adapter(folder / "adapters" / "large", base, rank=64)
    make_adapter(folder / "adapters" / "foreign", make_checkpoint(folder / "wider", "qwen3", hidden_size=96))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Replica]:
    first = json.dumps({"name": "first", "path": str(folder / "adapters" / "first"), "base_model_name": "parent"})
    flags = ["--enable-lora", "--lora-modules", first, "--max-loras", "2", "--async-scheduling"]
    flags += ["--runtime-lora-dir", str(folder / "adapters")]
    with replica(folder / "base", *flags, log=folder / "server.log") as running:
        yield running


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[list[int]]]:
    models = {"test": folder / "base"}
    for name in ("first", "second"):
        models[name] = merged(folder / f"merged {name}", folder / "base", folder / "adapters" / name)
    return {name: Reference(path).generate(PROMPTS) for name, path in models.items()}


def outputs(server: Replica, model: str) -> list[list[int]]:
    body = {"model": model, "prompt": PROMPTS, "max_tokens": 24, "temperature": 0, "return_token_ids": True}
    answer = server.client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return [choice["token_ids"] for choice in answer.json()["choices"]]


def test_adapters_come_and_go_while_others_stream(server: Replica, expected: dict[str, list[list[int]]]) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    assert [(one.id, one.parent) for one in client.models.list()] == [("test", None), ("first", "parent")]  # type: ignore[attr-defined]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        streams = [pool.submit(outputs, server, name) for name in ("test", "first") for _ in range(8)]
        for _ in range(3):
            assert server.client.post(LOAD, json={"lora_name": "second", "lora_path": "second"}).status_code == 200
            assert outputs(server, "second") == expected["second"]
            assert server.client.post(UNLOAD, json={"lora_name": "second"}).status_code == 200
            assert server.client.post("/v1/completions", json={"model": "second", "prompt": "x"}).status_code == 404
        results = [stream.result() for stream in streams]
    assert results == [expected["test"]] * 8 + [expected["first"]] * 8


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("large", "r is 64, above --max-lora-rank 16"),
        ("foreign", "Check that the adapter was made for this model."),
    ],
)
def test_one_that_is_refused_changes_nothing(
    server: Replica, expected: dict[str, list[list[int]]], path: str, message: str
) -> None:
    """One of too high a rank, and one of another base model."""
    answer = server.client.post(LOAD, json={"lora_name": "bad", "lora_path": path})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_adapter", "lora_path")
    assert message in error["message"]
    assert len(server.client.get("/v1/models").json()["data"]) == 2
    assert outputs(server, "first") == expected["first"]


def test_an_adapter_is_unloaded_under_a_running_stream(server: Replica) -> None:
    """The stream goes on to its end; the name can be loaded again at once."""
    assert server.client.post(LOAD, json={"lora_name": "second", "lora_path": "second"}).status_code == 200
    body: dict[str, Any] = {"model": "second", "prompt": [5], "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert server.client.post(UNLOAD, json={"lora_name": "second"}).status_code == 200
        assert server.client.post(LOAD, json={"lora_name": "second", "lora_path": "first"}).status_code == 200
        assert list(lines)[-2] == "data: [DONE]"
    assert outputs(server, "second") == outputs(server, "first")
    assert server.client.post(UNLOAD, json={"lora_name": "second"}).status_code == 200
    assert server.client.get("/readyz").status_code == 200


def test_a_bad_adapter_ends_the_start(folder: Path, tmp_path: Path) -> None:
    server = Replica(folder / "base", "--enable-lora", "--lora-modules", "a=nowhere", log=tmp_path / "server.log")
    try:
        assert server.process.wait(60) == 2
        assert "cannot read nowhere/adapter_config.json" in server.log.read_text().splitlines()[-1]
    finally:
        server.close()
