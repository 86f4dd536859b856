"""Tries out grammars of clients in processes of their own, which may hang, crash or run out of memory."""

import hashlib
import os
import select
import subprocess
import sys
import time
import weakref
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import BoundedSemaphore, Lock

import msgspec

from flyball_runtime.core.errors import GrammarsBusy, GrammarsUnavailable, InvalidRequest
from flyball_runtime.core.frames import LENGTH, packed
from flyball_runtime.core.grammar import Grammar
from flyball_runtime.grammar.verdict import Verdict

MAX_WORKERS = 2
"""Grammars that are tried at once. Each worker has the vocabulary in memory, and is started when it is first needed."""

MAX_WAITING = 64
START_TIMEOUT_S = 120.0

BUSY = 12
"""Time on the wall for each second of CPU time that a grammar may take."""

MAX_VERDICTS = 1024
MAX_VERDICT_CHARS = 16 * 1024 * 1024
"""Of all grammars whose verdicts are remembered."""

_GONE = (OSError, EOFError, ValueError)
"""What reading from a worker raises that hangs, has ended, or whose pipes ``close()`` has closed meanwhile."""


class GrammarChecker:
    """Says which grammars may go to the engine. Any thread may call it.

    Args:
        model: directory of the checkpoint.
        timeout_s: a grammar that takes more CPU time is refused.
    """

    def __init__(self, model: Path, timeout_s: float) -> None:
        self._model = model
        self._timeout_s = timeout_s
        self._verdicts = _Verdicts()
        self._threads = ThreadPoolExecutor(MAX_WORKERS, thread_name_prefix="flyball-grammar-check")
        self._room = BoundedSemaphore(MAX_WAITING)
        self._workers: set[_Worker] = set()
        self._idle: list[_Worker] = []
        self._closed = False

    def check(self, grammar: Grammar) -> "Future[Grammar]":
        """Return the promise of the grammar in the form to send to the engine.

        Its ``result()`` raises InvalidRequest for a grammar that cannot be used, GrammarsUnavailable if no worker starts.

        Raises:
            GrammarsBusy: too many others wait.
        """
        if (verdict := self._verdicts.find(grammar)) is not None:
            return _settled(verdict)
        if not self._room.acquire(blocking=False):
            raise GrammarsBusy(MAX_WAITING)
        future = self._threads.submit(self._check, grammar)
        future.add_done_callback(lambda _: self._room.release())
        return future

    def close(self) -> None:
        """End the workers; what waits is cancelled."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._closed = True
        for worker in list(self._workers):
            worker.kill()
        self._threads.shutdown()

    def _check(self, grammar: Grammar) -> Grammar:
        verdict = self._verdicts.find(grammar)  # it may have come while this one waited
        if verdict is None:
            verdict = self._ask(grammar)
            self._verdicts.keep(grammar, verdict)
        return _settled(verdict).result()

    def _ask(self, grammar: Grammar) -> Verdict:
        worker = self._idle.pop() if self._idle else None
        if worker is None or worker.has_ended():
            worker = self._start()
        try:
            verdict = worker.ask(grammar)
        except _GONE:
            self._workers.discard(worker)
            worker.kill()
            return Verdict(
                refusal="the schema, regex, choice or grammar cannot be used: it takes too much time or memory to compile "
                f"(--structured-outputs-timeout is {self._timeout_s:g} s of CPU time). Simplify it."
            )
        self._idle.append(worker)
        return verdict

    def _start(self) -> "_Worker":
        worker = _Worker(self._model, self._timeout_s)
        self._workers.add(worker)
        try:
            if self._closed:
                raise EOFError
            worker.wait_ready()
        except _GONE:
            self._workers.discard(worker)
            worker.kill()
            raise GrammarsUnavailable from None
        return worker


def _settled(verdict: Verdict) -> "Future[Grammar]":
    future: Future[Grammar] = Future()
    if verdict.grammar is None:
        future.set_exception(InvalidRequest(verdict.refusal, param="structured_outputs"))
    else:
        future.set_result(verdict.grammar)
    return future


class _Worker:
    """One process. It ends when it is killed, or when this process has gone: then its stdin is closed."""

    def __init__(self, model: Path, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        command = [sys.executable, "-m", "flyball_runtime.grammar.worker", str(model), str(timeout_s)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self._end = weakref.finalize(self, _end, self._process)

    def wait_ready(self) -> None:
        """Raises TimeoutError, or EOFError if the process ends."""
        self._receive(time.monotonic() + START_TIMEOUT_S)

    def ask(self, grammar: Grammar) -> Verdict:
        """Raises TimeoutError; BrokenPipeError or EOFError if the process ends."""
        frame = msgspec.msgpack.encode(grammar)
        stdin = self._process.stdin
        assert stdin is not None, "it is a pipe"
        stdin.write(packed(frame))
        return msgspec.msgpack.decode(self._receive(time.monotonic() + BUSY * self._timeout_s), type=Verdict)

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        self._end()

    def _receive(self, deadline_s: float) -> bytes:
        (length,) = LENGTH.unpack(self._read(LENGTH.size, deadline_s))
        return self._read(length, deadline_s)

    def _read(self, num_bytes: int, deadline_s: float) -> bytes:
        stdout = self._process.stdout
        assert stdout is not None, "it is a pipe"
        received = b""
        while len(received) < num_bytes:
            if not select.select([stdout], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
                raise TimeoutError
            part = os.read(stdout.fileno(), num_bytes - len(received))
            if not part:
                raise EOFError
            received += part
        return received


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()  # in vain if it has ended
    process.communicate()


class _Verdicts:
    """The latest verdicts, by grammar."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._latest: OrderedDict[bytes, tuple[Verdict, int]] = OrderedDict()
        self._num_chars = 0

    def find(self, grammar: Grammar) -> Verdict | None:
        key = _key(grammar)
        with self._lock:
            if key not in self._latest:
                return None
            self._latest.move_to_end(key)
            return self._latest[key][0]

    def keep(self, grammar: Grammar, verdict: Verdict) -> None:
        num_chars = len(verdict.refusal) + (0 if verdict.grammar is None else len(verdict.grammar.text))
        with self._lock:
            _, before = self._latest.pop(_key(grammar), (verdict, 0))
            self._latest[_key(grammar)] = verdict, num_chars
            self._num_chars += num_chars - before
            while len(self._latest) > MAX_VERDICTS or self._num_chars > MAX_VERDICT_CHARS:
                _, (_, freed) = self._latest.popitem(last=False)
                self._num_chars -= freed


def _key(grammar: Grammar) -> bytes:
    return hashlib.blake2b(msgspec.msgpack.encode(grammar), digest_size=32).digest()
