"""Kopf as transport: it logs in and watches. Everything else of it is switched off."""

from collections.abc import Iterator
from typing import Any

import kopf

from flyball_operator.cluster.connection import Asked, Connection
from flyball_operator.cluster.intake import Intake, selector_of
from flyball_operator.cluster.kinds import Kind

SERVER_TIMEOUT_S = 300
CONNECT_TIMEOUT_S = 10.0
REQUEST_TIMEOUT_S = 60.0
PAGE_SIZE = 100
"""Objects that Kopf holds at once while it lists: each has a task until it is taken in."""


class Endless:
    """Delays between tries that never run out: Kopf would end the operator after the last one."""

    def __iter__(self) -> Iterator[float]:
        delay_s = 0.25
        while True:
            yield delay_s
            delay_s = min(5.0, 2 * delay_s)


class NoProgress(kopf.ProgressStorage):
    """Stores nothing: there are no handlers with progress. Kopf's own would copy every object that it sees."""

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None: ...

    def purge(self, **_: Any) -> None: ...

    def touch(self, **_: Any) -> None: ...

    def clear(self, *, essence: Any) -> Any:
        return essence


class NoDiffBase(kopf.DiffBaseStorage):
    """Remembers no earlier state of objects: a reconcile compares with what is, not with what was."""

    def build(self, **_: Any) -> Any:
        return {}

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None: ...


def settings(kind: Kind) -> kopf.OperatorSettings:
    """Return Kopf's settings: server-side selectors, watches that notice when they hang, and no writes."""
    made = kopf.OperatorSettings()
    made.posting.enabled = False
    made.peering.standalone = True
    made.scanning.disabled = True
    made.persistence.progress_storage = NoProgress()
    made.persistence.diffbase_storage = NoDiffBase()
    made.persistence.consistency_timeout = 0
    made.networking.error_backoffs = Endless()
    made.networking.connect_timeout = CONNECT_TIMEOUT_S
    made.networking.request_timeout = REQUEST_TIMEOUT_S
    made.watching.server_timeout = SERVER_TIMEOUT_S
    made.watching.client_timeout = SERVER_TIMEOUT_S + 30
    made.watching.chunk_size = PAGE_SIZE
    made.queueing.idle_timeout = 0.1  # a task per object that has news, and no longer than that
    made.process.ultimate_exiting_timeout = None  # Kopf would end the process some minutes after a watch has failed
    if selector := selector_of(kind):
        made.watching.label_selectors[kind.group, kind.version, kind.plural] = selector
    return made


def registry(connection: Connection, intake: Intake, kind: Kind, asked: Asked) -> kopf.OperatorRegistry:
    """Return the handlers: a login, and one that passes events of the kind on."""
    made = kopf.OperatorRegistry()

    @kopf.on.login(registry=made, id="connection")
    async def on_login(**_: Any) -> kopf.AiohttpSession:
        return connection.for_kopf(kind, asked)

    @kopf.on.event(kind.group, kind.version, kind.plural, registry=made, id=kind.plural)
    async def on_event(event: kopf.RawEvent, **_: Any) -> None:
        obj: Any = event["object"]
        if event["type"] == "DELETED":
            intake.gone(kind, obj)
        else:
            intake.seen(kind, obj)

    return made
