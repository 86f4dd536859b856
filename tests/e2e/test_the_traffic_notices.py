"""The traffic of the other tests has the power to fail them: it notices a runtime that does not drain."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from e2e_kit.disturbances import BUSY, STREAMS_PER_REPLICA, RequestsLost, drain, roll, undisturbed, work_of
from e2e_kit.models import Model, serving
from e2e_kit.node import Node
from e2e_kit.work import Work

ENDS_AT_ONCE = ("sh", "-c", 'trap "exit 143" TERM; flyball "$@" & wait', "flyball")
"""A shell as the container's first process: with it the kernel ends all of them, at the first SIGTERM."""


@pytest.fixture(scope="module")
def hasty(operator: Node) -> Iterator[Model]:
    """A model whose runtime ends at once on SIGTERM."""
    container = {"name": "runtime", "command": list(ENDS_AT_ONCE)}
    with serving(operator, podTemplate={"spec": {"containers": [container]}}, **BUSY) as model:
        yield model


@pytest.fixture(scope="module")
def work(hasty: Model) -> Work:
    return work_of(hasty)


DISTURBANCES: dict[str, tuple[int, Callable[[Model], None]]] = {
    "a rolling update": (1, lambda model: roll(model, "new")),
    "a scale-down": (2, lambda model: model.scale(1)),
    "a drain": (2, drain),
}


@pytest.mark.parametrize("disturbance", DISTURBANCES)
def test_a_runtime_that_does_not_drain(hasty: Model, work: Work, figures: dict[str, Any], disturbance: str) -> None:
    replicas, disturb = DISTURBANCES[disturbance]
    hasty.scale(replicas)
    with (
        pytest.raises(RequestsLost),
        undisturbed(hasty, work, figures, num_streams=replicas * STREAMS_PER_REPLICA) as load,
    ):
        load.wait_until_busy()
        disturb(hasty)
    assert figures["failed"] and not figures["changed"]
