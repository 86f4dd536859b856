"""A lane runs one piece of work at a time, in its thread, and lets clients take turns."""

import asyncio
import threading

import pytest

from flyball_runtime.api.lane import Lane, TooManyLongTexts
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
        tasks.append(asyncio.create_task(lane.run(client, work.named(name))))
        await asyncio.sleep(0)
    return tasks


async def test_work_runs_in_one_thread_that_is_not_the_loops() -> None:
    lane, work = Lane("test", max_waiting=8), Work()
    work.go.set()
    tasks = await started(lane, work, ("a", "first"), ("a", "second"))
    assert await asyncio.gather(*tasks) == ["first", "second"]
    assert len(work.threads) == 1 and threading.get_ident() not in work.threads


async def test_clients_take_turns() -> None:
    lane, work = Lane("test", max_waiting=8), Work()
    tasks = await started(
        lane, work, ("a", "first"), ("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("b", "b2"), ("c", "c1")
    )
    work.go.set()
    await asyncio.gather(*tasks)
    assert work.done == ["first", "a1", "b1", "c1", "a2", "b2", "a3"]


async def test_more_than_may_wait_are_refused_and_told_when_to_come_back() -> None:
    lane, work = Lane("test", max_waiting=1), Work()
    tasks = await started(lane, work, ("a", "first"), ("a", "second"))
    with pytest.raises(TooManyLongTexts) as refused:
        await lane.run("b", work.named("third"))
    assert (refused.value.status, refused.value.retry_after_s) == (429, 1)
    work.go.set()
    await asyncio.gather(*tasks)
    assert work.done == ["first", "second"]


async def test_who_gives_up_waiting_leaves_the_turn_to_the_next() -> None:
    lane, work = Lane("test", max_waiting=8), Work()
    first, gone, last = await started(lane, work, ("a", "first"), ("a", "gone"), ("b", "last"))
    gone.cancel()
    work.go.set()
    assert await last == "last" and await first == "first"
    assert work.done == ["first", "last"] and gone.cancelled()


async def test_who_gives_up_when_the_turn_has_come_leaves_it_to_the_next() -> None:
    lane, work = Lane("test", max_waiting=8), Work()
    first, gone, last = await started(lane, work, ("a", "first"), ("b", "gone"), ("c", "last"))
    first.add_done_callback(lambda _: gone.cancel())
    work.go.set()
    assert await last == "last"
    await until(gone.done)


async def test_a_failure_is_the_callers_and_the_lane_goes_on() -> None:
    def fails() -> None:
        raise ValueError("bad text")

    lane, work = Lane("test", max_waiting=8), Work()
    with pytest.raises(ValueError, match="bad text"):
        await lane.run("a", fails)
    assert await lane.run("a", work.named("next")) == "next"
