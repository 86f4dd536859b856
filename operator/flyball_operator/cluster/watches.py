"""One watch of one kind, run by a Kopf of its own, so that the end of one is not the end of all.

Kopf is the transport: it logs in and watches. Everything else of it is switched off.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator
from typing import Any

import kopf

from flyball_operator.cluster.api_server import Kind
from flyball_operator.cluster.connection import Asked, Connection
from flyball_operator.cluster.store import Intake, selector_of
from flyball_operator.errors import OperatorError

SERVER_TIMEOUT_S = 300
CONNECT_TIMEOUT_S = 10.0
REQUEST_TIMEOUT_S = 60.0
PAGE_SIZE = 100
"""Objects that Kopf holds at once while it lists: each has a task until it is taken in."""

DISCOVERY_S = 30.0


async def first_of(*parts: Coroutine[Any, Any, None]) -> None:
    """Run all until one ends, then end the others; raises what it raised."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


class Endless:
    """Delays between tries that never run out: Kopf would end the operator after the last one."""

    def __iter__(self) -> Iterator[float]:
        delay_s = 0.25
        while True:
            yield delay_s
            delay_s = min(5.0, 2 * delay_s)


class _NoProgress(kopf.ProgressStorage):
    """Stores nothing: there are no handlers with progress. Kopf's own would copy every object that it sees."""

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None: ...

    def purge(self, **_: Any) -> None: ...

    def touch(self, **_: Any) -> None: ...

    def clear(self, *, essence: Any) -> Any:
        return essence


class _NoDiffBase(kopf.DiffBaseStorage):
    """Remembers no earlier state of objects: a reconcile compares with what is, not with what was."""

    def build(self, **_: Any) -> Any:
        return {}

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None: ...


def kopf_settings(kind: Kind) -> kopf.OperatorSettings:
    """Return Kopf's settings: server-side selectors, watches that notice when they hang, and no writes."""
    made = kopf.OperatorSettings()
    made.posting.enabled = False
    made.peering.standalone = True
    made.scanning.disabled = True
    made.persistence.progress_storage = _NoProgress()
    made.persistence.diffbase_storage = _NoDiffBase()
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


def _registry(connection: Connection, intake: Intake, kind: Kind, asked: Asked) -> kopf.OperatorRegistry:
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


class WatchFailed(OperatorError):
    """Kopf gave a watch up: the kind is gone, or the API server sent an error."""


class _AllTasks(frozenset[Any]):
    """In the end Kopf cancels every task of the loop that is not in this set: ours and those of other watches."""

    def __contains__(self, _: object) -> bool:
        return True


class _Requests:
    """What Kopf last asked of the API server: a list, then a watch from there on."""

    def __init__(self) -> None:
        self.listed = asyncio.Event()
        self.watching = asyncio.Event()

    def note(self, *, watch: bool) -> None:
        if watch:
            self.watching.set()
        else:
            self.watching.clear()
            self.listed.set()


async def watch(
    connection: Connection,
    intake: Intake,
    kind: Kind,
    namespace: str | None,
    *,
    started: Callable[[], None],
    catch_up: Callable[[], Awaitable[None]],
) -> None:
    """Watch a kind in a namespace (None: in all) until that fails.

    Args:
        started: called when Kopf has replaced the handlers of SIGINT and SIGTERM by its own.
        catch_up: called when Kopf has listed the kind: what had been deleted before, its watch does not tell.

    Raises:
        WatchFailed: with the reason.
        Whatever ``catch_up`` raises.
    """
    requests = _Requests()
    root_tasks = await kopf.spawn_tasks(
        registry=_registry(connection, intake, kind, requests.note),
        settings=kopf_settings(kind),
        clusterwide=namespace is None,
        namespaces=[] if namespace is None else [namespace],
        standalone=True,
    )
    started()
    await first_of(_run(root_tasks), _follow(requests, kind, catch_up))


async def _run(root_tasks: Collection[asyncio.Task[Any]]) -> None:
    try:
        await kopf.run_tasks(root_tasks, ignored=_AllTasks())
    except Exception as error:  # Kopf's own errors have no common type
        raise WatchFailed(f"{type(error).__name__}: {error.args[0] if error.args else error}") from error
    raise WatchFailed("Kopf ended without a reason")


async def _follow(requests: _Requests, kind: Kind, catch_up: Callable[[], Awaitable[None]]) -> None:
    try:
        async with asyncio.timeout(DISCOVERY_S):
            await requests.listed.wait()
    except TimeoutError as error:  # Kopf waits for ever, without a word, if discovery lacks the kind
        raise WatchFailed(f"discovery did not show {kind.resource} within {DISCOVERY_S:g} s") from error
    while True:
        await requests.listed.wait()
        await requests.watching.wait()
        requests.listed.clear()
        await catch_up()
