"""The API server is gone for a minute. Last of all tests, by its name: the parts of Kubernetes recover from it one by one.

Each waits for up to a minute before it asks again, and they wait for each other.
"""

import time
from typing import Any

from e2e_kit.disturbances import BUSY, undisturbed, work_of
from e2e_kit.models import LONG_TIMEOUT_S, Model
from e2e_kit.node import Node

OUTAGE_S = 60.0


def test_an_api_server_that_is_gone_for_a_minute(operator: Node, namespace: str, figures: dict[str, Any]) -> None:
    """Streams are in flight when it goes, when it returns, and when the pods are replaced right afterwards."""
    model = Model(operator, namespace, **BUSY)
    model.apply()
    model.wait_ready()
    work = work_of(model)
    with undisturbed(model, work, figures) as load:
        load.wait_until_busy()
        operator.take_apiserver_away()
        try:
            time.sleep(OUTAGE_S)
            load.wait_until_in_flight()
        finally:
            operator.bring_apiserver_back()
        back_s = time.monotonic()
        model.mark("afterwards")
        figures["deployment_changed_after_s"] = time.monotonic() - back_s
        model.until(lambda: model.marks == {"afterwards"}, "the new pods alone", LONG_TIMEOUT_S)
        figures["rolled_after_s"] = time.monotonic() - back_s
        load.wait_until_busy()
