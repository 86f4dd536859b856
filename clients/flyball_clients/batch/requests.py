"""The input file: one request a line, checked as a whole before the first one is sent.

Only the names of the requests and their places in the file are remembered, in a temporary database, so a file may be larger
than memory.
"""

import sqlite3
from collections.abc import Generator, Iterator
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, BinaryIO, Self

import msgspec
from msgspec import Meta, Struct

from flyball_clients.errors import ConfigError
from flyball_protocol.quoting import one_line, quoted

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/score")
MAX_SHOWN = 10
"""Wrong lines that an error lists."""

_CACHE_KIB = 65536
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""With which some programs begin a file in UTF-8."""


class BatchRequest(Struct, frozen=True):
    """A line of the input, of which other fields than these are left alone."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=1024)]
    method: str
    url: str
    body: msgspec.Raw


class _Body(Struct):
    stream: Any = None


class BadLine(ConfigError):
    """A line of the input that is no request."""


_decoder = msgspec.json.Decoder(BatchRequest)
_body_decoder = msgspec.json.Decoder(_Body)


def parse_request(line: bytes) -> BatchRequest:
    """Return the request of a line. Raises BadLine."""
    try:
        request = _decoder.decode(line.removeprefix(_BYTE_ORDER_MARK))
        body = _body_decoder.decode(request.body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadLine(f"it is not a request: {one_line(str(error))}") from None
    if request.url not in URLS:
        raise BadLine(f"its url is {quoted(request.url)}; it must be one of {', '.join(URLS)}")
    if request.method != "POST":
        raise BadLine(f"its method is {quoted(request.method)}; it must be POST")
    if body.stream:
        raise BadLine("its body asks for a stream, which a batch cannot have; leave stream out")
    return request


class InputFile:
    """The input, open for reading. Use as ``with InputFile(path, max_line_bytes) as source``.

    Raises:
        ConfigError: it cannot be read.
    """

    def __init__(self, path: Path, max_line_bytes: int) -> None:
        self.path = path
        self._max_line_bytes = max_line_bytes
        if not path.is_file():
            raise ConfigError(f"the input {path} {'is not a file' if path.exists() else 'does not exist'}.")
        try:
            self._file: BinaryIO = path.open("rb")
        except OSError as error:
            raise ConfigError(f"cannot read the input {path}: {error.strerror}.") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._file.close()

    def check(self, index: "Index") -> None:
        """Put all requests into the index. Raises ConfigError, which lists the first wrong lines, if there is any."""
        problems, num_bad = [], 0
        for number, (offset, line) in enumerate(self._lines(), 1):
            try:
                self._add(index, number, offset, line)
            except BadLine as error:
                num_bad += 1
                if num_bad <= MAX_SHOWN:
                    problems.append(f"line {number}: {error}.")
        if num_bad > MAX_SHOWN:
            problems.append(f"and {num_bad - MAX_SHOWN} more.")
        if problems:
            raise ConfigError("\n".join([f"{self.path} has wrong lines, so no request was sent:", *problems]))
        if not index.total:
            raise ConfigError(f"{self.path} has no requests.")

    def _add(self, index: "Index", number: int, offset: int, line: bytes) -> None:
        if len(line) > self._max_line_bytes:
            raise BadLine(f"it has more than {self._max_line_bytes} bytes; shorten it or raise --max-body-bytes")
        if line.strip():
            index.add(parse_request(line).custom_id, offset, number)

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield each line with its place in the file; of a line that is too long only the beginning."""
        offset = 0
        while line := self._file.readline(self._max_line_bytes + 1):
            yield offset, line
            while not line.endswith(b"\n") and (line := self._file.readline(self._max_line_bytes + 1)):
                pass
            offset = self._file.tell()

    def read(self, custom_id: str, offset: int) -> BatchRequest:
        """Return the request at a place. Raises ConfigError if it is not there any more."""
        self._file.seek(offset)
        try:
            request = parse_request(self._file.readline(self._max_line_bytes))
        except BadLine:
            request = None
        if request is None or request.custom_id != custom_id:
            raise ConfigError(f"{self.path} was changed: request {quoted(custom_id)} is not where it was.")
        return request


class Index:
    """The requests by name: where each is in the input, and whether the output has its answer. To be closed.

    Raises:
        sqlite3.Error: by all methods, if the temporary file cannot be written.
    """

    def __init__(self) -> None:
        self.total = 0
        self._db = sqlite3.connect("")  # a temporary file, which vanishes with the connection
        self._db.executescript(
            f"PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -{_CACHE_KIB};"
            "CREATE TABLE request (custom_id TEXT PRIMARY KEY, offset INTEGER, line INTEGER, done INTEGER) WITHOUT ROWID"
        )

    def close(self) -> None:
        self._db.close()

    def add(self, custom_id: str, offset: int, line: int) -> None:
        """Add a request that is to be done. Raises BadLine if there is one of that name."""
        try:
            self._db.execute("INSERT INTO request VALUES (?, ?, ?, 0)", (custom_id, offset, line))
        except sqlite3.IntegrityError:
            (first,) = self._db.execute("SELECT line FROM request WHERE custom_id = ?", (custom_id,)).fetchone()
            raise BadLine(f"its custom_id {quoted(custom_id)} is that of line {first}; each must be unique") from None
        self.total += 1

    def finish(self, custom_id: str) -> bool:
        """Mark a request as done; False if there is none of that name."""
        return self._db.execute("UPDATE request SET done = 1 WHERE custom_id = ?", (custom_id,)).rowcount == 1

    def num_done(self) -> int:
        return int(self._db.execute("SELECT count(*) FROM request WHERE done").fetchone()[0])

    def remaining(self) -> Generator[tuple[str, int], None, None]:
        """Yield name and place of each request that is not done, in the order of the input."""
        yield from self._db.execute("SELECT custom_id, offset FROM request WHERE NOT done ORDER BY offset")
