"""The election against a Lease in memory and a clock that the test moves."""

import asyncio
import copy
from collections.abc import Awaitable, Callable

import pytest

from flyball_operator.cluster.api_server import ApiCall, Kind, NotFound, Unavailable, Unreachable, from_answer
from flyball_operator.cluster.election import Election, LeaseLost, Terms
from flyball_operator.observed import Object

TERMS = Terms(15.0)
CALL = ApiCall("update", "leases.coordination.k8s.io", "ns/lease")


class Leases:
    """The part of a Client that an election uses, with one Lease. ``trouble`` comes before each write, ``answer`` after it."""

    def __init__(self) -> None:
        self.lease: Object | None = None
        self.version = 0
        self.trouble: Callable[[], Awaitable[None]] | None = None
        self.answer: Callable[[], Awaitable[None]] | None = None

    async def get(self, *_: object) -> Object:
        if self.lease is None:
            raise from_answer(CALL, 404, {}, {})
        return copy.deepcopy(self.lease)

    async def find(self, kind: Kind, namespace: str, name: str) -> Object | None:
        try:
            return await self.get(kind, namespace, name)
        except NotFound:
            return None

    async def create(self, _: Kind, obj: Object) -> Object:
        if self.lease is not None:
            raise from_answer(CALL, 409, {}, {})
        return await self._write(obj)

    async def replace(self, _: Kind, obj: Object) -> Object:
        if self.lease is None or obj["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            raise from_answer(CALL, 409, {}, {})
        return await self._write(obj)

    async def _write(self, obj: Object) -> Object:
        if self.trouble is not None:
            await self.trouble()
        self.version += 1
        self.lease = copy.deepcopy(obj)
        self.lease["metadata"]["resourceVersion"] = str(self.version)
        written = copy.deepcopy(self.lease)
        if self.answer is not None:
            await self.answer()
        return written

    @property
    def holder(self) -> str:
        assert self.lease is not None
        return str(self.lease["spec"]["holderIdentity"])


class World:
    """Two processes, a Lease, a clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.leases = Leases()

    def process(self, identity: str) -> Election:
        return Election(self.leases, "ns", identity, TERMS, clock=lambda: self.now)  # type: ignore[arg-type]


@pytest.fixture
def world() -> World:
    return World()


def acquired(election: Election) -> bool:
    return asyncio.run(election.try_acquire())


def renew(election: Election) -> None:
    asyncio.run(election.renew())


def test_the_first_leads_and_the_second_waits_until_the_lease_stayed_unchanged(world: World) -> None:
    one, two = world.process("one"), world.process("two")
    assert acquired(one)
    for _ in range(3):
        assert not acquired(two)
        world.now += 5
        renew(one)
    assert not acquired(two)  # the renewal is news
    world.now += 14.9
    assert not acquired(two)
    world.now += 0.1
    assert acquired(two)
    assert world.leases.holder == "two"


def test_the_right_to_write_ends_before_another_may_lead(world: World) -> None:
    """No matter whether anything ran in between: an event loop that was blocked finds it ended."""
    one, two = world.process("one"), world.process("two")
    acquired(one)
    acquired(two)
    assert one.time_to_write() == TERMS.give_up_s
    world.now += TERMS.give_up_s - 1
    assert one.time_to_write() == 1
    world.now += 1
    with pytest.raises(LeaseLost, match="ns/flyball-operator was not renewed for 10 s"):
        one.time_to_write()
    assert not acquired(two), "there is time for what was under way"


def test_who_never_led_may_not_write(world: World) -> None:
    with pytest.raises(LeaseLost):
        world.process("one").time_to_write()


def test_a_renewal_counts_from_when_it_was_asked_for(world: World) -> None:
    """The API server may have taken it at that moment, and its answer was late."""
    one = world.process("one")
    acquired(one)

    async def slow() -> None:
        world.now += 4

    world.leases.trouble = slow
    renew(one)
    assert one.time_to_write() == TERMS.give_up_s - 4


@pytest.mark.parametrize(
    "error", [Unreachable(CALL, TimeoutError()), from_answer(CALL, 503, {}, {}), from_answer(CALL, 403, {}, {})]
)
def test_a_renewal_that_fails_is_tried_again_until_the_time_is_up(world: World, error: Unavailable) -> None:
    one = world.process("one")
    acquired(one)

    async def fail() -> None:
        raise error

    world.leases.trouble = fail
    for _ in range(3):
        world.now += 3
        renew(one)
    world.now += 1
    with pytest.raises(LeaseLost):
        renew(one)


def test_a_renewal_without_an_answer_ends_in_time(world: World) -> None:
    one = world.process("one")
    acquired(one)

    async def hang() -> None:
        world.now += 0.5
        await asyncio.sleep(3600)

    world.leases.trouble = hang
    world.now += TERMS.give_up_s - 0.1
    with pytest.raises(LeaseLost):
        asyncio.run(asyncio.wait_for(one.renew(), 60))


def test_a_renewal_whose_answer_got_lost_is_recognised(world: World) -> None:
    one = world.process("one")
    acquired(one)
    assert world.leases.lease is not None
    world.leases.lease["metadata"]["resourceVersion"] = "99"
    renew(one)
    world.now += 5
    renew(one)
    assert one.time_to_write() == TERMS.give_up_s


def test_a_lease_that_another_took_ends_the_holder(world: World) -> None:
    one, two = world.process("one"), world.process("two")
    acquired(one)
    assert world.leases.lease is not None
    world.leases.lease["spec"]["holderIdentity"] = ""  # by hand
    assert acquired(two)
    with pytest.raises(LeaseLost, match="was taken by two"):
        renew(one)
    asyncio.run(one.release())
    assert world.leases.holder == "two", "it has nothing to release"


def test_two_processes_of_one_name_do_not_both_lead(world: World) -> None:
    """A container that is started again takes over at once; a process that still runs finds out when it renews."""
    one, twin = world.process("one"), world.process("one")
    assert acquired(one)
    assert acquired(twin)
    with pytest.raises(LeaseLost, match="by another process with the name one"):
        renew(one)
    renew(twin)


def test_a_released_lease_is_free_at_once(world: World) -> None:
    one, two = world.process("one"), world.process("two")
    acquired(one)
    asyncio.run(one.release())
    with pytest.raises(LeaseLost):
        one.time_to_write()
    assert acquired(two)


def test_a_release_does_not_end_the_lease_of_another(world: World) -> None:
    one, two = world.process("one"), world.process("two")
    acquired(one)
    acquired(two)
    world.now += 15
    acquired(two)
    asyncio.run(one.release())
    assert world.leases.holder == "two"


@pytest.mark.parametrize("answered", [0, 1], ids=["its first call", "a renewal"])
def test_a_signal_while_the_lease_is_written_leaves_it_free(world: World, answered: int) -> None:
    """The API server has the write, its answer is on the way, and the process is told to end."""

    async def end_while_writing() -> None:
        one = Election(world.leases, "ns", "one", Terms(1.5))  # type: ignore[arg-type]
        asked, answer, num_written = asyncio.Event(), asyncio.Event(), 0

        async def answer_late() -> None:
            nonlocal num_written
            num_written += 1
            if num_written == answered + 1:
                asked.set()
                await answer.wait()

        async def lead() -> None:
            try:
                await one.acquire()
                await one.hold()
            finally:
                await one.release()

        world.leases.answer = answer_late
        leading = asyncio.create_task(lead())
        await asked.wait()
        leading.cancel()
        asyncio.get_running_loop().call_later(0.005, answer.set)
        await asyncio.wait([leading])

    asyncio.run(end_while_writing())
    assert world.leases.holder == ""


def test_a_release_finds_a_lease_whose_renewal_had_no_answer(world: World) -> None:
    one = world.process("one")
    acquired(one)
    assert world.leases.lease is not None
    world.leases.lease["metadata"]["resourceVersion"] = "99"
    asyncio.run(one.release())
    assert world.leases.holder == ""
