"""Tensors of a safetensors checkpoint, one at a time, straight from the memory-mapped file."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.json_fields import read_json_object

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class Header:
    """What a file says of one of its tensors. ``dtype`` is safetensors' name, like BF16."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


def iter_headers(files: list[Path]) -> Iterator[Header]:
    """What the files hold, without reading it.

    Raises:
        ConfigError: a file cannot be read, is not safetensors, or is cut short.
    """
    for file in files:
        with _opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118  safe_open is no mapping
                part = tensors.get_slice(name)
                yield Header(file, name, tuple(part.get_shape()), part.get_dtype())


def iter_weights(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor). A tensor is a view of the mapped file: copy what must outlive the iteration.

    Raises:
        ConfigError: a file cannot be read, is not safetensors, or is cut short.
    """
    for file in files:
        with _opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118  safe_open is no mapping
                yield name, tensors.get_tensor(name)


@contextmanager
def _opened(file: Path) -> Iterator[safe_open]:
    try:
        file.open("rb").close()  # safetensors calls every failure to open a file "No such file or directory"
    except OSError as error:
        raise _unreadable(file, error) from error
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"{file} is not a readable safetensors file ({error}). It may be corrupt, cut short or a git-lfs "
            f"pointer; it has {file.stat().st_size} bytes. Download it again."
        ) from error


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint directory, sorted: those that the index names, else the single file.

    Raises:
        ConfigError: there are none, or one that the index names is missing or cannot be read.
    """
    index = path / INDEX_FILE
    if _is_file(index):
        files = sorted(path / name for name in _shard_names(index))
        for file in files:
            if not _is_file(file):
                raise ConfigError(f"{file} is missing, but {INDEX_FILE} names it. Download it again.")
        return files
    if not _is_file(path / SINGLE_FILE):
        raise ConfigError(_no_weights_message(path))
    return [path / SINGLE_FILE]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError as error:  # a link into a directory that may not be searched
        raise _unreadable(path, error) from error


def _unreadable(file: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot read {file} as user {os.geteuid()}: {error.strerror}. The server needs to read the file and to search its "
        "directories."
    )


def _shard_names(index: Path) -> set[str]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(n, str) for n in weight_map.values()):
        raise ConfigError(
            f"{index} has no usable weight_map; it must map tensor names to file names. Download it again."
        )
    return set(weight_map.values())


def _no_weights_message(path: Path) -> str:
    pickles = sorted(file.name for pattern in ("*.bin", "*.pth", "*.pt") for file in path.glob(pattern))
    if pickles:
        return (
            f"{path} has weights in {pickles[0]} but none in safetensors, and pickled weights can run code when loaded. "
            "Convert them: AutoModelForCausalLM.from_pretrained(path).save_pretrained(path)."
        )
    return f"{path} has no weights: looked for {SINGLE_FILE} and {INDEX_FILE}."
