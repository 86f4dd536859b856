"""Both generation endpoints without streaming: answers, fan-out, usage, what reaches the engine."""

import asyncio
import copy
from typing import Any

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from flyball_runtime.api import ApiSettings, MetricsCollector, create_app
from flyball_runtime.core.errors import QueueFull
from flyball_runtime.core.sampling_params import SamplingParams
from runtime.api.support import MODEL, asgi_client, chat, encode, error_of, until
from runtime.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio


async def test_chat_answer_has_openai_shape(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.num_cached_tokens = 3
    response = await client.post("/v1/chat/completions", json=chat())
    body = response.json()
    assert response.status_code == 200
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-") and body["model"] == MODEL
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello world", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    num_prompt, num_output = len(engine.requests[0].prompt_token_ids), len(engine.reply(engine.requests[0]))
    assert body["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


async def test_chat_prompt_is_the_rendered_template(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: PreTrainedTokenizerFast
) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts, "name": "ann"}]
    await client.post("/v1/chat/completions", json={"messages": messages, "chat_template_kwargs": {"mood": "glad"}})
    prompt = tokenizer.backend_tokenizer.decode(engine.requests[0].prompt_token_ids, skip_special_tokens=False)
    assert prompt == "<|system|>Be brief.<|end|><|user|>one\ntwo<|end|>(glad)<|assistant|>"


async def test_chat_continues_the_final_message(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: PreTrainedTokenizerFast
) -> None:
    messages = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "one, two"}]
    await client.post("/v1/chat/completions", json={"messages": messages, "continue_final_message": True})
    prompt = tokenizer.backend_tokenizer.decode(engine.requests[0].prompt_token_ids, skip_special_tokens=False)
    assert prompt == "<|user|>Count<|end|><|assistant|>one, two"


async def test_an_answer_can_be_sent_back_as_it_came(client: httpx.AsyncClient) -> None:
    answer = (await client.post("/v1/chat/completions", json=chat())).json()["choices"][0]["message"]
    extra = {"annotations": [], "audio": None, "function_call": None, "tool_calls": None}
    messages = [{"role": "user", "content": "Hi"}, answer | extra, {"role": "user", "content": "Again"}]
    response = await client.post("/v1/chat/completions", json={"messages": messages})
    assert response.status_code == 200, response.text


async def test_long_prompts_are_not_cut_and_take_the_thread(
    engine: FakeEngine, tokenizer: PreTrainedTokenizerFast, settings: ApiSettings, metrics: MetricsCollector
) -> None:
    cutting = copy.deepcopy(tokenizer)
    cutting.backend_tokenizer.enable_truncation(4)  # as some published tokenizer.json have
    text = "the " * settings.max_inline_bytes
    async with asgi_client(create_app(engine, cutting, settings, metrics)) as client:
        response = await client.post("/tokenize", json={"prompt": text})
    assert response.json()["count"] == len(encode(tokenizer, text)) > 4


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {},
            {"max_tokens": None, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None, "stop": ()},
        ),
        ({"max_tokens": 7, "temperature": 0}, {"max_tokens": 7, "temperature": 0.0}),
        ({"max_completion_tokens": 9, "top_p": 0.5}, {"max_tokens": 9, "top_p": 0.5}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 2**62, "min_p": 0.1}, {"top_k": 306, "min_p": 0.1}),
        ({"stop": "x", "seed": -5}, {"stop": ("x",), "seed": -5}),
        ({"stop": ["x", "yz"], "stop_token_ids": [5]}, {"stop": ("x", "yz"), "stop_token_ids": (5,)}),
        (
            {"ignore_eos": True, "temperature": None, "n": None, "stream": None},
            {"ignore_eos": True, "temperature": 1.0},
        ),
        ({"min_tokens": 2, "presence_penalty": -1}, {"min_tokens": 2, "presence_penalty": -1.0}),
        ({"frequency_penalty": 0.5, "repetition_penalty": 2}, {"frequency_penalty": 0.5, "repetition_penalty": 2.0}),
        ({"logit_bias": {"5": -100, "17": 0.5}}, {"logit_bias": {5: -100.0, 17: 0.5}}),
        ({"allowed_token_ids": [5, 6]}, {"allowed_token_ids": (5, 6)}),
        (
            dict.fromkeys(
                ("min_tokens", "presence_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words")
            ),
            {"changes_logits": False},
        ),
    ],
)
async def test_sampling_fields_reach_the_engine(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    response = await client.post("/v1/chat/completions", json=chat(**fields))
    assert response.status_code == 200, response.text
    sampling = engine.requests[0].sampling
    assert {name: getattr(sampling, name) for name in expected} == expected


async def test_bad_words_reach_the_engine_as_tokens(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: PreTrainedTokenizerFast
) -> None:
    assert (await client.post("/v1/completions", json={"prompt": "Hi", "bad_words": ["world"]})).status_code == 200
    words = engine.requests[0].sampling.bad_words_token_ids
    assert next(tokenizer.decode(list(word)) for word in words) == "world"


async def test_urgency_reaches_the_engine_with_every_choice_and_headers_come_before_the_body(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    fields = {"priority": 3, "ttft_deadline_ms": 250, "e2e_deadline_ms": 4000.5}
    headers = {"X-Priority": "-2", "X-TTFT-Deadline-Ms": "99.5", "x-e2e-deadline-ms": "8000"}
    assert (await client.post("/v1/chat/completions", json=chat(n=2, **fields))).status_code == 200
    assert (await client.post("/v1/completions", json={"prompt": "Hi"} | fields, headers=headers)).status_code == 200
    assert (await client.post("/v1/chat/completions", json=chat())).status_code == 200
    got = [(one.priority, one.ttft_deadline_ms, one.e2e_deadline_ms) for one in engine.requests]
    assert got == [(3, 250.0, 4000.5), (3, 250.0, 4000.5), (-2, 99.5, 8000.0), (0, None, None)]


@pytest.mark.parametrize(
    ("header", "value", "says"),
    [
        ("X-Priority", "high", "the header X-Priority is 'high'; it must be a whole number"),
        ("X-Priority", "1.5", "the header X-Priority is '1.5'"),
        ("X-Priority", str(2**40), "priority is 1099511627776; it must be from"),
        ("X-TTFT-Deadline-Ms", "-1", "ttft_deadline_ms is -1.0; it counts from the request's arrival"),
        ("X-TTFT-Deadline-Ms", "nan", "ttft_deadline_ms is nan"),
        ("X-E2E-Deadline-Ms", "", "the header X-E2E-Deadline-Ms is ''; it must be a number"),
    ],
)
async def test_a_header_that_says_no_urgency_is_refused_by_name(
    client: httpx.AsyncClient, engine: FakeEngine, header: str, value: str, says: str
) -> None:
    response = await client.post("/v1/chat/completions", json=chat(), headers={header: value})
    assert response.status_code == 400
    assert says in error_of(response)["message"]
    assert not engine.requests


@pytest.mark.parametrize("salt", [None, "x", "ä" * 1024])
async def test_the_cache_salt_reaches_the_engine_with_every_choice(
    client: httpx.AsyncClient, engine: FakeEngine, salt: str | None
) -> None:
    assert (await client.post("/v1/chat/completions", json=chat(cache_salt=salt, n=2))).status_code == 200
    assert (await client.post("/v1/completions", json={"prompt": "Hi", "cache_salt": salt})).status_code == 200
    assert [request.cache_salt for request in engine.requests] == [salt] * 3


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (0.6, 0.95, 306, 0.01, 1.1)),
        ({"temperature": None, "top_p": 0.5}, (0.6, 0.5, 306, 0.01, 1.1)),
        ({"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0}, (0.0, 1.0, 0, 0.0, 1.1)),
        ({"top_k": -1, "repetition_penalty": 1}, (0.6, 0.95, 0, 0.01, 1.0)),
    ],
)
async def test_a_request_wins_over_the_defaults_of_the_checkpoint(
    engine: FakeEngine,
    tokenizer: PreTrainedTokenizerFast,
    metrics: MetricsCollector,
    fields: dict[str, Any],
    expected: tuple[float, ...],
) -> None:
    defaults = SamplingParams(temperature=0.6, top_p=0.95, top_k=10**6, min_p=0.01, repetition_penalty=1.1)
    settings = ApiSettings(served_model_names=(MODEL,), default_sampling=defaults)
    async with asgi_client(create_app(engine, tokenizer, settings, metrics)) as client:
        assert (await client.post("/v1/chat/completions", json=chat(**fields))).status_code == 200
    sampling = engine.requests[0].sampling
    fields_of = (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.repetition_penalty)
    assert fields_of == expected


@pytest.mark.parametrize(("fields", "max_tokens"), [({}, 16), ({"max_tokens": None}, None), ({"max_tokens": 3}, 3)])
async def test_completion_max_tokens(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], max_tokens: int | None
) -> None:
    await client.post("/v1/completions", json={"prompt": "Hi"} | fields)
    assert engine.requests[0].sampling.max_tokens == max_tokens


async def test_completion_stops_at_max_tokens_with_length(client: httpx.AsyncClient) -> None:
    body = (await client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 1})).json()
    assert body["object"] == "text_completion" and body["id"].startswith("cmpl-")
    assert body["choices"][0]["finish_reason"] == "length" and body["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("the fox", ["the fox"]),
        (["the fox", "Hello"], ["the fox", "Hello"]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
async def test_every_kind_of_prompt(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: PreTrainedTokenizerFast, prompt: Any, expected: list[Any]
) -> None:
    response = await client.post("/v1/completions", json={"prompt": prompt})
    assert response.status_code == 200, response.text
    ids = [encode(tokenizer, one) if isinstance(one, str) else one for one in expected]
    assert [request.prompt_token_ids for request in engine.requests] == ids


async def test_choices_of_several_prompts_are_in_order_and_seeded_apart(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: PreTrainedTokenizerFast
) -> None:
    engine.reply = lambda request: encode(tokenizer, f"{request.prompt_token_ids[0]}/{request.sampling.seed}")
    engine.num_cached_tokens = 1
    response = await client.post(
        "/v1/completions", json={"prompt": [[5, 5], [6]], "n": 2, "seed": 2**63 - 1, "max_tokens": 99}
    )
    body = response.json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    last, wrapped = 2**63 - 1, -(2**63)
    assert [choice["text"] for choice in body["choices"]] == [f"5/{last}", f"5/{wrapped}", f"6/{last}", f"6/{wrapped}"]
    assert body["usage"]["prompt_tokens"] == 3, "each prompt counts once"
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert len({request.request_id for request in engine.requests}) == 4
    first, second, third, fourth = (request.fork_group for request in engine.requests)
    assert (first, third) == (second, fourth) and first != third, "choices of a prompt share its blocks"


async def test_refused_choice_aborts_the_ones_before_it(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.reply, engine.refuse = None, (2, QueueFull(2, 7))
    response = await client.post("/v1/completions", json={"prompt": "Hi", "n": 3})
    assert (response.status_code, response.headers["retry-after"]) == (429, "7")
    assert error_of(response)["type"] == "rate_limit_error"
    assert engine.aborted == [request.request_id for request in engine.requests] and engine.num_unfinished == 0


async def test_own_stop_token_is_no_part_of_the_text(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: PreTrainedTokenizerFast
) -> None:
    ids = encode(tokenizer, "Hello world")
    response = await client.post("/v1/completions", json={"prompt": "Hi", "stop_token_ids": [ids[-1]]})
    body = response.json()
    assert body["choices"][0]["text"] == tokenizer.backend_tokenizer.decode(ids[:-1])
    assert body["usage"]["completion_tokens"] == len(ids)


async def test_stop_string_cuts_aborts_and_counts(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: PreTrainedTokenizerFast
) -> None:
    ids = encode(tokenizer, "one two three")
    engine.reply = lambda request: ids
    response = await client.post("/v1/chat/completions", json=chat(stop=["wo t", "never"], max_tokens=64))
    choice = response.json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("one t", "stop")
    used = response.json()["usage"]["completion_tokens"]
    decoded = tokenizer.backend_tokenizer.decode
    assert "wo t" in decoded(ids[:used]) and "wo t" not in decoded(ids[: used - 1])


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_ends_at_a_stop_string_does_not_wait_for_the_engine(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    stream: bool,
) -> None:
    """The engine may be in a long step and acknowledge the abort after it; here it never does."""
    aborted: list[str] = []
    monkeypatch.setattr(engine, "abort", aborted.append)
    monkeypatch.setattr(engine, "finish", lambda *_: None)
    engine.num_cached_tokens = 2
    engine.reply = lambda request: encode(tokenizer, "one two three")
    body = chat(stop="wo t", stream=stream, stream_options={"include_usage": True} if stream else None)
    async with asyncio.timeout(10):
        response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    assert '"finish_reason":"stop"' in response.text and '"cached_tokens":2' in response.text
    assert aborted == [engine.requests[0].request_id]
    assert 'flyball_requests_total{outcome="stop"} 1.0' in (await client.get("/metrics")).text


async def test_one_failed_choice_fails_the_request_and_aborts_the_rest(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.reply = None
    pending = asyncio.create_task(client.post("/v1/completions", json={"prompt": ["a", "b"]}))
    await until(lambda: len(engine.requests) == 2)
    engine.fail(507, "out_of_blocks", "no KV block is free", engine.requests[1].request_id)
    response = await pending
    assert response.status_code == 507 and error_of(response)["code"] == "out_of_blocks"
    assert engine.aborted == [engine.requests[0].request_id]


async def test_an_abort_by_the_engine_is_an_error_not_an_answer(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.reply = None
    pending = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a"}))
    await until(lambda: bool(engine.requests))
    engine.tokens([40])
    engine.finish("abort")
    response = await pending
    assert response.status_code == 500 and error_of(response)["code"] == "aborted"


async def test_models(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()
    assert [card["id"] for card in listed["data"]] == [MODEL, "alias"]
    assert listed["data"][0]["max_model_len"] == 1024
    assert (await client.get("/v1/models/alias")).json()["id"] == "alias"
    assert error_of(await client.get("/v1/models/org/none"))["code"] == "model_not_found"


async def test_alias_is_answered_by_its_name(client: httpx.AsyncClient) -> None:
    assert (await client.post("/v1/completions", json={"prompt": "a", "model": "alias"})).json()["model"] == "alias"


async def test_tokenize_and_back(client: httpx.AsyncClient, tokenizer: PreTrainedTokenizerFast) -> None:
    text = "Hello 😀 there<|end|>"
    body = (await client.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
    assert body["tokens"] == encode(tokenizer, text) and body["count"] == len(body["tokens"])
    assert body["max_model_len"] == 1024 and body["token_strs"][-1] == "<|end|>"
    assert (await client.post("/detokenize", json={"tokens": body["tokens"]})).json() == {"prompt": text}


async def test_tokenize_chat(client: httpx.AsyncClient, tokenizer: PreTrainedTokenizerFast) -> None:
    body = (await client.post("/tokenize", json=chat("Hi", add_generation_prompt=False))).json()
    assert tokenizer.backend_tokenizer.decode(body["tokens"], skip_special_tokens=False) == "<|user|>Hi<|end|>"
    assert body["token_strs"] is None
