from collections.abc import Iterator

import pytest

from fake_openai import FakeServer


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    fake.start()
    yield fake
    fake.stop()


@pytest.fixture
def dead_url() -> str:
    """An address at which nothing listens."""
    fake = FakeServer()
    fake.start()
    fake.stop()
    return fake.url
