"""Room for requests that arrive: counted as they come, and taken from the one that has been arriving for longest."""

import asyncio
import contextlib

import pytest

from flyball_runtime.core.room import GivenUp, Room, RoomFull

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Arrival:
    """A request that has brought ``num_bytes`` and waits for the rest until ``end``; ``task`` has its ending."""

    def __init__(self, room: Room, num_bytes: int, timeout_s: float = 10.0) -> None:
        self._room = room
        self._num_bytes = num_bytes
        self._timeout_s = timeout_s
        self.end = asyncio.Event()
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> str:
        with self._room.share() as share:
            async with share.arriving(self._timeout_s):
                share.grow(self._num_bytes)
                await self.end.wait()
            return "whole"


async def arrivals(room: Room, *sizes: int) -> list[Arrival]:
    started = []
    for num_bytes in sizes:
        started.append(Arrival(room, num_bytes))
        await asyncio.sleep(0)
    return started


async def test_the_one_that_has_been_arriving_for_longest_gives_way() -> None:
    idle, slow, late, last = await arrivals(Room(max_bytes=100), 0, 60, 30, 40)
    with pytest.raises(GivenUp):
        await slow.task
    for one in (idle, late, last):
        one.end.set()
        assert await one.task == "whole"


async def test_as_many_give_way_as_there_must() -> None:
    room = Room(max_bytes=100)
    *slow, last = await arrivals(room, 30, 30, 30, 100)
    assert [type(error) for error in await asyncio.gather(*(one.task for one in slow), return_exceptions=True)] == (
        [GivenUp] * 3
    )
    last.end.set()
    assert await last.task == "whole"
    assert await fits(room, 100), "all of it is free again"


async def fits(room: Room, num_bytes: int) -> bool:
    (one,) = await arrivals(room, num_bytes)
    one.end.set()
    with contextlib.suppress(RoomFull):
        return await one.task == "whole"
    return False


async def test_one_that_is_larger_than_the_room_harms_only_itself() -> None:
    room = Room(max_bytes=100)
    assert not await fits(room, 101)
    assert await fits(room, 100)


async def test_what_is_whole_is_not_given_up() -> None:
    room = Room(max_bytes=100)
    with room.share() as whole:
        async with whole.arriving(10):
            whole.grow(60)
        assert not await fits(room, 50)
        assert await fits(room, 40)
    assert await fits(room, 100)


async def test_a_late_one_is_a_timeout_and_gives_its_room_back() -> None:
    room = Room(max_bytes=100)
    with pytest.raises(TimeoutError):
        await Arrival(room, 100, timeout_s=0.01).task
    assert await fits(room, 100)


async def test_requests_are_bounded_too() -> None:
    room = Room(max_bytes=100, max_requests=2)
    first, second, third = await arrivals(room, 0, 1, 1)
    with pytest.raises(GivenUp):
        await first.task
    with room.share() as whole, contextlib.ExitStack() as held:
        with pytest.raises(GivenUp):
            await second.task
        held.enter_context(room.share())
        with pytest.raises(GivenUp):
            await third.task
        with pytest.raises(RoomFull), room.share():
            pytest.fail("there are two already, and both are whole")
        assert whole.num_bytes == 0
