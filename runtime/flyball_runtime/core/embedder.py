"""How a checkpoint makes embeddings: its config.json, and the files of sentence-transformers where it has them."""

import json
from pathlib import Path

from msgspec import Struct

from flyball_protocol.quoting import quoted, quoted_list
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.json_fields import JsonFields, read_json_object
from flyball_runtime.core.pooling import Pooling

AUTO = "auto"
POOLING_TYPES: dict[str, Pooling] = {"last": "last", "mean": "mean"}

MODULES_FILE = "modules.json"
"""The steps by which sentence-transformers makes an embedding, in order."""

_SERVED_MODULES = ("Transformer", "Pooling", "Normalize")
_MODES: dict[str, Pooling] = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}
_WAY_OUT = f"Choose a pooling with --pooling-type {' or '.join(POOLING_TYPES)}; the file is not read then."


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
            ConfigError: the checkpoint makes embeddings in a way that is not served, or a file of it cannot be used.
        """
        file = model / "config.json"
        fields = JsonFields(file, read_json_object(file))
        return cls(
            pooling=_checkpoint_pooling(model) if pooling_type == AUTO else POOLING_TYPES[pooling_type],
            size=fields.integer("hidden_size"),
            dimensions=_dimensions(fields),
        )

    def takes(self, dimensions: int) -> bool:
        """Return whether vectors may be cut to this many entries."""
        if self.dimensions is None:
            return 1 <= dimensions <= self.size
        return dimensions == self.size or dimensions in self.dimensions


def _checkpoint_pooling(model: Path) -> Pooling:
    file = model / MODULES_FILE
    if not file.is_file():
        return "last"
    folders = _modules(file)
    others = [kind for kind in folders if kind not in _SERVED_MODULES]
    if others:
        raise ConfigError(f"{file} has {quoted_list(others)}, which embeddings here do not go through. {_WAY_OUT}")
    return _mode(model / folders["Pooling"] / "config.json") if "Pooling" in folders else "last"


def _modules(file: Path) -> dict[str, str]:
    """Return folders by kind of module."""
    try:
        return {str(one["type"]).rpartition(".")[2]: str(one["path"]) for one in json.loads(file.read_bytes())}
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        raise ConfigError(f'{file} is not a list of {{"type": ..., "path": ...}}. {_WAY_OUT}') from None


def _mode(file: Path) -> Pooling:
    values = read_json_object(file)
    asked = [name for name, value in values.items() if name.startswith("pooling_mode_") and value is True]
    if len(asked) == 1 and asked[0] in _MODES:
        return _MODES[asked[0]]
    found = quoted(", ".join(asked)) if asked else "no pooling_mode"
    raise ConfigError(f"{file} asks for {found}; the last token or the mean can be served. {_WAY_OUT}")


def _dimensions(fields: JsonFields) -> tuple[int, ...] | None:
    """Return what ``Embedder.dimensions`` is. The fields are vLLM's."""
    listed = fields.raw("matryoshka_dimensions")
    if listed is not None:
        if not isinstance(listed, list) or not all(type(one) is int and one > 0 for one in listed):
            raise fields.error("matryoshka_dimensions", "a list of whole numbers above 0")
        return tuple(listed)
    return None if fields.boolean("is_matryoshka", default=False) else ()
