"""What people are told: what happens, trouble that lasts, and the lines of the replicas' logs."""

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from flyball_protocol.quoting import lines, one_line

log = logging.getLogger("flyball_operator.local")

MAX_KEPT = 200

LOG_PERIOD_S = 0.2
MAX_LINE_CHARS = 4096
MAX_READ_BYTES = 1 << 20
"""Bytes of one file that are read at a time."""


@dataclass(frozen=True)
class Event:
    """Something that happened. ``time_s`` is wall-clock time (seconds since the epoch)."""

    time_s: float
    text: str


def to_log(event: Event) -> None:
    log.info("%s", event.text)


class Events:
    """Call it with a line, or some: they are kept, and given to the listener, without control characters and cut."""

    def __init__(self, listener: Callable[[Event], None] = to_log) -> None:
        self._listener = listener
        self._kept: deque[Event] = deque(maxlen=MAX_KEPT)

    def __call__(self, text: str) -> None:
        event = Event(time.time(), lines(text))
        self._kept.append(event)
        self._listener(event)

    @property
    def kept(self) -> tuple[Event, ...]:
        return tuple(self._kept)


class Trouble:
    """Lets something fail while the rest goes on; reports the first failure, and the end of them.

    Args:
        what: what is not done while it lasts, such as "decisions are not recorded".
        over: what to say afterwards; it is given the number of failures.
    """

    def __init__(self, report: Callable[[str], None], what: str, over: Callable[[int], str]) -> None:
        self._report = report
        self._what = what
        self._over = over
        self._num_failures = 0

    @contextlib.contextmanager
    def tolerated(self) -> Iterator[None]:
        """Catch an OSError of the block. The first one is reported, and the end of their row."""
        try:
            yield
        except OSError as error:
            self._num_failures += 1
            if self._num_failures == 1:
                self._report(f"{self._what}: {one_line(str(error))}; everything else goes on")
        else:
            if self._num_failures:
                self._report(self._over(self._num_failures))
            self._num_failures = 0


def find_last_lines(log_dir: Path, num_lines: int) -> dict[Path, int]:
    """Return, for each log file, the offset in bytes of its last ``num_lines`` complete lines. Raises OSError."""
    return {path: _offset_of_last_lines(path, num_lines) for path in sorted(log_dir.glob("*.log"))}


def pass_on(offsets: dict[Path, int], echo: Callable[[str, str], None]) -> None:
    """Give ``echo`` what the files hold from their offsets on, and move the offsets to the ends. Raises OSError."""
    for path in offsets:
        while (end := _pass_on(path, offsets[path], echo)) != offsets[path]:
            offsets[path] = end


async def follow_logs(
    log_dir: Path,
    echo: Callable[[str, str], None],
    report: Callable[[str], None],
    offsets: dict[Path, int] | None = None,
) -> None:
    """Give ``echo`` the file's name and each complete line as it is written; ends when cancelled.

    Lines are without control characters: what a process logs, a client may have said.

    Args:
        offsets: where to begin in each file, in bytes; None begins at the ends. A file that is new is read from its start.
    """
    if offsets is None:
        offsets = {path: path.stat().st_size for path in log_dir.glob("*.log")}
    trouble = Trouble(report, "the replicas' logs are not shown", lambda _: "the replicas' logs are shown again")
    while True:
        with trouble.tolerated():
            for path in sorted(log_dir.glob("*.log")):
                offsets[path] = _pass_on(path, offsets.get(path, 0), echo)
        await asyncio.sleep(LOG_PERIOD_S)


def _pass_on(path: Path, offset: int, echo: Callable[[str, str], None]) -> int:
    with path.open("rb") as log:
        log.seek(offset)
        read = log.read(MAX_READ_BYTES)
    complete, newline, _ = read.rpartition(b"\n")
    if len(read) == MAX_READ_BYTES and not newline:
        complete = read
    for line in complete.decode("utf-8", "replace").splitlines():
        echo(path.stem, one_line(line, MAX_LINE_CHARS))
    return offset + len(complete) + len(newline)


def _offset_of_last_lines(path: Path, num_lines: int) -> int:
    """Read the file backwards until a newline more than ``num_lines`` has been found."""
    num_left = num_lines + 1
    with path.open("rb") as log:
        position = log.seek(0, os.SEEK_END)
        while position:
            start = max(0, position - MAX_READ_BYTES)
            log.seek(start)
            block = log.read(position - start)
            if (num_newlines := block.count(b"\n")) >= num_left:
                index = len(block)
                for _ in range(num_left):
                    index = block.rindex(b"\n", 0, index)
                return start + index + 1
            num_left, position = num_left - num_newlines, start
    return 0
