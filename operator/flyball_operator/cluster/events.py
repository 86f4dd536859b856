"""Kubernetes Events: what ``kubectl describe`` shows under an LLMDeployment. A repeat renews the one that is there."""

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Literal

from flyball_operator import names
from flyball_operator.cluster.api_server import EVENT, ClusterError, Conflict, Forbidden
from flyball_operator.cluster.client import Client
from flyball_operator.observed import Object, Resource

log = logging.getLogger(__name__)

MAX_WAITING = 1000
MAX_REMEMBERED = 4096
MAX_MESSAGE = 1000  # characters; the API refuses more than 1024
REPEAT_AFTER_S = 600.0
"""The same Event of the same object is written once in this time."""

Type = Literal["Normal", "Warning"]


class Recorder:
    """Call it with what happened; ``run()`` writes it. Events are a courtesy: they wait for nothing and stop nothing."""

    def __init__(self, client: Client, instance: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._instance = instance
        self._clock = clock
        self._waiting: asyncio.Queue[Object] = asyncio.Queue(MAX_WAITING)
        self._written: OrderedDict[str, float] = OrderedDict()

    def __call__(self, resource: Resource, type: Type, reason: str, message: str) -> None:
        event = event_of(resource, type, reason, message, self._instance)
        if self._is_repeat(event["metadata"]["name"]):
            return
        try:
            self._waiting.put_nowait(event)
        except asyncio.QueueFull:
            log.warning("%d events wait already, this one is dropped: %s %s", MAX_WAITING, resource.key, message)

    async def run(self) -> None:
        while True:
            event = await self._waiting.get()
            try:
                await self._write(event)
            except Forbidden as error:
                if not error.is_terminating_namespace:
                    log.warning("an event was not written: %s", error)
            except ClusterError as error:
                log.warning("an event was not written: %s", error)

    async def _write(self, event: Object) -> None:
        try:
            await self._client.create(EVENT, event)
        except Conflict:  # written before, maybe by an earlier process
            metadata, seen_again = event["metadata"], {"lastTimestamp": event["lastTimestamp"]}
            await self._client.merge(EVENT, metadata["namespace"], metadata["name"], seen_again)

    def _is_repeat(self, name: str) -> bool:
        now = self._clock()
        if now - self._written.get(name, float("-inf")) < REPEAT_AFTER_S:
            return True
        self._written[name] = now
        self._written.move_to_end(name)
        if len(self._written) > MAX_REMEMBERED:
            self._written.popitem(last=False)
        return False


def event_of(resource: Resource, type: Type, reason: str, message: str, instance: str) -> Object:
    """Return the Event. Its name is made from its content, so that a repeat meets the one that is there."""
    content = "\0".join((resource.uid, type, reason, message))
    now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{resource.key.name}.{hashlib.sha256(content.encode()).hexdigest()[:16]}",
            "namespace": resource.key.namespace,
        },
        "involvedObject": {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "name": resource.key.name,
            "namespace": resource.key.namespace,
            "uid": resource.uid,
            "resourceVersion": resource.resource_version,
        },
        "type": type,
        "reason": reason,
        "message": message[:MAX_MESSAGE],
        "source": {"component": names.MANAGER},
        "reportingComponent": f"{names.GROUP}/operator",
        "reportingInstance": instance,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
