"""Frames come whole and in order, the API process never waits for the engine, and each side notices when the other is gone."""

import asyncio
import itertools
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flyball_runtime.core import frames
from flyball_runtime.core.frames import packed
from flyball_runtime.engine.channel import ApiEnd, Disconnected, EngineEnd, Unpacker

FRAMES = [b"", b"a", b"x" * 70_000, b"last"]


@given(st.lists(st.binary(max_size=300)), st.lists(st.integers(min_value=0, max_value=1200)))
def test_frames_are_the_same_however_the_bytes_come(sent: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(map(packed, sent))
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    unpacker = Unpacker()
    found = [frame for begin, end in itertools.pairwise(edges) for frame in unpacker.feed(stream[begin:end])]
    assert found == sent


def test_a_frame_longer_than_its_length_can_say_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 10)
    assert packed(b"x" * 10)
    with pytest.raises(ValueError, match="11 bytes; the most is 10"):
        packed(b"x" * 11)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, EngineEnd]]:
    """The API process's socket, and the engine's end."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, EngineEnd(theirs)


def test_the_engine_receives_what_is_there_and_does_not_wait(ends: tuple[socket.socket, EngineEnd]) -> None:
    ours, engine = ends
    assert engine.receive() == []
    ours.sendall(packed(b"one") + packed(b"two") + packed(b"three")[:5])
    assert engine.receive() == [b"one", b"two"]
    assert engine.receive() == []
    ours.sendall(packed(b"three")[5:])
    assert engine.receive() == [b"three"]


def test_the_engine_waits_for_an_arrival_as_long_as_it_is_told(ends: tuple[socket.socket, EngineEnd]) -> None:
    ours, engine = ends
    engine.wait(0.01)
    timer = threading.Timer(0.05, ours.sendall, [packed(b"late")])
    timer.start()
    engine.wait(60.0)
    timer.join()
    assert engine.receive() == [b"late"]


def test_the_engine_notices_that_the_api_process_is_gone(ends: tuple[socket.socket, EngineEnd]) -> None:
    ours, engine = ends
    ours.sendall(packed(b"unread"))
    ours.close()
    with pytest.raises(Disconnected):
        engine.receive()
    with pytest.raises(Disconnected):
        engine.send(b"x" * 10**7)


class Api:
    """The API process's end, and what it hears."""

    def __init__(self, connection: socket.socket) -> None:
        self.frames: list[bytes] = []
        self.errors: list[Exception] = []
        self.connection = connection
        self.end = ApiEnd(self.take, self.errors.append)

    def take(self, frame: bytes) -> None:
        if frame == b"odd":
            raise ValueError("cannot be read")
        self.frames.append(frame)


Scenario = Callable[[Api, EngineEnd], Coroutine[None, None, None]]


def run(scenario: Scenario) -> Api:
    async def session() -> Api:
        ours, theirs = socket.socketpair()
        with theirs:
            api = Api(ours)
            await api.end.open(ours)
            await asyncio.wait_for(scenario(api, EngineEnd(theirs)), 60)
            theirs.close()
            await asyncio.wait_for(api.end.closed.wait(), 60)
        return api

    return asyncio.run(session())


def test_the_last_words_of_an_engine_are_read_before_it_counts_as_gone() -> None:
    async def scenario(api: Api, engine: EngineEnd) -> None:
        await asyncio.to_thread(lambda: [engine.send(frame) for frame in FRAMES])

    assert run(scenario).frames == FRAMES


def test_an_engine_that_reads_nothing_does_not_stop_the_api_process() -> None:
    """A hung engine, and prompts of more bytes than any socket holds."""
    long = [bytes([number]) * 10**7 for number in range(5)]

    async def scenario(api: Api, engine: EngineEnd) -> None:
        for frame in long:
            api.end.send(frame)
        await asyncio.to_thread(engine.send, b"it still speaks")
        while not api.frames:
            await asyncio.sleep(0.001)
        arrived: list[bytes] = []
        while len(arrived) < len(long):
            await asyncio.to_thread(engine.wait, 1.0)
            arrived += engine.receive()
        assert arrived == long

    run(scenario)


def test_an_engine_waits_for_an_api_process_that_reads_nothing() -> None:
    """So what they have not exchanged yet takes bounded memory."""

    async def scenario(api: Api, engine: EngineEnd) -> None:
        sender = threading.Thread(target=lambda: [engine.send(b"x" * 1000) for _ in range(10_000)])
        sender.start()
        sender.join(0.2)  # the event loop stands still
        assert sender.is_alive()
        await asyncio.to_thread(sender.join)

    assert len(run(scenario).frames) == 10_000


def test_nothing_is_read_behind_a_frame_that_cannot_be_read() -> None:
    async def scenario(api: Api, engine: EngineEnd) -> None:
        engine.send(b"good")
        engine.send(b"odd")
        engine.send(b"behind")
        await api.end.closed.wait()

    api = run(scenario)
    assert (api.frames, [str(error) for error in api.errors]) == ([b"good"], ["cannot be read"])


def test_sending_to_an_engine_that_is_gone_is_no_error() -> None:
    async def scenario(api: Api, engine: EngineEnd) -> None:
        engine._socket.close()
        for _ in range(20):
            api.end.send(b"x" * 10**5)
            await asyncio.sleep(0)

    assert run(scenario).errors == []
