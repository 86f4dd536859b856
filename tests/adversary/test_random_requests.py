"""Random requests to every endpoint: nobody gets a 5xx that is not theirs to expect, and nothing breaks.

``--adversary-seed`` repeats a run; the seed is in each failure.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from adversary_kit.attacked import Attacked, attacked
from adversary_kit.exchange import exchange_all
from adversary_kit.generator import ADMIN, API, cases, mutated
from replicas import ADMIN_TOKEN

TOKEN = f"Authorization: Bearer {ADMIN_TOKEN}"
FAST, ALL = 250, 10_000


@pytest.fixture(scope="module")
def own_server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """A server of its own, for random limits are in force in it."""
    with attacked(model, tmp_path_factory.mktemp("random") / "server.log") as server:
        yield server


Run = Callable[[Callable[[], Counter[str]]], None]


@pytest.fixture
def run(own_server: Attacked, keep_pauses: Callable[..., None]) -> Iterator[Run]:
    """Runs something while another client streams, whose longest pause is reported."""

    def run(send: Callable[[], Counter[str]]) -> None:
        statuses: list[Counter[str]] = []
        seen = own_server.watched(lambda: statuses.append(send()))
        keep_pauses(seen, **statuses[0])

    with own_server.unharmed():
        yield run


@pytest.mark.parametrize("count", [FAST, pytest.param(ALL, marks=pytest.mark.slow)])
def test_requests_to_the_api(own_server: Attacked, run: Run, seed: int, count: int) -> None:
    run(lambda: exchange_all(own_server.port, cases(seed, count, API)))


@pytest.mark.parametrize("count", [FAST // 5, pytest.param(ALL // 5, marks=pytest.mark.slow)])
def test_requests_to_the_admin_port(own_server: Attacked, run: Run, seed: int, count: int) -> None:
    run(lambda: exchange_all(own_server.admin_port, cases(seed, count, ADMIN, TOKEN)))


@pytest.mark.parametrize("count", [FAST, pytest.param(ALL // 2, marks=pytest.mark.slow)])
def test_bytes_to_the_api(own_server: Attacked, run: Run, seed: int, count: int) -> None:
    run(lambda: exchange_all(own_server.port, mutated(seed, count, API), bare=True))


@pytest.mark.parametrize("count", [FAST // 5, pytest.param(ALL // 10, marks=pytest.mark.slow)])
def test_bytes_to_the_admin_port(own_server: Attacked, run: Run, seed: int, count: int) -> None:
    run(lambda: exchange_all(own_server.admin_port, mutated(seed, count, ADMIN, TOKEN), bare=True))
