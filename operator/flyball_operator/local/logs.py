"""The replicas' log files, passed on line by line as they grow."""

import asyncio
from collections.abc import Callable
from pathlib import Path

PERIOD_S = 0.2


async def follow_logs(log_dir: Path, echo: Callable[[str, str], None]) -> None:
    """Give ``echo`` the file's name and each complete line that is written from now on; ends when cancelled."""
    offsets = {path: path.stat().st_size for path in log_dir.glob("*.log")}
    while True:
        for path in sorted(log_dir.glob("*.log")):
            offsets[path] = _pass_on(path, offsets.get(path, 0), echo)
        await asyncio.sleep(PERIOD_S)


def _pass_on(path: Path, offset: int, echo: Callable[[str, str], None]) -> int:
    with path.open("rb") as log:
        log.seek(offset)
        complete, newline, _ = log.read().rpartition(b"\n")
    for line in complete.decode("utf-8", "replace").splitlines():
        echo(path.stem, line)
    return offset + len(complete) + len(newline)
