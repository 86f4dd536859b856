"""Long inputs are refused by their size before they are looked at, or handled outside the event loop."""

import asyncio
import copy
import threading
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from flyball_runtime.api import ApiSettings, MetricsCollector, create_app, generation
from flyball_runtime.api import server as server_module
from flyball_runtime.api.app import MAX_TOKENIZED
from flyball_runtime.api.text import MAX_WHOLE_CHARS, TextCodec
from flyball_runtime.core.errors import QueueFull
from flyball_runtime.core.request import Request, RequestEvent
from runtime.api.support import MODEL, asgi_client, chat, error_of
from runtime.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MAX_MODEL_LEN = 1024


@pytest.fixture
async def roomy(
    engine: FakeEngine, tokenizer: PreTrainedTokenizerFast, metrics: MetricsCollector
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an app that takes bodies of 4 MiB."""
    async with asgi_client(create_app(engine, tokenizer, ApiSettings(served_model_names=(MODEL,)), metrics)) as client:
        yield client


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "a" * 4_000_000}),
        (COMPLETIONS, {"prompt": ["a", "b" * 1_000_000]}),
        (COMPLETIONS, {"prompt": ["a" * 15_000] * 256}),
        (CHAT, chat("a" * 4_000_000)),
        (CHAT, chat([{"type": "text", "text": "a" * 4_000_000}])),
    ],
    ids=["text", "one of two", "many", "chat", "part"],
)
async def test_a_text_that_is_certainly_too_long_is_never_tokenized(
    roomy: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, path: str, body: Any
) -> None:
    monkeypatch.setattr(TextCodec, "_encode", lambda *_: pytest.fail("it was tokenized"))
    response = await roomy.post(path, json=body)
    error = error_of(response)
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "at least" in error["message"] and str(MAX_MODEL_LEN) in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        (COMPLETIONS, {"prompt": ["a"] * 257}, "invalid_request"),
        (COMPLETIONS, {"prompt": [5] * 1_000_000}, "context_length_exceeded"),
        (COMPLETIONS, {"prompt": [[5], [5] * 1_000_000]}, "context_length_exceeded"),
        (CHAT, {"messages": [{}] * 2049}, "invalid_request"),
        ("/tokenize", {"messages": [{}] * 2049}, "invalid_request"),
        ("/detokenize", {"tokens": [5] * 1_000_000}, "invalid_request"),
    ],
    ids=["prompts", "ids", "lists of ids", "messages", "tokenize", "detokenize"],
)
async def test_too_many_values_are_refused_before_they_are_converted(
    roomy: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, path: str, body: Any, code: str
) -> None:
    monkeypatch.setattr(server_module.msgspec, "convert", lambda *_: pytest.fail("it was converted"))
    response = await roomy.post(path, json=body)
    assert (response.status_code, error_of(response)["code"]) == (400, code)


@pytest.mark.parametrize(
    ("path", "body"),
    [(COMPLETIONS, {"prompt": "a"}), (COMPLETIONS, {"prompt": "a" * 5000}), (CHAT, chat("a" * 5000)), (CHAT, {"x": 1})],
)
async def test_nothing_is_done_for_a_body_that_finds_the_queue_full(
    roomy: httpx.AsyncClient,
    engine: FakeEngine,
    metrics: MetricsCollector,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: Any,
) -> None:
    monkeypatch.setattr(server_module, "parse_object", lambda _: pytest.fail("it was decoded"))
    engine.full = QueueFull(10, 3)
    response = await roomy.post(path, json=body)
    assert (response.status_code, error_of(response)["code"], response.headers["retry-after"]) == (
        429,
        "queue_full",
        "3",
    )
    assert 'flyball_requests_rejected_total{reason="queue_full"} 1.0' in metrics.exposition("")[0].decode()


async def test_texts_are_tokenized_for_their_own_sake_while_the_queue_is_full(
    roomy: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.full = QueueFull(10, 3)
    assert (await roomy.post("/tokenize", json={"prompt": "a" * 5000})).status_code == 200


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads that decoded, rendered, tokenized, or checked and hashed a prompt, in order."""
    names: list[str] = []

    def noted(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any) -> Any:
            names.append(threading.current_thread().name)
            return original(*args)

        monkeypatch.setattr(owner, name, call)

    noted(server_module, "parse_object")
    noted(server_module.msgspec, "convert")
    noted(TextCodec, "_encode")
    noted(TextCodec, "render")
    noted(TextCodec, "decode")
    noted(FakeEngine, "prepare")
    return names


@pytest.mark.parametrize(
    ("path", "body", "lane"),
    [
        (COMPLETIONS, {"prompt": "a" * 100}, "MainThread"),
        (COMPLETIONS, {"prompt": "a" * 5000}, "long-bodies"),
        (COMPLETIONS, {"prompt": ["a" * 100] * 100}, "long-bodies"),
        (COMPLETIONS, {"prompt": ["a" * 4000] * 256}, "huge-bodies"),
        (COMPLETIONS, {"prompt": [200] * 1020, "max_tokens": 1}, "long-bodies"),
        (COMPLETIONS, {"prompt": [200] * 1_000_000}, "huge-bodies"),
        (COMPLETIONS, {"prompt": "a", "seed": [1] * 1_000_000}, "huge-bodies"),
        (CHAT, chat("a" * 100), "MainThread"),
        (CHAT, chat("a" * 5000), "long-bodies"),
        (CHAT, {"messages": [{"role": "system", "content": ""}] * 300}, "long-bodies"),
        (CHAT, chat(chat_template_kwargs={"documents": [["a"] * 100] * 100}), "long-bodies"),
        (CHAT, chat(chat_template_kwargs={"documents": "a" * 1_000_000}), "huge-bodies"),
        ("/tokenize", {"prompt": "a" * 5000}, "long-bodies"),
        ("/detokenize", {"tokens": [200] * 5000}, "long-bodies"),
    ],
)
async def test_all_work_on_a_long_body_runs_in_a_thread(
    roomy: httpx.AsyncClient, threads: list[str], path: str, body: Any, lane: str
) -> None:
    await roomy.post(path, json=body)
    assert threads and all(name.startswith(lane) for name in threads)


async def test_long_texts_are_tokenized_without_pythons_lock(
    roomy: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlocked: list[int] = []
    original = TextCodec._encode_unlocked

    def encode(self: TextCodec, text: str, *args: Any) -> Any:
        unlocked.append(len(text))
        return original(self, text, *args)

    monkeypatch.setattr(TextCodec, "_encode_unlocked", encode)
    await roomy.post("/tokenize", json={"prompt": "a" * 100})
    assert unlocked == [], "the way to another thread costs more than a short text"
    await roomy.post("/tokenize", json={"prompt": "a" * 5000})
    assert unlocked == [5000]


async def test_huge_texts_are_counted_in_pieces_and_given_up_early(
    roomy: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TextCodec, "_check_length", lambda *_: None)  # as with a tokenizer that has no bound
    pieces: list[int] = []
    original = TextCodec._encode_unlocked
    monkeypatch.setattr(
        TextCodec, "_encode_unlocked", lambda self, text, adds: pieces.append(len(text)) or original(self, text, adds)
    )
    response = await roomy.post(COMPLETIONS, json={"prompt": "a b " * 500_000})
    assert (response.status_code, error_of(response)["code"]) == (400, "context_length_exceeded")
    assert max(pieces) < MAX_WHOLE_CHARS and sum(pieces) < 500_000


async def test_tokenize_counts_past_the_models_length_up_to_a_bound(roomy: httpx.AsyncClient) -> None:
    response = await roomy.post("/tokenize", json={"prompt": "a " * 20_000, "return_token_strs": True})
    assert response.json()["count"] == len(response.json()["token_strs"]) > MAX_MODEL_LEN
    for body in ({"prompt": "a b " * 100_000}, {"messages": [{"role": "user", "content": "a b " * 100_000}]}):
        error = error_of(await roomy.post("/tokenize", json=body))
        assert error["param"] in body and f"more than {MAX_TOKENIZED} tokens" in error["message"]


async def test_detokenize_of_many_tokens(roomy: httpx.AsyncClient) -> None:
    assert (
        len((await roomy.post("/detokenize", json={"tokens": [5] * MAX_TOKENIZED})).json()["prompt"]) >= MAX_TOKENIZED
    )


async def test_many_choices_of_a_long_prompt_are_submitted_in_several_turns(
    roomy: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def tick() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    turn, turns = 0, []
    original = engine.submit
    monkeypatch.setattr(generation, "MAX_TOKENS_AT_ONCE", 1500)
    monkeypatch.setattr(engine, "submit", lambda request: turns.append(turn) or original(request))
    ticking = asyncio.create_task(tick())
    response = await roomy.post(COMPLETIONS, json={"prompt": [5] * 1000, "n": 20})
    ticking.cancel()
    assert response.status_code == 200 and len(turns) == 20
    assert max(Counter(turns).values()) == 2


async def test_a_request_that_is_cancelled_while_it_is_submitted_leaves_nothing_behind(
    roomy: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def submit(request: Request) -> AsyncIterator[RequestEvent]:
        if len(engine.requests) == 3:
            posting.cancel()
        return original(request)

    engine.reply, original = None, engine.submit
    monkeypatch.setattr(generation, "MAX_TOKENS_AT_ONCE", 1)
    monkeypatch.setattr(engine, "submit", submit)
    posting = asyncio.create_task(roomy.post(COMPLETIONS, json={"prompt": "a b", "n": 20}))
    with pytest.raises(asyncio.CancelledError):
        await posting
    assert 4 <= len(engine.requests) < 20 and engine.num_unfinished == 0


async def test_a_template_that_never_ends_is_the_requests_fault(
    engine: FakeEngine, tokenizer: PreTrainedTokenizerFast, settings: ApiSettings, metrics: MetricsCollector
) -> None:
    endless = copy.deepcopy(tokenizer)
    endless.chat_template = "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}"
    async with asgi_client(create_app(engine, endless, settings, metrics)) as client:
        response = await client.post(CHAT, json=chat())
    assert response.status_code == 400 and "recursion" in error_of(response)["message"]
