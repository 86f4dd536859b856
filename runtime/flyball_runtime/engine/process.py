"""The engine process: the messages that it exchanges with the API process, and its loop."""

import faulthandler
import logging
import os
import signal
import socket
import threading
import time
import traceback
from collections import OrderedDict
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct, structs

from flyball_protocol import LimitsAck, LimitsReport, LimitsUpdate
from flyball_protocol.quoting import MAX_MESSAGE_LINE_CHARS, one_line
from flyball_runtime.core.config import EngineConfig
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.memory import freeze_startup_objects
from flyball_runtime.core.request import Failed, Finished, Request
from flyball_runtime.core.stats import EngineInfo, StepOutput
from flyball_runtime.engine.adapters import AdapterAnswer, LoadAdapter, UnloadAdapter
from flyball_runtime.engine.channel import Disconnected, EngineEnd
from flyball_runtime.engine.heartbeat import Heartbeat

if TYPE_CHECKING:
    from flyball_runtime.engine.engine import Engine


logger = logging.getLogger(__name__)


class Submit(Struct, frozen=True, tag=True):
    request: Request


class Abort(Struct, frozen=True, tag=True):
    request_id: str


class PostLimits(Struct, frozen=True, tag=True):
    """``post_id`` comes back in the LimitsAnswer to this post."""

    post_id: int
    update: LimitsUpdate


class StopEngine(Struct, frozen=True, tag=True):
    """Leave the loop now; whatever still runs is dropped (the client has answered for it)."""


ToEngine = Submit | Abort | PostLimits | StopEngine | LoadAdapter | UnloadAdapter


class _RequestId(Struct, frozen=True):
    request_id: str


class SubmitHead(Struct, frozen=True, tag="Submit"):
    """A Submit of which only the id was decoded."""

    request: _RequestId


class Ready(Struct, frozen=True, tag=True):
    info: EngineInfo
    limits: LimitsReport


class LimitsAnswer(Struct, frozen=True, tag=True):
    post_id: int
    ack: LimitsAck
    limits: LimitsReport


class LimitsMoved(Struct, frozen=True, tag=True):
    """The limits changed without a post: a lease ran out."""

    limits: LimitsReport


class Died(Struct, frozen=True, tag=True):
    """The engine's last words. ``is_config_error``: start-up was impossible as configured."""

    reason: str
    is_config_error: bool


FromEngine = Ready | StepOutput | LimitsAnswer | LimitsMoved | AdapterAnswer | Died

_encoder = msgspec.msgpack.Encoder()
_submit = msgspec.msgpack.Decoder(Submit)
_head_to_engine = msgspec.msgpack.Decoder(SubmitHead | Abort | PostLimits | StopEngine | LoadAdapter | UnloadAdapter)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def encode_message(message: ToEngine | FromEngine) -> bytes:
    return _encoder.encode(message)


def decode_submit(frame: bytes) -> Submit:
    return _submit.decode(frame)


def decode_head_to_engine(frame: bytes) -> SubmitHead | ToEngine:
    """Decode a message, of a Submit no more than its id: the rest takes time in proportion to the prompt."""
    return _head_to_engine.decode(frame)


def decode_from_engine(frame: bytes) -> FromEngine:
    return _from_engine.decode(frame)


IDLE_S = 0.5
"""How long an idle engine waits for a message before it looks after leases and its parent and sends its state."""

LOADING_S = 0.01
"""The same while an adapter is being loaded."""

STACKS_SIGNAL = signal.SIGUSR1
"""Has the engine write to the log what each of its threads is doing."""

ARRIVALS_S = 0.005
"""How long the sequences that run wait for new requests to be taken in between two steps. A request takes tens of
microseconds, a prompt of 100,000 tokens some milliseconds; a burst of them would stop every stream."""


def run_engine(
    config: EngineConfig, connection: socket.socket, heartbeat: Heartbeat, parent_pid: int, spawned_at_s: float
) -> None:
    """Entry point of the process. Its last message is Died when it ends for any reason but StopEngine.

    Args:
        connection: to the API process, by the frames of ``channel.py``.
        parent_pid: the API process; the engine ends when that is gone, also if it went while the model was loading.
        spawned_at_s: ``time.time()`` when the process was asked for; what passed since then went into imports.
    """
    answer_stacks_signal()
    # Here, because the API process imports this module too and has no use for torch.
    from flyball_runtime.engine.runner import start_engine

    import_s = time.time() - spawned_at_s
    # Terminals send Ctrl-C, and systemd and some inits SIGTERM, to the whole group; when to stop is the API process's
    # decision, which ends this one by StopEngine, by SIGKILL or by its own end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    channel = EngineEnd(connection)
    try:
        engine = start_engine(config, import_s=import_s, on_progress=heartbeat.beat, owns_process=True)
        freeze_startup_objects()
        EngineProcess(engine, channel, heartbeat, parent_pid).serve()
    except Disconnected:
        return  # the API process is gone, and with it whoever would want an answer
    except ConfigError as error:
        _say_last(channel, Died(str(error), is_config_error=True))
        raise SystemExit(1) from None
    except Exception as error:  # noqa: BLE001 - the loop's boundary: say why, then die loudly
        logger.critical("the engine died:\n%s", traceback.format_exc())
        _say_last(channel, Died(f"{type(error).__name__}: {error}", is_config_error=False))
        raise SystemExit(1) from None


def answer_stacks_signal() -> None:
    """Have a thread of its own answer STACKS_SIGNAL. To be called before there are other threads: they must block it too.

    The thread writes while it holds Python's lock, so that no stack changes meanwhile. Written by the signal's handler
    (``faulthandler.register``), stacks of threads that run have crashed the engine (python/cpython#116008), just when it had
    come back. The price: while native code that never returns holds the lock, nothing is written.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {STACKS_SIGNAL})
    threading.Thread(target=_write_stacks_when_asked, name="flyball-stacks", daemon=True).start()


def _write_stacks_when_asked() -> None:
    while True:
        signal.sigwait({STACKS_SIGNAL})
        faulthandler.dump_traceback()


def _say_last(channel: EngineEnd, died: Died) -> None:
    with suppress(Disconnected):
        channel.send(encode_message(died))


class EngineProcess:
    """Serves an engine over a channel until StopEngine, or until the API process is gone."""

    def __init__(self, engine: "Engine", channel: EngineEnd, heartbeat: Heartbeat, parent_pid: int) -> None:
        self._engine = engine
        self._channel = channel
        self._heartbeat = heartbeat
        self._parent_pid = parent_pid
        self._arrivals: OrderedDict[str, bytes] = OrderedDict()  # Submit frames by request id
        self._endings: list[Finished | Failed] = []
        self._loading: dict[int, Future[None]] = {}  # adapters, by number
        self._next_state_s = 0.0
        self._stopped = False

    def serve(self) -> None:
        self._heartbeat.beat()  # before Ready, from which on the API process judges its age
        self._send(Ready(self._engine.info, self._engine.limits()))
        while not self._stopped and os.getppid() == self._parent_pid:
            self._heartbeat.beat()
            self._receive()
            if not self._stopped:
                self._turn()

    def _turn(self) -> None:
        self._take_arrivals()
        self._send_endings()
        if self._loading:
            self._send_adapter_answers()
        if (moved := self._engine.tick()) is not None:
            self._send(LimitsMoved(moved))
        if self._engine.has_work():
            self._send_output(self._engine.step())
        elif not self._arrivals:
            self._idle()

    def _receive(self) -> None:
        """Take every message. New requests are put aside, so that what comes behind them does not wait for them."""
        for frame in self._channel.receive():
            self._handle(decode_head_to_engine(frame), frame)
            if self._stopped:
                return

    def _handle(self, head: SubmitHead | ToEngine, frame: bytes) -> None:
        match head:
            case SubmitHead(request):
                self._arrivals[request.request_id] = frame
            case Abort(request_id):
                self._abort(request_id)
            case PostLimits(post_id, update):
                ack = self._engine.post_limits(update)
                self._send_state()  # before the answer, so that metrics show the limits to whoever waited for it
                self._send(LimitsAnswer(post_id, ack, self._engine.limits()))
            case LoadAdapter(number, path):
                self._loading[number] = self._engine.load_adapter(number, path)
            case UnloadAdapter(number):
                self._engine.unload_adapter(number)
            case StopEngine():
                self._stopped = True

    def _take_arrivals(self) -> None:
        """Hand new requests to the engine: one at least, and as many as there is time for."""
        deadline_s = time.monotonic() + ARRIVALS_S
        while self._arrivals:
            _, frame = self._arrivals.popitem(last=False)
            if (failed := self._engine.submit(decode_submit(frame).request)) is not None:
                self._endings.append(failed)
            if time.monotonic() >= deadline_s:
                return

    def _abort(self, request_id: str) -> None:
        if (frame := self._arrivals.pop(request_id, None)) is not None:
            num_prompt_tokens = len(decode_submit(frame).request.prompt_token_ids)
            self._endings.append(Finished(request_id, "abort", num_prompt_tokens, 0))
        elif (finished := self._engine.abort(request_id)) is not None:
            self._endings.append(finished)

    def _send_endings(self) -> None:
        """Send what ended between two steps, with the state that it leaves."""
        if self._endings:
            self._send_output(StepOutput([], [], self._endings, self._engine.state()))
            self._endings = []

    def _send_adapter_answers(self) -> None:
        for number, loading in list(self._loading.items()):
            if loading.done():
                del self._loading[number]
                self._send(AdapterAnswer(number, _why_not(loading)))

    def _idle(self) -> None:
        """Wait for a message, a while at most; send the state now and then."""
        if time.monotonic() >= self._next_state_s:
            self._send_state()
            self._next_state_s = time.monotonic() + IDLE_S
        self._channel.wait(LOADING_S if self._loading else IDLE_S)

    def _send_state(self) -> None:
        self._send_output(StepOutput([], [], [], self._engine.state()))

    def _send_output(self, output: StepOutput) -> None:
        """Send an output; requests that the engine has not been handed yet wait as well."""
        if self._arrivals:
            stats = structs.replace(output.stats, num_waiting=output.stats.num_waiting + len(self._arrivals))
            output = structs.replace(output, stats=stats)
        self._send(output)

    def _send(self, message: FromEngine) -> None:
        self._channel.send(encode_message(message))


def _why_not(loading: Future[None]) -> str | None:
    """Return why an adapter could not be loaded. Whatever it is, the engine goes on."""
    error = loading.exception()
    if error is None or isinstance(error, ConfigError):
        return None if error is None else one_line(str(error), MAX_MESSAGE_LINE_CHARS)
    logger.error("cannot load an adapter", exc_info=error)
    return f"it cannot be loaded ({type(error).__name__}); the log of this server has the reason."
