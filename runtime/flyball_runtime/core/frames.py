"""Frames on a stream of bytes: the length, four bytes, little-endian, then so many bytes."""

import struct

LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 2**32 - 1


def packed(frame: bytes) -> bytes:
    """Return a frame as it is sent.

    Raises:
        ValueError: it is longer than ``MAX_FRAME_BYTES``.
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise ValueError(f"a message has {len(frame)} bytes; the most is {MAX_FRAME_BYTES}.")
    return LENGTH.pack(len(frame)) + frame
