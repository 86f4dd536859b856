"""return_token_ids: the token ids of prompt and output, whole and streamed, where vLLM has them."""

import httpx
import pytest

from runtime.api.support import chat, sse_events
from runtime.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("stream", [False, True])
async def test_chat(client: httpx.AsyncClient, engine: FakeEngine, stream: bool) -> None:
    response = await client.post("/v1/chat/completions", json=chat(return_token_ids=True, stream=stream))
    (request,) = engine.requests
    events = [one for one in sse_events(response.text) if one != "[DONE]"] if stream else [response.json()]
    assert events[0]["prompt_token_ids"] == request.prompt_token_ids
    choices = [choice for event in events for choice in event["choices"]]
    assert [one for choice in choices for one in choice.get("token_ids", [])] == engine.reply(request)


@pytest.mark.parametrize("stream", [False, True])
async def test_completions_have_a_prompt_each(client: httpx.AsyncClient, engine: FakeEngine, stream: bool) -> None:
    body = {"prompt": [[5, 6], [7]], "return_token_ids": True, "stream": stream, "max_tokens": 50}
    response = await client.post("/v1/completions", json=body)
    events = [one for one in sse_events(response.text) if one != "[DONE]"] if stream else [response.json()]
    choices = [choice for event in events for choice in event["choices"]]
    for index, prompt in enumerate(body["prompt"]):
        own = [choice for choice in choices if choice["index"] == index]
        assert own[0]["prompt_token_ids"] == prompt
        assert [one for choice in own for one in choice.get("token_ids", [])] == engine.reply(engine.requests[index])


async def test_who_does_not_ask_gets_none(client: httpx.AsyncClient) -> None:
    for stream in (False, True):
        response = await client.post("/v1/chat/completions", json=chat(stream=stream))
        assert "token_ids" not in response.text
