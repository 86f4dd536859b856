"""What kubelets do, for the pods of one namespace that nothing runs."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

from cluster_kit.api import Api, Refused
from flyball_operator.cluster.api_server import POD

Object = dict[str, Any]
PERIOD_S = 0.1
NOWHERE = "nowhere"
CHANGED_SINCE = (404, 409)
"""How the API server refuses a change of a pod that was deleted after it was listed."""


class Kubelet:
    """A pod runs and is ready soon after it was made, and gone soon after it was deleted; while ``with`` lasts."""

    def __init__(self, api: Api, namespace: str) -> None:
        self._api = api
        self._namespace = namespace
        self._ended = threading.Event()
        self._thread = ThreadPoolExecutor(1)

    def __enter__(self) -> Self:
        self._work = self._thread.submit(self._run)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.shutdown()
        self._work.result()

    def _run(self) -> None:
        while not self._ended.wait(PERIOD_S):
            for pod in self._api.list(POD, self._namespace):
                try:
                    self._tend(pod["metadata"]["name"], pod)
                except Refused as refused:
                    if refused.status not in CHANGED_SINCE:
                        raise

    def _tend(self, name: str, pod: Object) -> None:
        if "deletionTimestamp" in pod["metadata"]:
            self._api.delete(POD, self._namespace, name, grace_s=0)
        elif "nodeName" not in pod["spec"]:
            self._api.bind(self._namespace, name, NOWHERE)
        elif pod["status"]["phase"] == "Pending":
            self._api.merge(POD, self._namespace, name, {"status": _running(pod)}, "status")


def _running(pod: Object) -> Object:
    now = pod["metadata"]["creationTimestamp"]
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": now}
    return {"phase": "Running", "startTime": now, "conditions": [ready]}
