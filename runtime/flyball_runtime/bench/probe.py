"""How long a server's tokens are, found out before it is measured."""

from contextlib import aclosing

import aiohttp
import msgspec

from flyball_runtime.bench.prompts import WORDS, Prompts, TokenPrompts, WordPrompts
from flyball_runtime.bench.settings import BenchSettings
from flyball_runtime.client.endpoint import Endpoint
from flyball_runtime.client.stream import stream_chunks

NUM_PROBE_WORDS = 24
"""Enough to average over, and few enough for a server with a short context."""


async def make_prompts(
    session: aiohttp.ClientSession, endpoint: Endpoint, settings: BenchSettings, model: str
) -> tuple[Prompts, list[str]]:
    """The source of random prompts, and warnings about it."""
    if settings.tokenizer is not None:
        return TokenPrompts.from_file(settings.tokenizer), []
    if settings.dataset is not None:
        return WordPrompts(), []
    return await _measured_words(session, endpoint, settings, model)


async def _measured_words(
    session: aiohttp.ClientSession, endpoint: Endpoint, settings: BenchSettings, model: str
) -> tuple[Prompts, list[str]]:
    """Words scaled to the server's tokenizer, by its own count of a few words once and of the same words twice."""
    words = WORDS[:NUM_PROBE_WORDS]
    text = " ".join(words)
    once = await _count_tokens(session, endpoint, settings, model, text)
    twice = await _count_tokens(session, endpoint, settings, model, f"{text} {text}")
    if once is None or twice is None or twice <= once:
        return WordPrompts(), ["the server reports no usable usage.prompt_tokens: input lengths are words, not tokens."]
    return WordPrompts(tokens_per_word=(twice - once) / len(words), overhead=max(0, 2 * once - twice)), []


async def _count_tokens(
    session: aiohttp.ClientSession, endpoint: Endpoint, settings: BenchSettings, model: str, text: str
) -> int | None:
    prompt = {"messages": [{"role": "user", "content": text}]} if settings.endpoint == "chat" else {"prompt": text}
    options = {"max_tokens": 1, "stream": True, "stream_options": {"include_usage": True}}
    body = msgspec.json.encode({"model": model, **prompt, **options})
    count = None
    async with aclosing(stream_chunks(session, endpoint, settings.endpoint, body)) as chunks:
        async for chunk in chunks:
            count = chunk.usage.prompt_tokens if chunk.usage is not None else count
    return count
