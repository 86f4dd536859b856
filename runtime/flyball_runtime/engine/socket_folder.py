"""The folder of the sockets between the API process and its engine."""

import logging
import os
import tempfile
from pathlib import Path

import zmq

from flyball_runtime.core.errors import ConfigError

logger = logging.getLogger(__name__)

SHORT_FOLDER = Path("/tmp")
PREFIX = "flyball-"
_MAX_PARENT_BYTES = zmq.IPC_PATH_MAX_LEN - len(f"/{PREFIX}12345678/from")


def make_socket_folder() -> Path:
    """Make a folder that only this user can open, in TMPDIR, or in /tmp when TMPDIR leaves no room for a socket's path.

    Raises:
        ConfigError: it cannot be made.
    """
    parent = Path(tempfile.gettempdir())
    if len(os.fsencode(parent)) > _MAX_PARENT_BYTES:
        logger.warning("TMPDIR has more than %d bytes; sockets are in %s", _MAX_PARENT_BYTES, SHORT_FOLDER)
        parent = SHORT_FOLDER
    try:
        return Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    except OSError as error:
        raise ConfigError(
            f"cannot make a folder for sockets in {parent} ({error.strerror}). Set TMPDIR to a folder that can be written "
            f"and has a path of at most {_MAX_PARENT_BYTES} bytes."
        ) from None
