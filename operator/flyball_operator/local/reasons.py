"""Network errors in a few words."""

import errno
import os

import aiohttp

from flyball_protocol.quoting import one_line


def in_words(error: Exception) -> str:
    """Return what went wrong, without the address that the reader knows already."""
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno:
        return os.strerror(error.os_error.errno).lower()
    return one_line(f"{type(error).__name__}: {error}".rstrip(": "))


def out_of_files(error: Exception) -> bool:
    """Return whether this process has no file handle left, which says nothing about whom it wanted to ask."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    return isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE)
