"""Requests that are no HTTP, or not quite."""

BODY = b'{"prompt": [5, 6], "max_tokens": 2, "temperature": 0}'
LENGTH = f"Content-Length: {len(BODY)}"


def request(line: str, *headers: str, body: bytes = b"") -> bytes:
    """Return a request from its lines."""
    return "\r\n".join([line, *headers, "", ""]).encode("latin-1") + body


POST = "POST /v1/completions HTTP/1.1"
MALFORMED: dict[str, bytes] = {
    "nothing": b"\r\n\r\n",
    "not HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/0.9": b"GET /livez\r\n\r\n",
    "HTTP/9.9": request("GET /livez HTTP/9.9", "Host: t"),
    "no host": request("GET /livez HTTP/1.1"),
    "two hosts": request("GET /livez HTTP/1.1", "Host: a", "Host: b"),
    "a space in a name": request("GET /livez HTTP/1.1", "Host : t"),
    "a control byte": request("GET /livez HTTP/1.1", "Host: t", "X-A: \x00\x1b[31m"),
    "a folded header": request("GET /livez HTTP/1.1", "Host: t", "X-A: b", "  c: d"),
    "a header without a colon": request("GET /livez HTTP/1.1", "Host: t", "nonsense"),
    "a long header": request("GET /livez HTTP/1.1", "Host: t", "X-A: " + "b" * 100_000),
    "many headers": request("GET /livez HTTP/1.1", "Host: t", *(f"X-{i}: b" for i in range(5000))),
    "a long target": request(f"GET /{'a' * 100_000} HTTP/1.1", "Host: t"),
    "a line feed in the target": b"GET /a\nFORGED HTTP/1.1\r\nHost: t\r\n\r\n",
    "a target that is no path": request("GET http://[::1 HTTP/1.1", "Host: t"),
    "a negative length": request(POST, "Host: t", "Content-Length: -1", body=BODY),
    "a length that is no number": request(POST, "Host: t", "Content-Length: 0x10", body=BODY),
    "a length of 5,000 digits": request(POST, "Host: t", "Content-Length: " + "9" * 5000, body=BODY),
    "a length of other digits": request(POST, "Host: t", "Content-Length: \xb2\xb3", body=BODY),
    "two lengths": request(POST, "Host: t", LENGTH, "Content-Length: 1", body=BODY),
    "length and chunks": request(POST, "Host: t", LENGTH, "Transfer-Encoding: chunked", body=b"0\r\n\r\n" + BODY),
    "an unknown encoding": request(POST, "Host: t", "Transfer-Encoding: gzip, chunked", body=BODY),
    "chunks twice": request(POST, "Host: t", "Transfer-Encoding: chunked, chunked", body=b"0\r\n\r\n"),
    "a chunk of no length": request(POST, "Host: t", "Transfer-Encoding: chunked", body=b"xyz\r\n"),
    "a chunk of negative length": request(POST, "Host: t", "Transfer-Encoding: chunked", body=b"-1\r\n\r\n"),
    "a chunk of endless length": request(POST, "Host: t", "Transfer-Encoding: chunked", body=b"f" * 5000 + b"\r\n"),
    "a trailer that is bad": request(POST, "Host: t", "Transfer-Encoding: chunked", body=b"0\r\n\x00: \x01\r\n\r\n"),
    "an upgrade": request("GET /livez HTTP/1.1", "Host: t", "Connection: Upgrade", "Upgrade: websocket"),
    "CONNECT": request("CONNECT example.org:443 HTTP/1.1", "Host: t"),
    "TRACE": request("TRACE / HTTP/1.1", "Host: t"),
    "an asterisk": request("OPTIONS * HTTP/1.1", "Host: t"),
}
