"""A lane runs one piece of work at a time, in its thread, and lets clients take turns."""

import asyncio
import threading

import pytest
from fastapi import Request

from flyball_runtime.api.errors import ClientLeft
from flyball_runtime.api.lane import MAX_LONG_BYTES, Lane, Lanes, TooManyLongTexts
from runtime.api.support import until

pytestmark = pytest.mark.anyio


class Work:
    """Pieces of work that note their names as they run; the one called ``first`` waits for ``go``."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.done: list[str] = []
        self.threads: set[int] = set()

    def named(self, name: str):  # type: ignore[no-untyped-def]
        def work() -> str:
            if name == "first":
                assert self.go.wait(10)
            self.threads.add(threading.get_ident())
            self.done.append(name)
            return name

        return work


async def started(lane: Lane, work: Work, *pieces: tuple[str, str]) -> list[asyncio.Task[str]]:
    """Start ``(client, name)`` after ``(client, name)``."""
    tasks = []
    for client, name in pieces:
        tasks.append(asyncio.create_task(lane.run(client, 10, work.named(name))))
        await asyncio.sleep(0)
    return tasks


async def test_work_runs_in_one_thread_that_is_not_the_loops() -> None:
    lane, work = Lane("test", max_waiting=8, max_waiting_bytes=100), Work()
    work.go.set()
    tasks = await started(lane, work, ("a", "first"), ("a", "second"))
    assert await asyncio.gather(*tasks) == ["first", "second"]
    assert len(work.threads) == 1 and threading.get_ident() not in work.threads


async def test_clients_take_turns() -> None:
    lane, work = Lane("test", max_waiting=8, max_waiting_bytes=100), Work()
    tasks = await started(
        lane, work, ("a", "first"), ("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("b", "b2"), ("c", "c1")
    )
    work.go.set()
    await asyncio.gather(*tasks)
    assert work.done == ["first", "a1", "b1", "c1", "a2", "b2", "a3"]


async def test_more_than_may_wait_are_refused_and_told_when_to_come_back() -> None:
    lane, work = Lane("test", max_waiting=1, max_waiting_bytes=100), Work()
    tasks = await started(lane, work, ("a", "first"), ("a", "second"))
    with pytest.raises(TooManyLongTexts) as refused:
        await lane.run("b", 1, work.named("third"))
    assert (refused.value.status, refused.value.retry_after_s) == (429, 1)
    work.go.set()
    await asyncio.gather(*tasks)
    assert work.done == ["first", "second"]


async def test_what_waits_may_hold_so_many_bytes() -> None:
    lane, work = Lane("test", max_waiting=8, max_waiting_bytes=25), Work()
    tasks = await started(lane, work, ("a", "first"), ("a", "second"), ("b", "third"))
    with pytest.raises(TooManyLongTexts):
        await lane.run("c", 6, work.named("fourth"))
    tasks[1].cancel()
    await asyncio.sleep(0)
    tasks += await started(lane, work, ("c", "fourth"))
    work.go.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert work.done == ["first", "third", "fourth"]
    tasks = await started(lane, work, ("a", "fifth"), ("a", "sixth"))
    assert await asyncio.gather(*tasks) == ["fifth", "sixth"]


async def test_who_gives_up_waiting_leaves_the_turn_to_the_next() -> None:
    lane, work = Lane("test", max_waiting=8, max_waiting_bytes=100), Work()
    first, gone, last = await started(lane, work, ("a", "first"), ("a", "gone"), ("b", "last"))
    gone.cancel()
    work.go.set()
    assert await last == "last" and await first == "first"
    assert work.done == ["first", "last"] and gone.cancelled()


async def test_who_gives_up_when_the_turn_has_come_leaves_it_to_the_next() -> None:
    lane, work = Lane("test", max_waiting=8, max_waiting_bytes=100), Work()
    first, gone, last = await started(lane, work, ("a", "first"), ("b", "gone"), ("c", "last"))
    first.add_done_callback(lambda _: gone.cancel())
    work.go.set()
    assert await last == "last"
    await until(gone.done)


async def test_a_failure_is_the_callers_and_the_lane_goes_on() -> None:
    def fails() -> None:
        raise ValueError("bad text")

    lane, work = Lane("test", max_waiting=8, max_waiting_bytes=100), Work()
    with pytest.raises(ValueError, match="bad text"):
        await lane.run("a", 1, fails)
    assert await lane.run("a", 1, work.named("next")) == "next"


class Connected:
    """A client's request, whole, and its connection until ``leave``."""

    def __init__(self) -> None:
        self._leaves = asyncio.Event()
        scope = {"type": "http", "headers": [], "client": ("192.0.2.1", 1)}
        self.request = Request(scope, self._receive)

    def leave(self) -> None:
        self._leaves.set()

    async def _receive(self) -> dict[str, str]:
        await self._leaves.wait()
        return {"type": "http.disconnect"}


async def test_the_length_of_a_body_says_where_its_work_is_done() -> None:
    lanes, request = Lanes(max_inline_bytes=10, max_waiting_bytes=1), Connected().request
    names = [
        await lanes.run(request, num_bytes, lambda: threading.current_thread().name)
        for num_bytes in (10, 11, MAX_LONG_BYTES, MAX_LONG_BYTES + 1)
    ]
    assert [name.partition("_")[0] for name in names] == ["MainThread", "long-bodies", "long-bodies", "huge-bodies"]


@pytest.mark.parametrize("num_bytes", [1, MAX_LONG_BYTES + 1])
async def test_work_for_a_client_that_left_while_it_waited_is_not_done(num_bytes: int) -> None:
    lanes, work = Lanes(max_inline_bytes=0, max_waiting_bytes=2 * num_bytes), Work()
    clients = {name: Connected() for name in ("first", "gone", "last")}
    tasks = {
        name: asyncio.create_task(lanes.run(client.request, num_bytes, work.named(name)))
        for name, client in clients.items()
    }
    await asyncio.sleep(0.01)  # the second and the third wait for the first
    clients["gone"].leave()
    with pytest.raises(ClientLeft):
        await tasks["gone"]
    another = asyncio.create_task(lanes.run(Connected().request, num_bytes, work.named("another")))
    work.go.set()
    assert [await tasks["first"], await tasks["last"], await another] == ["first", "last", "another"]
    assert work.done == ["first", "last", "another"]


async def test_a_client_that_leaves_while_its_work_is_done_stops_waiting_for_it() -> None:
    lanes, work, client = Lanes(max_inline_bytes=0, max_waiting_bytes=1), Work(), Connected()
    task = asyncio.create_task(lanes.run(client.request, 1, work.named("first")))
    await asyncio.sleep(0.01)
    client.leave()
    with pytest.raises(ClientLeft):
        await task
    work.go.set()
    assert await lanes.run(Connected().request, 1, work.named("next")) == "next"


async def test_a_failure_of_the_work_reaches_its_request() -> None:
    def fails() -> None:
        raise ValueError("bad text")

    for num_bytes in (1, MAX_LONG_BYTES):
        with pytest.raises(ValueError, match="bad text"):
            await Lanes(max_inline_bytes=1, max_waiting_bytes=1).run(Connected().request, num_bytes, fails)
