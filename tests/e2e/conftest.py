"""One node for all e2e tests, with the operator installed by its chart."""

import json
import os
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e_kit import FOLDER_VARIABLE, helm, images, network
from e2e_kit.models import HUB_REPO, HUB_TOKEN, Model
from e2e_kit.node import Node
from e2e_kit.post_mortem import post_mortem
from hub_look_alike import HubLookAlike

FIGURES = pytest.StashKey[dict[str, dict[str, Any]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full",
        action="store_true",
        help="repeat each disturbance 6 times (drains: 3) instead of twice; watch objectives",
    )
    parser.addoption("--figures", type=Path, help="a JSON file for what the tests measured")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[FIGURES] = {}


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What this test measured, by name: shown when all tests have ended, and kept in the file of --figures."""
    return request.config.stash[FIGURES].setdefault(request.node.name.removeprefix("test_"), {})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    found = {test: figures for test, figures in config.stash[FIGURES].items() if figures}
    terminalreporter.section("figures")
    for test, figures in found.items():
        words = ", ".join(f"{name} {value:g}" for name, value in figures.items() if isinstance(value, int | float))
        terminalreporter.line(f"{test}: {words}")
    for failed in terminalreporter.stats.get("failed", []):  # for who sees the end of a long log only
        terminalreporter.line(f"{failed.nodeid} failed: {failed.longrepr.reprcrash.message}")
    if file := config.getoption("--figures"):
        file.write_text(json.dumps(found, indent=1))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add to the report of a failed test what its namespaces hold, before they are deleted."""
    report = yield
    node = getattr(item, "funcargs", {}).get("operator")
    if report.when == "call" and report.failed and isinstance(node, Node):
        report.sections.append(("the namespaces of the test", post_mortem(node)))
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def node() -> Iterator[Node]:
    """A node with Flyball's images and the demo model's."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None:
        pytest.fail("e2e tests run on a machine that is prepared for them: start them with `make e2e`")
    with Node(Path(folder)) as node:
        for image in (images.RUNTIME, images.OPERATOR, images.MODEL):
            node.import_image(image)
        yield node


@pytest.fixture(scope="session")
def operator(node: Node) -> Node:
    """The node, once the chart has brought the operator."""
    helm.install(node)
    return node


@pytest.fixture
def takes_minutes(request: pytest.FixtureRequest) -> None:
    """Leave the test out, unless everything is asked for."""
    if not request.config.getoption("--full"):
        pytest.skip("takes minutes: make e2e E2E=--full")


@pytest.fixture
def namespace(node: Node) -> Iterator[str]:
    with node.namespace() as name:
        yield name


@pytest.fixture
def model(operator: Node, namespace: str) -> Model:
    """A model that serves."""
    model = Model(operator, namespace)
    model.apply()
    model.wait_ready()
    return model


def uninstall(node: Node) -> None:
    """Remove the operator and its namespace: the lease that is left there would hold the next one up."""
    helm.helm(node, "uninstall", helm.RELEASE, f"--namespace={helm.NAMESPACE}", "--ignore-not-found", "--wait")
    node.kubectl("delete", "namespace", helm.NAMESPACE, "--ignore-not-found", "--timeout=110s")


@pytest.fixture
def node_without_operator(node: Node) -> Iterator[Node]:
    """The node as a new user finds it. An operator that was there is there again afterwards."""
    was_there = helm.RELEASE in helm.helm(node, "list", "--short", f"--namespace={helm.NAMESPACE}").split()
    uninstall(node)
    yield node
    uninstall(node)
    if was_there:
        helm.install(node)


@pytest.fixture
def hub() -> Iterator[HubLookAlike]:
    """A hub that pods reach, with the demo model for those who have the token."""
    files = {path.name: path.read_bytes() for path in images.DEMO_MODEL.iterdir()}
    with HubLookAlike(network.NODE_IP, HUB_REPO, files, token=HUB_TOKEN) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()
