"""What a checkpoint directory says of a model of any architecture, and what the engine knows of any model; no torch."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.json_fields import JsonFields, read_json_object
from flyball_runtime.core.quantization import Stored, read_quantization

DType = Literal["bfloat16", "float16", "float32"]
KVDType = DType | Literal["int8", "fp8"]
"""Of the vectors in the KV cache. int8: whole numbers, fp8: e4m3, both with an fp32 scale for each token and head."""

KV_SCALE_BYTES = 4
DTYPE_BYTES: dict[KVDType, int] = {"bfloat16": 2, "float16": 2, "float32": 4, "int8": 1, "fp8": 1}

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class ServedModel(ABC):
    """What the engine knows of a model, whoever implements it.

    Attributes:
        head_dim: elements of one head.
        sliding_windows: per layer, how many of the latest tokens are attended to (the query's own included);
            None is all of them.
        dtype: what the weights were saved in; float32 when config.json is silent.
        eos_token_ids: ids that end a sequence, from config.json and generation_config.json together.
        stored: how the checkpoint holds the weights of linear layers.
    """

    architecture: str
    vocab_size: int
    num_key_value_heads: int
    head_dim: int
    sliding_windows: tuple[int | None, ...]
    dtype: DType
    eos_token_ids: frozenset[int]
    stored: Stored

    @property
    @abstractmethod
    def max_context_len(self) -> int:
        """Tokens of prompt and output together that the model can take."""

    @property
    def default_context_len(self) -> int:
        """Tokens to prepare for unless told."""
        return self.max_context_len

    def kv_bytes_per_layer(self, dtype: KVDType) -> int:
        """Bytes of keys and values of one token in one layer."""
        element_bytes = DTYPE_BYTES[dtype]
        vector_bytes = self.head_dim * element_bytes + (KV_SCALE_BYTES if element_bytes == 1 else 0)
        return 2 * self.num_key_value_heads * vector_bytes


@dataclass(frozen=True)
class Checkpoint:
    """What config.json and generation_config.json say of a model of any architecture."""

    architectures: tuple[str, ...]
    vocab_size: int
    dtype: DType
    eos_token_ids: frozenset[int]
    stored: Stored

    @classmethod
    def from_dir(cls, path: Path) -> "Checkpoint":
        """Read the files.

        Raises:
            ConfigError: no such directory or file, invalid JSON, a malformed field, or weights that are quantized in a way
                that cannot be read.
        """
        fields = config_fields(path)
        return cls(
            _architectures(fields),
            _vocab_size(fields),
            read_dtype(fields),
            eos_token_ids(fields, path),
            read_quantization(fields),
        )


def config_fields(path: Path) -> JsonFields:
    """Return the fields of config.json. Raises ConfigError when they cannot be read."""
    if not path.is_dir():
        raise ConfigError(f"{path} is not a directory. Give a directory with config.json and *.safetensors in it.")
    source = path / "config.json"
    if not source.is_file():
        raise ConfigError(f"{path} has no config.json, so it is not a Hugging Face checkpoint directory.")
    return JsonFields(source, read_json_object(source))


def check_tokenizer_files(path: str | Path) -> None:
    """Raise ConfigError, naming what was looked for, when a checkpoint directory holds no tokenizer."""
    if not any((Path(path) / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(
            f"{path} holds no tokenizer: looked for {', '.join(TOKENIZER_FILES)}. "
            "Copy the tokenizer files that belong to the model into it."
        )


def read_dtype(fields: JsonFields) -> DType:
    """Return what the weights were saved in."""
    key = "dtype" if fields.raw("dtype") is not None else "torch_dtype"
    value = fields.raw(key)
    name = "float32" if value is None else str(value).removeprefix("torch.")
    if name not in get_args(DType):
        raise fields.error(key, f"one of {', '.join(get_args(DType))}")
    return cast(DType, name)


def eos_token_ids(fields: JsonFields, path: Path) -> frozenset[int]:
    """Return the ids in config.json, ``fields``, and in generation_config.json if there is one."""
    source = path / "generation_config.json"
    if not source.is_file():
        return _eos_token_ids(fields)
    return _eos_token_ids(fields) | _eos_token_ids(JsonFields(source, read_json_object(source)))


def _eos_token_ids(fields: JsonFields) -> frozenset[int]:
    value = fields.raw("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in ids):
        raise fields.error("eos_token_id", "a token id or a list of them")
    return frozenset(ids)


def _vocab_size(fields: JsonFields) -> int:
    is_nested = "vocab_size" not in fields and "text_config" in fields  # models that also read images
    return (fields.child("text_config") if is_nested else fields).integer("vocab_size")


def _architectures(fields: JsonFields) -> tuple[str, ...]:
    value = fields.raw("architectures")
    if not isinstance(value, list) or not value or not all(isinstance(name, str) for name in value):
        raise fields.error("architectures", "a list of names of architectures")
    return tuple(value)
