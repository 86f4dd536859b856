"""One watch of one kind, run by a Kopf of its own, so that the end of one is not the end of all."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import kopf

from flyball_operator.cluster import handlers
from flyball_operator.cluster.connection import Connection
from flyball_operator.cluster.intake import Intake
from flyball_operator.cluster.kinds import Kind
from flyball_operator.cluster.tasks import first_of
from flyball_operator.errors import OperatorError

DISCOVERY_S = 30.0


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
        registry=handlers.registry(connection, intake, kind, requests.note),
        settings=handlers.settings(kind),
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
