"""JSON for server-sent events: on one line, whatever the reader takes for the end of one."""

from typing import Any

import msgspec

# Line ends to some readers of lines (Python's str.splitlines), though not to server-sent events; JSON may escape them.
_LINE_ENDS = {char: f"\\u{char:04x}".encode() for char in (0x85, 0x2028, 0x2029)}


def json_line(value: str | dict[str, Any] | None) -> bytes:
    body = msgspec.json.encode(value)
    if not body.isascii():
        for char, escape in _LINE_ENDS.items():
            body = body.replace(chr(char).encode(), escape)
    return body
