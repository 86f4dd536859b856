"""Requests from files: recorded traces (arrivals and lengths) and datasets (prompts)."""

import csv
import gzip
import io
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from flyball_clients.endpoint import Api
from flyball_clients.errors import ConfigError

MOONCAKE_BLOCK_TOKENS = 512
"""Tokens per hash id of a Mooncake trace."""

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class TraceRequest(Struct, frozen=True):
    """One recorded request.

    Attributes:
        time_s: seconds on the trace's own scale.
        hash_ids: prefix-block ids, equal ids being equal text; empty when the format has none.
    """

    time_s: float
    input_len: int
    output_len: int
    hash_ids: tuple[int, ...] = ()


def read_trace(path: str) -> list[TraceRequest]:
    """Return the requests of a file, ordered by time.

    ``.csv`` is Azure's (TIMESTAMP, ContextTokens, GeneratedTokens), ``.jsonl`` Mooncake's (timestamp in ms, input_length,
    output_length, hash_ids for each 512 input tokens); either may end in ``.gz``.

    Raises:
        ConfigError: unknown kind of file, unreadable, empty, or a malformed line, named as ``file:line``.
    """
    parse = _parser(path)
    try:
        with _open_text(path) as lines:
            requests = list(parse(path, lines))
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as exc:
        raise ConfigError(f"cannot read the trace {path}: {exc}.") from exc
    if not requests:
        raise ConfigError(f"the trace {path} has no requests.")
    return sorted(requests, key=lambda request: request.time_s)


def _parser(path: str) -> Callable[[str, Iterable[str]], Iterator[TraceRequest]]:
    suffix = Path(path.removesuffix(".gz")).suffix
    if suffix == ".csv":
        return _parse_azure
    if suffix == ".jsonl":
        return _parse_mooncake
    raise ConfigError(f"--trace is {path}; it must end in .csv or .csv.gz (Azure), .jsonl or .jsonl.gz (Mooncake).")


def _open_text(path: str) -> io.TextIOBase:
    if path.endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return Path(path).open(encoding="utf-8-sig", newline="")


def _parse_azure(path: str, lines: Iterable[str]) -> Iterator[TraceRequest]:
    reader = csv.DictReader(lines)
    missing = [name for name in AZURE_COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise ConfigError(f"{path}:1: no column {', '.join(missing)}; an Azure trace has {', '.join(AZURE_COLUMNS)}.")
    for row in reader:
        try:
            time_s = _utc_seconds(row["TIMESTAMP"])
            request = TraceRequest(time_s, int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        except (TypeError, ValueError) as exc:  # TypeError: a short line, whose missing fields are None
            raise ConfigError(f"{path}:{reader.line_num}: {exc}; a line is TIMESTAMP,int,int.") from exc
        yield _checked(path, reader.line_num, request)


def _utc_seconds(timestamp: str) -> float:
    """Return seconds since the epoch. Azure writes no time zone; as local time, there would be a jump when summer time ends."""
    moment = datetime.fromisoformat(timestamp)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


class _MooncakeLine(Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = msgspec.field(default_factory=list)


_mooncake = msgspec.json.Decoder(_MooncakeLine)


def _parse_mooncake(path: str, lines: Iterable[str]) -> Iterator[TraceRequest]:
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            line = _mooncake.decode(text)
        except msgspec.DecodeError as exc:
            raise ConfigError(f"{path}:{number}: {exc}.") from exc
        hash_ids = tuple(line.hash_ids)
        request = TraceRequest(line.timestamp / 1000, line.input_length, line.output_length, hash_ids)
        yield _checked(path, number, request)


def _checked(path: str, number: int, request: TraceRequest) -> TraceRequest:
    if request.input_len < 1 or request.output_len < 1:
        raise ConfigError(
            f"{path}:{number}: {request.input_len} input and {request.output_len} output tokens; each must be at least 1."
        )
    num_blocks = -(-request.input_len // MOONCAKE_BLOCK_TOKENS)
    if request.hash_ids and (len(request.hash_ids) != num_blocks or min(request.hash_ids) < 0):
        raise ConfigError(
            f"{path}:{number}: {len(request.hash_ids)} hash_ids for {request.input_len} input tokens; there must be one "
            f"for each {MOONCAKE_BLOCK_TOKENS} tokens, rounded up, so {num_blocks}, and none may be below 0."
        )
    return request


class DatasetRow(Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a dataset: a prompt (text or token ids) or chat messages, and perhaps its own ``max_tokens``."""

    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: int | None = None


_decoder = msgspec.json.Decoder(DatasetRow)


def read_dataset(path: str, api: Api) -> list[DatasetRow]:
    """Return the rows of a JSONL file, in order. Each is valid for ``api``.

    Raises:
        ConfigError: unreadable or empty file, or a line, named as ``file:line``, that is malformed or for the other API.
    """
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as exc:
        raise ConfigError(f"cannot read the dataset {path}: {exc}.") from exc
    rows = [_parse(f"{path}:{number}", line, api) for number, line in enumerate(lines, start=1) if line.strip()]
    if not rows:
        raise ConfigError(f"the dataset {path} has no prompts.")
    return rows


def _parse(where: str, line: bytes, api: Api) -> DatasetRow:
    try:
        row = _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f'{where}: {exc}; a line is {{"prompt": ...}} or {{"messages": ...}}.') from exc
    if (row.prompt is None) == (row.messages is None):
        raise ConfigError(f"{where}: a line needs either prompt or messages.")
    if row.messages is not None and api == "completions":
        raise ConfigError(f"{where}: messages are for the chat API; add --endpoint chat.")
    if isinstance(row.prompt, list) and api == "chat":
        raise ConfigError(f"{where}: token ids are for the completions API; add --endpoint completions.")
    if row.max_tokens is not None and row.max_tokens < 1:
        raise ConfigError(f"{where}: max_tokens is {row.max_tokens}; it must be at least 1.")
    return row
