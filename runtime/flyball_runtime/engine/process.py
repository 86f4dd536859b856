"""The engine process: one loop that drains its inbox, steps, and sends what came of it."""

import logging
import os
import signal
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING

import zmq

from flyball_runtime.core.config import EngineConfig
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.engine import messages
from flyball_runtime.engine.heartbeat import Heartbeat

if TYPE_CHECKING:
    from flyball_runtime.engine.engine import Engine

logger = logging.getLogger(__name__)

IDLE_S = 0.5
"""How long an idle engine waits for a message before it looks after leases and its parent and sends its state."""


@dataclass(frozen=True)
class Addresses:
    """ZeroMQ endpoints, both bound by the client."""

    to_engine: str
    from_engine: str


def run_engine(
    config: EngineConfig, addresses: Addresses, heartbeat: Heartbeat, parent_pid: int, spawned_at_s: float
) -> None:
    """Entry point of the process. Its last message is Died when it ends for any reason but Stop.

    Args:
        parent_pid: the API process; the engine ends when that is gone, also if it went while the model was loading.
        spawned_at_s: ``time.time()`` when the process was asked for; what passed since then went into imports.
    """
    # Here, because the API process imports this module too and has no use for torch.
    from flyball_runtime.engine.engine import Engine

    import_s = time.time() - spawned_at_s
    # Terminals send Ctrl-C, and systemd and some inits SIGTERM, to the whole group; when to stop is the API process's
    # decision, which ends this one by Stop, by SIGKILL or by its own end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    inbox.set_hwm(0)
    outbox.set_hwm(0)
    inbox.connect(addresses.to_engine)
    outbox.connect(addresses.from_engine)
    try:
        engine = Engine(config, import_s=import_s, on_progress=heartbeat.beat)
        EngineProcess(engine, inbox, outbox, heartbeat, parent_pid).serve()
    except ConfigError as error:
        outbox.send(messages.encode(messages.Died(str(error), is_config_error=True)))
        raise SystemExit(1) from None
    except Exception as error:  # noqa: BLE001 - the loop's boundary: say why, then die loudly
        logger.critical("the engine died:\n%s", traceback.format_exc())
        outbox.send(messages.encode(messages.Died(f"{type(error).__name__}: {error}", is_config_error=False)))
        raise SystemExit(1) from None
    finally:
        context.destroy(linger=1000)


class EngineProcess:
    """Serves an engine over two sockets until Stop, or until the API process is gone."""

    def __init__(
        self, engine: "Engine", inbox: zmq.Socket, outbox: zmq.Socket, heartbeat: Heartbeat, parent_pid: int
    ) -> None:
        self._engine = engine
        self._inbox = inbox
        self._outbox = outbox
        self._heartbeat = heartbeat
        self._parent_pid = parent_pid
        self._next_state_s = 0.0
        self._stopped = False

    def serve(self) -> None:
        self._send(messages.Ready(self._engine.info, self._engine.limits()))
        while not self._stopped and os.getppid() == self._parent_pid:
            self._heartbeat.beat()
            self._drain_inbox()
            if (moved := self._engine.tick()) is not None:
                self._send(messages.LimitsMoved(moved))
            if self._engine.has_work():
                self._send(self._engine.step())
            else:
                self._idle()

    def _drain_inbox(self) -> None:
        while not self._stopped:
            try:
                frame = self._inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(messages.decode_to_engine(frame))

    def _handle(self, message: messages.ToEngine) -> None:
        match message:
            case messages.Submit(request):
                if (failed := self._engine.submit(request)) is not None:
                    self._send(messages.StepOutput([], [], [failed], None))
            case messages.Abort(request_id):
                if (finished := self._engine.abort(request_id)) is not None:
                    self._send(messages.StepOutput([], [], [finished], self._engine.state()))
            case messages.PostLimits(post_id, update):
                ack = self._engine.post_limits(update)
                self._send_state()  # before the answer, so that metrics show the limits to whoever waited for it
                self._send(messages.LimitsAnswer(post_id, ack, self._engine.limits()))
            case messages.Stop():
                self._stopped = True

    def _idle(self) -> None:
        """Wait for a message, a while at most; send the state now and then."""
        if time.monotonic() >= self._next_state_s:
            self._send_state()
            self._next_state_s = time.monotonic() + IDLE_S
        self._inbox.poll(IDLE_S * 1000)

    def _send_state(self) -> None:
        self._send(messages.StepOutput([], [], [], self._engine.state()))

    def _send(self, message: messages.FromEngine) -> None:
        self._outbox.send(messages.encode(message))
