"""Server-sent events, as OpenAI servers write them."""


class SSEParser:
    """Turns packets into the data of whole events, in order.

    Works on bytes, so a packet may end inside an event, a line ending or a UTF-8 character. Lines end in LF or CRLF.
    Comments and the fields ``event``, ``id`` and ``retry`` are skipped. Follows the WHATWG HTML standard, section
    "Server-sent events", but for the lone CR line ending, which no such server sends.
    """

    __slots__ = ("_data", "_rest")

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, packet: bytes) -> list[bytes]:
        """The data of every event that this packet completes."""
        *lines, self._rest = (self._rest + packet).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
        return events
