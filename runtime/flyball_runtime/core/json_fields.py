"""A JSON object from a checkpoint, read one checked field at a time."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flyball_runtime.core.errors import ConfigError

LARGEST_SIZE = 2**20
"""No dimension of a model comes near it; what goes past it is a mistake, or an attempt to take all memory."""


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; raises ConfigError naming the file when there is none."""
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON ({error}). Download or export the checkpoint again.") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds a JSON {type(values).__name__}; an object is needed.")
    return values


class JsonFields:
    """Typed reads that raise ConfigError naming the file, the field, its value and what is accepted.

    A field that is null counts as absent, as it does in transformers. A field without a default is required.
    """

    def __init__(self, source: Path, values: dict[str, Any], prefix: str = "") -> None:
        self.source = source
        self._values = values
        self._prefix = prefix

    def raw(self, key: str) -> Any:
        return self._values.get(key)

    def __contains__(self, key: str) -> bool:
        """Whether the object has the key at all, be it null."""
        return key in self._values

    def names(self) -> list[str]:
        """The keys of the object."""
        return list(self._values)

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = LARGEST_SIZE) -> int:
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(key, f"a whole number from {low} to {high}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._present(key, default)
        if not _is_positive(value):
            raise self.error(key, "a number above 0")
        return float(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of numbers above 0, as long as a dimension may be."""
        value = self._present(key, None)
        if not isinstance(value, list) or not 0 < len(value) <= LARGEST_SIZE or not all(map(_is_positive, value)):
            raise self.error(key, "a list of numbers above 0")
        return tuple(map(float, value))

    def boolean(self, key: str, default: bool) -> bool:
        value = self._present(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def child(self, key: str, default: Mapping[str, object] | None = None) -> "JsonFields":
        """The object under ``key``; ``default``, or an empty one, when it is absent."""
        value = self._present(key, dict(default or {}))
        if not isinstance(value, dict):
            raise self.error(key, "an object")
        return JsonFields(self.source, value, prefix=f"{self._prefix}{key}.")

    def error(self, key: str, accepted: str) -> ConfigError:
        """What to raise when ``key`` is not acceptable."""
        return ConfigError(f"{self.source}: {self._prefix}{key} is {self.raw(key)!r}; it must be {accepted}.")

    def _present(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        if value is None and default is None:
            raise ConfigError(f"{self.source} has no {self._prefix}{key}, which this architecture needs.")
        return default if value is None else value


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
