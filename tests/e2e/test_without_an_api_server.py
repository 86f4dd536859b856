"""The API server is gone for a minute. Last of all tests, by its name: the parts of Kubernetes recover from it one by one.

Each waits for up to a minute before it asks again, and they wait for each other.
"""

import time
from typing import Any

from e2e_kit.models import Model
from e2e_kit.traffic import undisturbed

OUTAGE_S = 60.0
RECOVERY_TIMEOUT_S = 300.0


def test_an_api_server_that_is_gone_for_a_minute(model: Model, figures: dict[str, Any]) -> None:
    """Traffic ends before it returns: Kubernetes then takes nodes for dead that it has not heard of, for a while."""
    try:
        with undisturbed(model, figures):
            model.node.stop_apiserver()
            time.sleep(OUTAGE_S)
    finally:
        model.node.start_apiserver()
    back_s = time.monotonic()
    model.mark("afterwards")
    figures["deployment_changed_after_s"] = time.monotonic() - back_s
    model.until(lambda: model.marks == {"afterwards"}, "the new pods alone", RECOVERY_TIMEOUT_S)
    figures["rolled_after_s"] = time.monotonic() - back_s
