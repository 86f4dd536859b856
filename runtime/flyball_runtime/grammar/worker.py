"""The process that tries out grammars: ``python -m flyball_runtime.grammar.worker CHECKPOINT SECONDS``.

It reads Grammars from stdin and answers each with a Verdict on stdout; a length precedes each. If a grammar takes more than
SECONDS of CPU time, SIGPROF ends the process. Wall-clock time would depend on how busy the machine is.
"""

import contextlib
import os
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import BinaryIO

import msgspec

from flyball_runtime.core.errors import FlyballError
from flyball_runtime.core.frames import LENGTH, packed
from flyball_runtime.core.grammar import Grammar
from flyball_runtime.grammar.compiler import GrammarCompiler, no_vocabulary
from flyball_runtime.grammar.verdict import Verdict

STACK_BYTES = 1024 * 1024
"""Smaller than the stack of any thread that compiles the same grammar later, so that what fits here fits there."""

MEMORY_BYTES = 256 * 1024 * 1024
"""Memory that a grammar may take, beside the vocabulary."""

NICENESS = 5
"""The steps of the engine come first."""


def main() -> None:
    inbox, outbox = os.fdopen(0, "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints of libraries go to stderr, not into the answers
    os.nice(NICENESS)
    for number in (signal.SIGINT, signal.SIGTERM):  # they go to the whole group; this process ends with its stdin
        signal.signal(number, signal.SIG_IGN)
    threading.stack_size(STACK_BYTES)
    compiler = GrammarCompiler.of_checkpoint(Path(sys.argv[1]))
    _limit_memory()
    _send(outbox, b"")
    while frame := _receive(inbox):
        grammar = msgspec.msgpack.decode(frame, type=Grammar)
        verdicts: list[Verdict] = []
        thread = threading.Thread(target=lambda one=grammar, to=verdicts: to.append(_judge(compiler, one)))
        signal.setitimer(signal.ITIMER_PROF, float(sys.argv[2]))
        thread.start()
        thread.join()
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(outbox, msgspec.msgpack.encode(verdicts[0]))


def _judge(compiler: GrammarCompiler | None, grammar: Grammar) -> Verdict:
    try:
        if compiler is None:
            raise no_vocabulary()
        return Verdict(compiler.try_out(grammar))
    except FlyballError as error:
        return Verdict(refusal=str(error))


def _limit_memory() -> None:
    """Under Linux, allow the process MEMORY_BYTES more than it has, and make it the OOM killer's first choice."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
        num_pages = int(Path("/proc/self/statm").read_text().split()[5])  # data and stacks
        most = num_pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _receive(inbox: BinaryIO) -> bytes:
    head = inbox.read(LENGTH.size)
    return inbox.read(*LENGTH.unpack(head)) if len(head) == LENGTH.size else b""


def _send(outbox: BinaryIO, frame: bytes) -> None:
    outbox.write(packed(frame))
    outbox.flush()


if __name__ == "__main__":
    main()
