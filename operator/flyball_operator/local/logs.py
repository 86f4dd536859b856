"""The replicas' log files, passed on line by line as they grow."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from flyball_operator.local.trouble import Trouble
from flyball_protocol.quoting import one_line

PERIOD_S = 0.2
MAX_LINE_CHARS = 4096
MAX_READ_BYTES = 1 << 20
"""Bytes of one file that are read at a time."""


async def follow_logs(log_dir: Path, echo: Callable[[str, str], None], report: Callable[[str], None]) -> None:
    """Give ``echo`` the file's name and each complete line that is written from now on; ends when cancelled.

    Lines are without control characters: what a process logs, a client may have said.
    """
    offsets = {path: path.stat().st_size for path in log_dir.glob("*.log")}
    trouble = Trouble(report, "the replicas' logs are not shown", lambda _: "the replicas' logs are shown again")
    while True:
        with trouble.tolerated():
            for path in sorted(log_dir.glob("*.log")):
                offsets[path] = _pass_on(path, offsets.get(path, 0), echo)
        await asyncio.sleep(PERIOD_S)


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
