"""Network errors in a few words."""

import os

import aiohttp


def in_words(error: Exception) -> str:
    """Return what went wrong, without the address that the reader knows already."""
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno:
        return os.strerror(error.os_error.errno).lower()
    return f"{type(error).__name__}: {error}".rstrip(": ")
