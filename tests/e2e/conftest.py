"""One node for all e2e tests, with the operator installed by its chart."""

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e_kit import FOLDER_VARIABLE, helm, images
from e2e_kit.node import Node


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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full", action="store_true", help="repeat each disturbance 20 times (drains: 5) instead of twice"
    )


@pytest.fixture(scope="session")
def operator(node: Node) -> Node:
    """The node, once the chart has brought the operator."""
    helm.install(node)
    return node


@pytest.fixture
def namespace(node: Node) -> Iterator[str]:
    name = f"e2e-{uuid.uuid4().hex[:8]}"
    node.create_namespace(name)
    yield name
    node.kubectl("delete", "namespace", name, "--timeout=110s")
