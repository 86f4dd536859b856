"""A byte-level tokenizer built on the spot, the app around a fake engine, and httpx clients into both apps."""

from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from flyball_runtime.api import ApiSettings, MetricsCollector, create_admin_app, create_app
from flyball_runtime.core.clock import FakeClock
from runtime.api.chats import Chats
from runtime.api.support import ADMIN_TOKEN, MODEL, asgi_client, encode
from runtime.fake_engine import FakeEngine

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'user' and not message.content %}{{ raise_exception('a user must say something') }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}{% if not (loop.last and continue_final_message) %}<|end|>{% endif %}"
    "{% endfor %}"
    "{% if mood %}({{ mood }}){% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with few merges, so that most non-ASCII characters span several tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=special,
        show_progress=False,
    )
    backend.train_from_iterator(["the quick brown fox jumps over the lazy dog. Hello world, hello there."] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(1000.0)


@pytest.fixture
def metrics(clock: FakeClock) -> MetricsCollector:
    return MetricsCollector(model_name=MODEL, clock=clock)


@pytest.fixture
def settings() -> ApiSettings:
    return ApiSettings(served_model_names=(MODEL, "alias"), max_body_bytes=64 * 1024)


@pytest.fixture
def engine(tokenizer: PreTrainedTokenizerFast) -> FakeEngine:
    """Answers every request with "Hello world" until the test takes its ``reply`` away."""
    hello = encode(tokenizer, "Hello world")
    return FakeEngine(len(tokenizer), lambda request: hello)


@pytest.fixture
def app(
    engine: FakeEngine, tokenizer: PreTrainedTokenizerFast, settings: ApiSettings, metrics: MetricsCollector
) -> FastAPI:
    return create_app(engine, tokenizer, settings, metrics)


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with asgi_client(app) as client:
        yield client


@pytest.fixture
async def admin(engine: FakeEngine, metrics: MetricsCollector) -> AsyncIterator[httpx.AsyncClient]:
    async with asgi_client(create_admin_app(engine, metrics, ADMIN_TOKEN)) as client:
        client.headers["Authorization"] = f"Bearer {ADMIN_TOKEN}"
        yield client


@pytest.fixture
async def qwen(metrics: MetricsCollector) -> AsyncIterator[Chats]:
    chats = Chats("qwen", metrics)
    async with chats.client:
        yield chats
