"""The condition of a process before and after an attack: memory, file handles, log."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MOST_LOG_LINE_CHARS = 2048
RSS_SLACK_BYTES = 64 << 20
"""What an allocator may keep of what an attack made it take."""

FDS_SLACK = 4
"""Connections that tests keep alive."""

_CONTROL = re.compile(rb"[\x00-\x08\x0b-\x1f\x7f]|\xc2[\x80-\x9f]|\xe2\x80[\xa8\xa9\xaa-\xae]|\xe2\x81[\xa6-\xa9]")
"""Bytes that a terminal or a log reader obeys: C0 but for tab and newline, C1, line separators, changes of direction."""


@dataclass(frozen=True)
class Usage:
    rss_bytes: int
    num_fds: int

    def is_near(self, before: "Usage") -> bool:
        return self.rss_bytes <= before.rss_bytes + RSS_SLACK_BYTES and self.num_fds <= before.num_fds + FDS_SLACK


def usage(pids: Sequence[int]) -> Usage:
    """Return what these processes have together."""
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids]
    fds = [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids]
    return Usage(sum(pages) * 4096, sum(fds))


def log_problems(said: bytes) -> list[str]:
    """Return what must never be in a log, whatever was sent: tracebacks, control bytes, endless lines, forged lines."""
    problems = []
    if (begin := said.find(b"Traceback")) >= 0:
        problems.append(f"a traceback: {said[begin : begin + 6000].decode(errors='replace')}")
    if found := _CONTROL.search(said):
        problems.append(f"the control byte {found[0]!r} in {said[max(0, found.start() - 100) : found.end() + 100]!r}")
    if (longest := max(map(len, said.split(b"\n")))) > MOST_LOG_LINE_CHARS:
        problems.append(f"a line of {longest} bytes")
    if b"\n" + FORGED.encode() in said:
        problems.append("a line that a client wrote")
    return problems


FORGED = "FORGED"
"""What attacks put after a newline: at the beginning of a line of a log it is a line that a client wrote."""
