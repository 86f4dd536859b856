"""The output file: one answer a line, in the order in which they come. It is also the record of what is done."""

import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
from msgspec import Struct

from flyball_clients.batch.requests import Index
from flyball_clients.errors import ConfigError
from flyball_protocol.quoting import one_line, quoted

MAX_ROW_BYTES = 2**28
"""Longest line that an answer may have; a longer one is no batch's output."""

ROW_START = b'{"id":"batch_req_'
"""How each line of an output begins. A cut line is repaired only if it begins so: another file is not touched."""


class Failure(Struct, frozen=True):
    """Why a request has no good answer: a short stable word, and a sentence."""

    code: str
    message: str


class Response(Struct, frozen=True):
    status_code: int
    request_id: str
    body: msgspec.Raw | None


class Row(Struct, frozen=True):
    """A line of the output, in OpenAI's format. ``error`` is set for every request that failed."""

    id: str
    custom_id: str
    response: Response | None
    error: Failure | None


class _Seen(Struct):
    custom_id: str
    error: Any = None


_encode: Callable[[Row], bytes] = msgspec.json.Encoder().encode
_decoder = msgspec.json.Decoder(_Seen)


class OutputFile:
    """The output, open and locked. Use as ``with OutputFile(path, index) as target``.

    What it has already is marked as done in ``index``, and a last line that was cut is removed.

    Attributes:
        num_failed: answers with an error that it had at the start.

    Raises:
        ConfigError: it cannot be written, another batch writes to it, or it is not an output for these requests.
    """

    def __init__(self, path: Path, index: Index) -> None:
        self.path = path
        self.num_failed = 0
        if path.exists() and not path.is_file():
            raise ConfigError(f"the output {path} is not a file. It has to be one, because it says what is done.")
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ConfigError(f"cannot write the output {path}: {error.strerror}.") from None
        try:
            self._lock()
            self._resume(index)
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self.sync()
        finally:
            os.close(self._fd)

    def write(self, row: Row) -> None:
        """Append a line. Raises ConfigError if it cannot be written."""
        rest = memoryview(_encode(row) + b"\n")
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            raise self._unwritable(error) from None

    def sync(self) -> None:
        """Make what was written outlast a crash of the machine. Raises ConfigError if that fails."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> ConfigError:
        return ConfigError(f"cannot write {self.path}: {error.strerror}. The same command goes on from there.")

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"{self.path} is locked: another flyball batch writes to it.") from None

    def _resume(self, index: Index) -> None:
        end = 0
        for number, line in enumerate(self._lines(), 1):
            if not line.endswith(b"\n"):
                self._cut(number, line, end)
                return
            self._note(index, number, line)
            end += len(line)

    def _lines(self) -> Iterator[bytes]:
        with open(self._fd, "rb", closefd=False) as file:
            while line := file.readline(MAX_ROW_BYTES):
                yield line

    def _note(self, index: Index, number: int, line: bytes) -> None:
        try:
            seen = _decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise self._foreign(number, f"is not an answer of a batch: {one_line(str(error))}") from None
        if not index.finish(seen.custom_id):
            raise self._foreign(number, f"answers {quoted(seen.custom_id)}, which is not in the input")
        self.num_failed += seen.error is not None

    def _cut(self, number: int, line: bytes, end: int) -> None:
        if not (line.startswith(ROW_START) or ROW_START.startswith(line)) or len(line) == MAX_ROW_BYTES:
            raise self._foreign(number, "is not an answer of a batch")
        os.ftruncate(self._fd, end)

    def _foreign(self, number: int, what: str) -> ConfigError:
        return ConfigError(
            f"the output {self.path} is not one of this input: its line {number} {what}. Name another output, or remove it."
        )
