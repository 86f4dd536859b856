"""Random prompts of a wanted length."""

import json
from contextlib import aclosing
from pathlib import Path
from typing import Protocol

import aiohttp
import msgspec
import numpy as np
from numpy.typing import NDArray

from flyball_clients.bench.recorded import MOONCAKE_BLOCK_TOKENS
from flyball_clients.bench.settings import BenchSettings
from flyball_clients.endpoint import Endpoint
from flyball_clients.errors import ConfigError
from flyball_clients.stream import stream_chunks

_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand part "
    "place case week company system program question work government number night point home water room mother area money "
    "story fact month lot right study book eye job word business issue side kind head house service friend father power "
    "hour game line end member law"
)
WORDS = _TEXT.split()
"""Common words, each one token in most vocabularies."""

Unit = NDArray[np.int64]


class Prompts(Protocol):
    """A source of prompts. A prompt is a sequence of units: words of text, or token ids."""

    def num_units(self, num_tokens: int) -> int:
        """Return the number of units, at least 1, that is closest to a prompt of ``num_tokens``, chat template included."""
        ...

    def draw(self, rng: np.random.Generator, count: int) -> Unit: ...

    def render(self, units: Unit) -> str | list[int]: ...


class WordPrompts:
    """Text of random words.

    Args:
        tokens_per_word: mean over WORDS, by the server's tokenizer.
        overhead: tokens that the server adds to every prompt (chat template, begin-of-sequence).
    """

    def __init__(self, tokens_per_word: float = 1.0, overhead: float = 0.0) -> None:
        self.tokens_per_word = tokens_per_word
        self.overhead = overhead

    def num_units(self, num_tokens: int) -> int:
        return max(1, round((num_tokens - self.overhead) / self.tokens_per_word))

    def draw(self, rng: np.random.Generator, count: int) -> Unit:
        return rng.integers(0, len(WORDS), count)

    def render(self, units: Unit) -> str:
        return " ".join([WORDS[index] for index in units.tolist()])


class TokenPrompts:
    """Random token ids without special tokens. The length is exact."""

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = np.asarray(token_ids, np.int64)

    def num_units(self, num_tokens: int) -> int:
        return num_tokens

    def draw(self, rng: np.random.Generator, count: int) -> Unit:
        return rng.choice(self._token_ids, count)

    def render(self, units: Unit) -> list[int]:
        return list(units.tolist())

    @classmethod
    def from_file(cls, path: str) -> "TokenPrompts":
        """Return the ids of a tokenizer.json, or of a folder that has one. Raises ConfigError if there is none."""
        file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        try:
            tokenizer = json.loads(file.read_bytes())
            special = {token["id"] for token in tokenizer.get("added_tokens", ())}
            vocab = tokenizer["model"]["vocab"]
            # byte-pair and word-piece vocabularies map text to id; unigram ones list [text, score] in order of id
            ids = set(vocab.values()) if isinstance(vocab, dict) else set(range(len(vocab)))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
            raise ConfigError(f"--tokenizer is {path}, where no tokenizer.json can be read: {exc!r}.") from exc
        return cls(sorted(ids - special))


def random_prompt(prompts: Prompts, rng: np.random.Generator, num_tokens: int) -> str | list[int]:
    return prompts.render(prompts.draw(rng, prompts.num_units(num_tokens)))


def shared_prefix_prompt(prompts: Prompts, hash_ids: tuple[int, ...], seed: int, num_tokens: int) -> str | list[int]:
    """Return a prompt whose 512-token blocks are made from ``hash_ids``: equal ids give equal text in all requests."""
    per_block = prompts.num_units(MOONCAKE_BLOCK_TOKENS)
    blocks = [prompts.draw(np.random.default_rng((seed, hash_id)), per_block) for hash_id in hash_ids]
    return prompts.render(np.concatenate(blocks)[: prompts.num_units(num_tokens)])


NUM_PROBE_WORDS = 24
"""Enough words for an average, and few enough for a server with a short context."""


async def make_prompts(
    session: aiohttp.ClientSession, endpoint: Endpoint, settings: BenchSettings, model: str
) -> tuple[Prompts, list[str]]:
    """Return the source of random prompts, and warnings about it."""
    if settings.tokenizer is not None:
        return TokenPrompts.from_file(settings.tokenizer), []
    if settings.dataset is not None:
        return WordPrompts(), []
    return await _measured_words(session, endpoint, settings, model)


async def _measured_words(
    session: aiohttp.ClientSession, endpoint: Endpoint, settings: BenchSettings, model: str
) -> tuple[Prompts, list[str]]:
    """Return words and their number of tokens, from the server's count for a few words and for the same words twice."""
    words = WORDS[:NUM_PROBE_WORDS]
    text = " ".join(words)
    once = await _count_tokens(session, endpoint, settings, model, text)
    twice = await _count_tokens(session, endpoint, settings, model, f"{text} {text}")
    if once is None or twice is None or twice <= once:
        return WordPrompts(), [
            "the server does not report usage.prompt_tokens, so input lengths are in words, not tokens."
        ]
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
