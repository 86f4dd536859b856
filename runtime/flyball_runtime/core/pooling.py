"""How the hidden states of a prompt become one vector: what a plan says of it, and what the checkpoint says."""

from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from flyball_protocol.quoting import quoted
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.json_fields import JsonFields, read_json_object

Pooling = Literal["last", "mean"]
"""The hidden state of a prompt's last token, or the mean of all of them; in both cases after the model's last norm."""

AUTO = "auto"
POOLING_TYPES: tuple[Pooling, ...] = ("last", "mean")

FILE = Path("1_Pooling") / "config.json"
"""Where sentence-transformers keeps it."""

_FLAG = "--pooling-type"
_MODES: dict[str, Pooling] = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}


class PoolSpan(Struct, frozen=True, array_like=True):
    """The last tokens of an entry of a plan, whose hidden states are added up.

    Attributes:
        entry: index of the plan's entry.
        at: of the first of them in the sequence.
        num_pooled: tokens that the vector is the mean of, if the prompt ends with this entry; else 0.
    """

    entry: int
    at: int
    num_pooled: int

    @property
    def ends(self) -> bool:
        """Whether the vector is wanted now."""
        return self.num_pooled > 0


class Embedder(Struct, frozen=True, kw_only=True):
    """How a model makes embeddings.

    Attributes:
        pooling: of every prompt.
        size: of the hidden states.
        dimensions: sizes that the model was trained to be cut to; () if it was not, None if any size will do.
    """

    pooling: Pooling = "last"
    size: int = 0
    dimensions: tuple[int, ...] | None = ()

    @classmethod
    def of_checkpoint(cls, pooling_type: str, model: Path) -> "Embedder":
        """Return that of the checkpoint ``model``.

        Args:
            pooling_type: one of POOLING_TYPES, or AUTO for what the checkpoint says, which is ``last`` if it says nothing.
        Raises:
            ConfigError: the checkpoint asks for another pooling, or a file of it cannot be used.
        """
        file = model / "config.json"
        fields = JsonFields(file, read_json_object(file))
        return cls(
            pooling=_checkpoint_pooling(model / FILE) if pooling_type == AUTO else _checked(pooling_type),
            size=fields.integer("hidden_size"),
            dimensions=_dimensions(fields),
        )

    def takes(self, dimensions: int) -> bool:
        """Return whether vectors may be cut to this many entries."""
        if self.dimensions is None:
            return 1 <= dimensions <= self.size
        return dimensions == self.size or dimensions in self.dimensions


def _checked(pooling_type: str) -> Pooling:
    found = next((one for one in POOLING_TYPES if one == pooling_type), None)
    if found is None:
        raise ConfigError(f"{_FLAG} is {quoted(pooling_type)}; it must be {AUTO}, {' or '.join(POOLING_TYPES)}.")
    return found


def _checkpoint_pooling(file: Path) -> Pooling:
    if not file.is_file():
        return "last"
    values = read_json_object(file)
    asked = _asked(values)
    if len(asked) != 1 or asked[0] not in _MODES:
        raise ConfigError(
            f"{file} asks for {quoted(', '.join(asked) or 'no pooling')}; Flyball pools the last token or the mean. "
            f"Choose one with {_FLAG} {' or '.join(POOLING_TYPES)}."
        )
    return _MODES[asked[0]]


def _asked(values: dict[str, Any]) -> list[str]:
    return [name for name, value in values.items() if name.startswith("pooling_mode_") and value is True]


def _dimensions(fields: JsonFields) -> tuple[int, ...] | None:
    """Return what ``Embedder.dimensions`` is; the fields have vLLM's names."""
    listed = fields.raw("matryoshka_dimensions")
    if isinstance(listed, list) and all(type(one) is int and one > 0 for one in listed):
        return tuple(listed)
    return None if fields.raw("is_matryoshka") is True else ()
