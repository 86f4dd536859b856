"""Prompts from a file."""

from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from flyball_runtime.client.endpoint import Api
from flyball_runtime.core.errors import ConfigError


class DatasetRow(Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a dataset: a prompt (text or token ids) or chat messages, and perhaps its own ``max_tokens``."""

    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: int | None = None


_decoder = msgspec.json.Decoder(DatasetRow)


def read_dataset(path: str, api: Api) -> list[DatasetRow]:
    """Every row of a JSONL file, in order, each fit for ``api``.

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
