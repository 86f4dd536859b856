"""Servers that tests attack, one for as many of them as it survives, and the figures of their other clients."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from adversary_kit.attacked import Attacked, attacked
from adversary_kit.instance import Instance, instance
from adversary_kit.shared import Shared
from adversary_kit.witness import Seen
from checkpoints import make_checkpoint

PAUSES = "pauses"
"""The property of a test's report that holds its figures: reports reach the summary from pytest-xdist's workers too."""

DEFAULT_SEED = 1
NUM_LAYERS = 8
"""Enough that a step takes some milliseconds, and a server that streams does not keep two cores busy."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--adversary-seed", type=int, default=DEFAULT_SEED, help="of random requests, to repeat a run or to try others"
    )
    parser.addoption("--pauses", type=Path, help="a JSON file for the longest pauses that attacks caused")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    pauses = {
        report.nodeid.rpartition("::")[2].removeprefix("test_"): value
        for report in reports
        for name, value in report.user_properties
        if name == PAUSES
    }
    if not pauses:
        return
    terminalreporter.section("longest pauses of another client's stream")
    for test, figures in pauses.items():
        terminalreporter.line(f"{test}: " + ", ".join(f"{name} {value:g}" for name, value in figures.items()))
    if file := config.getoption("--pauses", default=None):
        file.write_text(json.dumps(pauses, indent=1))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return make_checkpoint(folder, "qwen2", max_position_embeddings=2048, num_hidden_layers=NUM_LAYERS)


@pytest.fixture(scope="session")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared[Attacked]]:
    shared = Shared(lambda: attacked(model, tmp_path_factory.mktemp("server") / "server.log"))
    yield shared
    shared.close()


@pytest.fixture
def server(servers: Shared[Attacked]) -> Iterator[Attacked]:
    """A server that must be unharmed when the test has ended."""
    with servers.unharmed() as server:
        yield server


@pytest.fixture(scope="module")
def instances() -> Iterator[Shared[Instance]]:
    """Instances of two replicas for the tests of a file, which may change the manifest."""
    shared = Shared(lambda: instance(replicas=2))
    yield shared
    shared.close()


@pytest.fixture
def running(instances: Shared[Instance]) -> Iterator[Instance]:
    """An instance that must be unharmed when the test has ended."""
    with instances.unharmed() as running:
        yield running


@pytest.fixture
def keep_pauses(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Keeps the figures of another client for the summary."""

    def keep(seen: Seen, **others: float) -> None:
        request.node.user_properties.append((PAUSES, seen.figures() | others))

    return keep


@pytest.fixture
def undisturbed(keep_pauses: Callable[..., None]) -> Callable[[Seen], None]:
    """Checks another client's longest pause."""

    def check(seen: Seen) -> None:
        keep_pauses(seen)
        assert seen.is_undisturbed, f"another client's stream paused for {1000 * seen.pause_s:.0f} ms: {seen.figures()}"

    return check


@pytest.fixture(scope="session")
def seed(request: pytest.FixtureRequest) -> int:
    """Of the random requests."""
    return int(request.config.getoption("--adversary-seed", default=DEFAULT_SEED))
