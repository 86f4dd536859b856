"""What the engine process does between two steps, over a channel in memory."""

import gc
import os
import signal
import socket
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any

import pytest

from flyball_protocol import LimitsAck, LimitsChange, LimitsReport, LimitsStatus, LimitsUpdate
from flyball_runtime.core.clock import FakeClock
from flyball_runtime.core.config import EngineConfig
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.request import Failed, Finished, Request
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.core.stats import StepOutput, StepStats
from flyball_runtime.engine import process, runner
from flyball_runtime.engine.adapters import AdapterAnswer, LoadAdapter, UnloadAdapter
from flyball_runtime.engine.heartbeat import Heartbeat
from flyball_runtime.engine.process import (
    Abort,
    EngineProcess,
    FromEngine,
    LimitsAnswer,
    PostLimits,
    Ready,
    StopEngine,
    Submit,
    ToEngine,
    decode_from_engine,
    encode_message,
    run_engine,
)
from runtime.fake_engine import ENVELOPE, LIMITS, FakeEngine, step_stats

REPORT = LimitsReport(revision=0, target=LIMITS, effective=LIMITS, envelope=ENVELOPE, last_known_good=LIMITS)


class Channel:
    """Frames that have arrived, and messages that were sent."""

    def __init__(self) -> None:
        self.arrived: list[bytes] = []
        self.sent: list[FromEngine] = []

    def put(self, *arrived: ToEngine) -> None:
        self.arrived += [encode_message(message) for message in arrived]

    def receive(self) -> list[bytes]:
        arrived, self.arrived = self.arrived, []
        return arrived

    def wait(self, timeout_s: float) -> None:
        self.put(StopEngine())  # nothing else will come

    def send(self, frame: bytes) -> None:
        self.sent.append(decode_from_engine(frame))

    @property
    def endings(self) -> list[Finished | Failed]:
        return [ending for message in self.sent if isinstance(message, StepOutput) for ending in message.endings]


class StubEngine:
    """Ends every request it has in a step; notes what happened in which order."""

    info = FakeEngine(384).engine_info

    def __init__(self) -> None:
        self.events: list[str] = []
        self.requests: dict[str, Request] = {}

    def submit(self, request: Request) -> Failed | None:
        self.events.append(f"submit {request.request_id}")
        if request.request_id.startswith("bad"):
            return Failed(request.request_id, 400, "bad", "it is bad")
        self.requests[request.request_id] = request
        return None

    def abort(self, request_id: str) -> Finished | None:
        self.events.append(f"abort {request_id}")
        request = self.requests.pop(request_id, None)
        return None if request is None else Finished(request_id, "abort", len(request.prompt_token_ids), 0)

    def load_adapter(self, number: int, path: str) -> Future[None]:
        self.events.append(f"load {number}")
        loaded: Future[None] = Future()
        errors = {"broken": ConfigError("it is\nbroken." + "x" * 10**6), "odd": MemoryError("a secret of this machine")}
        if path in errors:
            loaded.set_exception(errors[path])
        elif path != "slow":
            loaded.set_result(None)
        return loaded

    def unload_adapter(self, number: int) -> None:
        self.events.append(f"unload {number}")

    def has_work(self) -> bool:
        return bool(self.requests)

    def step(self) -> StepOutput:
        self.events.append("step")
        endings: list[Finished | Failed] = [Finished(name, "length", 1, 1) for name in self.requests]
        self.requests.clear()
        return StepOutput([], [], endings, step_stats())

    def post_limits(self, update: LimitsUpdate) -> LimitsAck:
        self.events.append(f"limits {update.revision}")
        return LimitsAck(status=LimitsStatus.APPLIED, revision=update.revision, target=LIMITS, effective=LIMITS)

    def limits(self) -> LimitsReport:
        return REPORT

    def tick(self) -> None:
        return None

    def state(self) -> StepStats:
        return step_stats()


def test_the_heartbeat_is_fresh_when_the_engine_says_that_it_is_ready() -> None:
    """From then on the API process judges its age; before, the model was loading for as long as that took."""
    clock, ages = FakeClock(), []
    heartbeat = Heartbeat(clock)
    clock.advance(600)

    class Timed(Channel):
        def send(self, frame: bytes) -> None:
            ages.append(heartbeat.age_s())
            super().send(frame)

    channel = Timed()
    EngineProcess(StubEngine(), channel, heartbeat, os.getppid()).serve()  # type: ignore[arg-type]
    assert isinstance(channel.sent[0], Ready)
    assert ages[0] == 0


def submit(name: str) -> Submit:
    return Submit(Request(request_id=name, prompt_token_ids=[5, 6, 7], sampling=SamplingParams()))


def serve(*arrived: ToEngine) -> tuple[StubEngine, Channel]:
    """Serve what has arrived until there is nothing left to do."""
    engine, channel = StubEngine(), Channel()
    channel.put(*arrived)
    EngineProcess(engine, channel, Heartbeat(), os.getppid()).serve()  # type: ignore[arg-type]
    return engine, channel


@pytest.fixture
def no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request is more than there is time for between two steps."""
    monkeypatch.setattr(process, "ARRIVALS_S", 0.0)


@pytest.mark.usefixtures("no_time")
def test_a_flood_of_requests_does_not_hold_up_steps() -> None:
    engine, channel = serve(*[submit(name) for name in "abc"])
    assert engine.events == ["submit a", "step", "submit b", "step", "submit c", "step"]
    assert [ending.request_id for ending in channel.endings] == ["a", "b", "c"]
    steps = [message for message in channel.sent if isinstance(message, StepOutput) and message.endings]
    assert [message.stats.num_waiting for message in steps] == [2, 1, 0], "those that are not taken yet"


def test_requests_for_which_there_is_time_start_together() -> None:
    engine, _ = serve(*[submit(name) for name in "abc"])
    assert engine.events == ["submit a", "submit b", "submit c", "step"]


@pytest.mark.usefixtures("no_time")
def test_aborts_and_limits_overtake_requests_that_wait_to_be_taken() -> None:
    update = LimitsUpdate(revision=3, limits=LimitsChange())
    arrived = [
        *(submit(name) for name in "abc"),
        PostLimits(7, update),
        Abort("b"),
        Abort("x"),
    ]
    engine, channel = serve(*arrived)
    assert engine.events == ["limits 3", "abort x", "submit a", "step", "submit c", "step"]
    assert channel.endings[0] == Finished("b", "abort", 3, 0)
    assert [ending.request_id for ending in channel.endings] == ["b", "a", "c"]
    (answer,) = [message for message in channel.sent if isinstance(message, LimitsAnswer)]
    assert (answer.post_id, answer.ack.revision) == (7, 3)


@pytest.mark.usefixtures("no_time")
def test_adapters_are_loaded_beside_the_steps_and_none_ends_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    arrived = [LoadAdapter(number, path) for number, path in enumerate(("slow", "fine", "broken", "odd"))]
    engine, channel = serve(*arrived, submit("a"), submit("b"), UnloadAdapter(1))
    assert engine.events == [
        *(f"load {number}" for number in range(4)),
        "unload 1",
        "submit a",
        "step",
        "submit b",
        "step",
    ]
    answers = {message.number: message.error for message in channel.sent if isinstance(message, AdapterAnswer)}
    odd = answers.pop(3)
    broken = answers.pop(2)
    assert answers == {1: None}, "the slow one is not there yet"
    assert broken is not None and broken.startswith("it is\\nbroken.x") and len(broken) < 2100
    assert odd is not None and "MemoryError" in odd and "secret" not in odd
    assert "a secret of this machine" in caplog.text


@pytest.mark.usefixtures("no_time")
def test_stop_overtakes_everything() -> None:
    engine, channel = serve(*[submit(name) for name in "abc"], StopEngine())
    assert (engine.events, channel.endings) == ([], [])


@pytest.mark.usefixtures("no_time")
def test_a_refused_request_does_not_leave_the_next_one_waiting() -> None:
    """Nothing runs after the refusal, and the engine must not take that for idleness."""
    engine, channel = serve(submit("bad"), submit("good"))
    assert engine.events == ["submit bad", "submit good", "step"]
    assert [ending.request_id for ending in channel.endings] == ["bad", "good"]


def test_endings_between_two_steps_are_one_message_with_the_state_they_leave() -> None:
    aborts = [Abort(name) for name in "abc"]
    _, channel = serve(*[submit(name) for name in "abc"], *aborts)
    (message,) = [one for one in channel.sent if isinstance(one, StepOutput) and one.endings]
    assert (len(message.endings), message.stats) == (3, step_stats())


@pytest.mark.parametrize("error", [None, RuntimeError("of its own")])
def test_an_engine_whose_api_process_is_gone_ends(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> None:
    """Quietly, unless something else went wrong too."""

    def start(*_: Any, **__: Any) -> StubEngine:
        if error is not None:
            raise error
        return StubEngine()

    monkeypatch.setattr(runner, "start_engine", start)
    monkeypatch.setattr(process, "freeze_startup_objects", lambda: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs, nullcontext() if error is None else pytest.raises(SystemExit):
        run_engine(EngineConfig(model="", served_model_name=""), theirs, Heartbeat(), os.getppid(), 0.0)


def test_what_loading_made_is_left_out_of_garbage_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[int] = []

    class Recorder:
        def __init__(self, *_: Any) -> None: ...

        def serve(self) -> None:
            frozen.append(gc.get_freeze_count())

    monkeypatch.setattr(runner, "start_engine", lambda *_, **__: StubEngine())
    monkeypatch.setattr(process, "EngineProcess", Recorder)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    gc.unfreeze()
    try:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            run_engine(EngineConfig(model="", served_model_name=""), theirs, Heartbeat(), os.getppid(), 0.0)
    finally:
        gc.unfreeze()
    assert frozen[0] > 1000
