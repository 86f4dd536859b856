"""How the runtime gets its port from ``flyball listener``."""

import contextlib
import logging
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from flyball_runtime.core.errors import ConfigError

logger = logging.getLogger(__name__)

HANDED_OVER = b"."
"""What comes with the socket: a descriptor does not travel without a byte."""

WAIT_S = 15.0
"""How long a holder may take that was started at the same time, or that waits for a dead runtime's port."""

_RETRY_S = 0.1


@contextlib.contextmanager
def taken_listener(path: Path) -> Iterator[socket.socket]:
    """Give the listening socket from the holder at ``path``, which takes it as given back at the end of the block.

    Raises:
        ConfigError: there is no holder for 15 s.
    """
    with _connect(path) as holder:
        _, descriptors, _, _ = socket.recv_fds(holder, len(HANDED_OVER), 1)
        if not descriptors:
            raise ConfigError(f"the listener at {path} ended before it gave its port. Its container's log says why.")
        with socket.socket(fileno=descriptors[0]) as listener:
            yield listener


def _connect(path: Path) -> socket.socket:
    deadline_s = time.monotonic() + WAIT_S
    while True:
        holder = socket.socket(socket.AF_UNIX)
        try:
            holder.connect(str(path))
        except OSError as error:
            holder.close()
            if time.monotonic() > deadline_s:
                raise ConfigError(
                    f"no listener answers at {path} ({error.strerror}) for {WAIT_S:g} s. Is the container 'listener' running?"
                ) from None
            time.sleep(_RETRY_S)
        else:
            return holder
