"""The boot prior's file: written by the operator, read once at start."""

import logging
from pathlib import Path

import msgspec

from flyball_protocol import BootPrior

logger = logging.getLogger(__name__)


def read_boot_prior(path: Path) -> BootPrior | None:
    """Return what the file holds; None, and a line in the log, when there is nothing to start with.

    A replica without a prior serves all the same, so nothing that is wrong with the file stops it.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=BootPrior)
    except FileNotFoundError:
        logger.info("--boot-prior %s does not exist (yet): starting with the whole envelope", path)
    except OSError as error:
        logger.error("cannot read --boot-prior %s (%s): starting with the whole envelope", path, error.strerror)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        logger.error(
            '--boot-prior %s is not {"revision": N, "limits": {...}}: %s. Starting with the whole envelope; '
            "correct the file or delete it.",
            *(path, error),
        )
    return None
