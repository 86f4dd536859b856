"""``prompt_logprobs`` as vLLM answers it, and ``echo`` as OpenAI has it, whole and streamed."""

from typing import Any

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from flyball_runtime.api.answers import ChatAnswer, CompletionAnswer
from runtime.api.support import chat, encode, is_a, sse_events
from runtime.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
KINDS = {CHAT: ChatAnswer, COMPLETIONS: CompletionAnswer}
PROMPT, TEXT = "Héllo you", " wörld"


@pytest.fixture
def engine(engine: FakeEngine, tokenizer: PreTrainedTokenizerFast) -> FakeEngine:
    engine.reply = lambda request: encode(tokenizer, TEXT)
    return engine


async def ask(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    if path in KINDS:
        is_a(KINDS[path], answer)
    return answer


async def test_prompt_logprobs(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    completion = (await ask(client, COMPLETIONS, {"prompt": [5, 6, 7], "prompt_logprobs": 2}))["choices"][0]
    first, second, third = completion["prompt_logprobs"]
    assert first is None
    assert [(name, one["logprob"], one["rank"]) for name, one in second.items()] == [("6", -0.5, 1), ("7", -1.5, 2)]
    assert [one["decoded_token"] for one in third.values()] == [
        (await ask(client, "/detokenize", {"tokens": [token_id]}))["prompt"] for token_id in (7, 8)
    ]
    assert completion["logprobs"] is None
    answer = await ask(client, CHAT, chat(prompt_logprobs=0))
    assert answer["prompt_logprobs"][0] is None and len(answer["prompt_logprobs"]) > 3
    assert all(len(one) == 1 for one in answer["prompt_logprobs"][1:])
    assert "prompt_logprobs" not in (await ask(client, CHAT, chat()))


@pytest.mark.parametrize("max_tokens", [0, 9])
@pytest.mark.parametrize("logprobs", [None, 1])
async def test_echo(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    tokenizer: PreTrainedTokenizerFast,
    max_tokens: int,
    logprobs: int | None,
) -> None:
    body = {"prompt": [PROMPT, "b"], "n": 2, "echo": True, "max_tokens": max_tokens, "logprobs": logprobs}
    answer = await ask(client, COMPLETIONS, body)
    ending = TEXT if max_tokens else ""
    choices = answer["choices"]
    assert [choice["text"] for choice in choices] == [PROMPT + ending] * 2 + ["b" + ending] * 2
    num_prompt, num_output = len(encode(tokenizer, PROMPT)), len(encode(tokenizer, ending))
    assert answer["usage"]["prompt_tokens"] == num_prompt + 1
    assert answer["usage"]["completion_tokens"] == 4 * num_output
    assert {choice["finish_reason"] for choice in choices} == {"stop" if max_tokens else "length"}
    assert "prompt_logprobs" not in choices[0]
    told = choices[0]["logprobs"]
    if logprobs is None:
        assert told is None
    else:
        tokens = told["tokens"]
        assert len(tokens) == num_prompt + num_output
        assert told["token_logprobs"] == [None, *[-0.5] * (len(tokens) - 1)]
        assert told["top_logprobs"][0] is None
        assert [max(top.values()) for top in told["top_logprobs"][1:]] == [-0.5] * (len(tokens) - 1)
        assert told["text_offset"] == [len("".join(tokens[:at])) for at in range(len(tokens))]
    await check_stream(client, body, choices)


async def check_stream(client: httpx.AsyncClient, body: dict[str, Any], choices: list[dict[str, Any]]) -> None:
    """Streamed, the same comes in pieces, the prompt's first."""
    response = await client.post(COMPLETIONS, json=body | {"stream": True})
    events = [event["choices"][0] for event in sse_events(response.text) if event != "[DONE]"]
    for choice in choices:
        own = [event for event in events if event["index"] == choice["index"]]
        assert own[0]["text"].startswith(choice["text"][0])
        assert "".join(event["text"] for event in own) == choice["text"]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        parts = [event["logprobs"] for event in own if event["logprobs"] is not None]
        if choice["logprobs"] is not None:
            assert {name: [one for part in parts for one in part[name]] for name in parts[0]} == choice["logprobs"]


async def test_an_echo_of_token_ids_is_their_text(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    text = (await ask(client, "/detokenize", {"tokens": [70, 71]}))["prompt"]
    answer = await ask(client, COMPLETIONS, {"prompt": [70, 71], "echo": True, "max_tokens": 0})
    assert answer["choices"][0]["text"] == text
    assert engine.requests[0].sampling.prompt_logprobs is None, "the prefix cache may be used"
