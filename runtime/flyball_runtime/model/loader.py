"""From a checkpoint directory to a model that can run: its files, dtype, kernels and weights."""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flyball_kernels import flash_attention
from flyball_kernels.backend import Backend, choose_backend
from flyball_runtime.core.checkpoint import DType, KVDType, ServedModel
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.json_fields import read_json_object
from flyball_runtime.core.memory import available_memory_bytes
from flyball_runtime.core.model_config import ModelConfig, is_native
from flyball_runtime.core.quantization import UNQUANTIZED, Quantization, resolve_quantization
from flyball_runtime.model.linear import Place
from flyball_runtime.model.transformer import CausalLM, LanguageModel

logger = logging.getLogger(__name__)


def kernel_backend(requested: str, device: torch.device, attention: str = "auto") -> Backend:
    """Return the backend for ``device`` that ``--kernel-backend`` and ``--attention-backend`` mean.

    Raises:
        ConfigError: it cannot run here; the message says why.
    """
    try:
        return choose_backend(device, requested, attention)
    except (ValueError, RuntimeError) as error:
        flags = f"--kernel-backend {requested}" + ("" if attention == "auto" else f" --attention-backend {attention}")
        raise ConfigError(f"{flags}: {error}") from error


def check_attention(backend: Backend, config: ServedModel, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Raise ConfigError if the backend's attention has no code for a model."""
    if backend.attention != "flash_attn":
        return
    has_sinks = isinstance(config, ModelConfig) and config.has_sinks
    try:
        flash_attention.check_can_attend(dtype, kv_dtype, config.head_dim, has_sinks)
    except ValueError as error:
        raise ConfigError(f"--attention-backend flash_attn: {error}") from error


TORCH_DTYPES: dict[DType, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


KV_TORCH_DTYPES: dict[KVDType, torch.dtype] = {**TORCH_DTYPES, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


def kv_torch_dtype(name: KVDType, backend: Backend) -> torch.dtype:
    """Return the dtype of a KV cache. Raises ConfigError where the backend has no code for it."""
    if name == "fp8" and backend.name == "cpp":
        raise ConfigError(
            "--kv-cache-dtype is fp8_per_token_head, which the C++ ops have no code for. On a CPU use int8_per_token_head, "
            "which takes as much memory, or --kernel-backend torch."
        )
    return KV_TORCH_DTYPES[name]


def resolve_dtype(requested: str, config: ServedModel) -> DType:
    """The dtype to serve in: ``auto`` is the one the weights were saved in.

    Raises:
        ConfigError: ``requested`` is neither ``auto`` nor a supported dtype.
    """
    if requested == "auto":
        return config.dtype
    if requested not in TORCH_DTYPES:
        raise ConfigError(f"--dtype is {requested!r}; it must be one of auto, {', '.join(TORCH_DTYPES)}.")
    return cast(DType, requested)


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
    if is_file(index):
        files = sorted(path / name for name in _shard_names(index))
        for file in files:
            if not is_file(file):
                raise ConfigError(f"{file} is missing, but {INDEX_FILE} names it. Download it again.")
        return files
    if not is_file(path / SINGLE_FILE):
        raise ConfigError(_no_weights_message(path))
    return [path / SINGLE_FILE]


def is_file(path: Path) -> bool:
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


MAX_NAMES_IN_MESSAGE = 5
SAFETENSORS_DTYPES = ("BF16", "F16", "F32", "F64")


def describe_model(path: Path, model_impl: str) -> ServedModel:
    """Return what the engine needs to know of a checkpoint, before its weights are read.

    Raises:
        ConfigError: it cannot be served.
    """
    if is_native(path, model_impl):
        return ModelConfig.from_dir(path)
    from flyball_runtime.model.attention_probe import probe  # imports models of transformers, which takes seconds

    return probe(path)


def load_model(
    path: str | Path,
    config: ServedModel,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    backend: Backend,
    max_model_len: int | None = None,
    quantization: Quantization = "none",
) -> LanguageModel:
    """Build the model and fill it from the directory's safetensors, converting to ``dtype`` on the way.

    Args:
        config: of ``describe_model``, which says whose code runs it.
        max_model_len: longest context to prepare for; None is all that the model was made for.
        quantization: what the weights of linear layers are rounded to.
    Raises:
        ConfigError: a file is missing or unreadable; a tensor is missing, unexpected or of the wrong shape or kind; the
            weights cannot be rounded here; or the device cannot hold the model.
    """
    start = time.monotonic()
    files = weight_files(Path(path))
    quantization = resolve_quantization(quantization, config.stored)
    place = Place(dtype, torch.device(device), backend, quantization, config.stored)
    max_len = max_model_len or config.default_context_len
    if quantization != "none":
        _check_can_round(config, place)
    model: LanguageModel
    if isinstance(config, ModelConfig):
        model = _load_native(config, files, place, max_len)
    else:
        model = _load_by_transformers(Path(path), config, files, place, max_len)
    logger.info(
        "loaded %d parameters as %s%s from %d file(s) in %.1f s",
        *(model.num_parameters, dtype, "" if quantization == "none" else f", linear layers in {quantization},"),
        *(len(files), time.monotonic() - start),
    )
    return model


def _check_can_round(config: ServedModel, place: Place) -> None:
    if place.quantization == "w4a8" and place.backend.name == "triton":
        raise ConfigError(
            "--quantization w4a8 has no kernel for GPUs, nor for the triton backend. Use int4, whose inputs have 16 bits."
        )
    who, way_out = f"--quantization {place.quantization}", "Leave the flag out"
    if place.stored != UNQUANTIZED:
        who, way_out = f"a checkpoint in {place.stored.quantization}", "Use an unquantized one"
    if place.quantization == "fp8" and place.backend.name == "cpp":
        raise ConfigError(
            f"{who} cannot be served by the C++ ops, which have no code for fp8. On a CPU use an unquantized checkpoint with "
            "--quantization int8 or w8a16, which take about as much memory, or --kernel-backend torch, which is slow."
        )
    if not isinstance(config, ModelConfig):
        raise ConfigError(
            f"{who} cannot be served: {config.architecture} runs in transformers, whose layers are not rounded. {way_out}."
        )


def _load_native(config: ModelConfig, files: list[Path], place: Place, max_len: int) -> CausalLM:
    """Hold the files' headers against the config first, so a checkpoint that does not fit its config.json costs no memory.

    Weights are then copied one tensor at a time from the mapped file to where they stay, and packed one layer at a time, so
    memory peaks at the model and one layer.
    """
    nowhere = replace(place, device=torch.device("meta"), backend=Backend("torch"))
    empty = CausalLM(config, max_len=1, place=nowhere)  # shapes without memory
    _check_headers(files, empty)
    model = _allocate(config, max_len, place, sum(tensor.nbytes for _, tensor in empty.destinations()))
    _fill(dict(model.destinations()), files)
    model.pack()
    return model


def _load_by_transformers(
    path: Path, config: ServedModel, files: list[Path], place: Place, max_len: int
) -> LanguageModel:
    from flyball_runtime.model.attention_probe import TransformersModel  # see describe_model
    from flyball_runtime.model.transformers_lm import load_transformers_model

    assert isinstance(config, TransformersModel)
    for header in iter_headers(files):
        check_kind(header)
    _check_room(config, config.num_parameters * place.dtype.itemsize, place)
    return load_transformers_model(path, config, place, max_len)


def _check_headers(files: list[Path], empty: CausalLM) -> None:
    """Every tensor that the model needs is there, once, in its shape; what is over on either side is an error."""
    config = empty.config
    waiting = dict(empty.destinations())
    expected = set(waiting)
    for header in iter_headers(files):
        if _is_ignorable(header.name, config):
            continue
        name = full_name(header.name)
        if name not in waiting:
            raise ConfigError(f"{header.file}: {_why_not_wanted(name, expected, config)}")
        _check(header, waiting.pop(name))
    if waiting:
        names = sorted(waiting)
        shown = ", ".join(names[:MAX_NAMES_IN_MESSAGE])
        more = f" and {len(names) - MAX_NAMES_IN_MESSAGE} more" if len(names) > MAX_NAMES_IN_MESSAGE else ""
        raise ConfigError(
            f"{files[0].parent} lacks {len(names)} tensor(s) that {config.architecture} needs: {shown}{more}. "
            f"Looked in {', '.join(file.name for file in files)}. Download or export the checkpoint again."
        )


def _allocate(config: ModelConfig, max_len: int, place: Place, num_bytes: int) -> CausalLM:
    _check_room(config, num_bytes, place)
    try:
        return CausalLM(config, max_len=max_len, place=place)
    except RuntimeError as error:  # how torch says "out of memory", on every device
        raise _too_large(config, num_bytes, place, str(error)) from error


def _check_room(config: ServedModel, num_bytes: int, place: Place) -> None:
    free_bytes = _free_bytes(place.device)
    if num_bytes > free_bytes:
        raise _too_large(config, num_bytes, place, f"{free_bytes / 2**30:.1f} GiB are free")


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory_bytes()


def _too_large(config: ServedModel, num_bytes: int, place: Place, why: str) -> ConfigError:
    return ConfigError(
        f"{config.architecture} needs {num_bytes / 2**30:.1f} GiB for its weights as {place.dtype}, which "
        f"{place.device} cannot give ({why}). Use a smaller model or dtype, or a larger machine."
    )


def _fill(destinations: dict[str, Tensor], files: list[Path]) -> None:
    for name, tensor in iter_weights(files):
        destination = destinations.get(full_name(name))
        if destination is not None:  # else the model does not need it
            destination.copy_(tensor)


def full_name(name: str) -> str:
    """Return the name of a tensor in a model with a head. Embedding models are saved without one, and without ``model.``."""
    return f"model.{name}" if name.startswith(("embed_tokens.", "layers.", "norm.")) else name


def _is_ignorable(name: str, config: ModelConfig) -> bool:
    """Whether the model needs no such tensor from the file.

    It has RoPE's frequencies without the file, and the head when that is the embedding. Beside fp8 weights, inputs are not
    rounded, so their scales are not needed.
    """
    return (
        name.endswith("rotary_emb.inv_freq")
        or (name == "lm_head.weight" and config.tie_word_embeddings)
        or (name.endswith(".input_scale") and config.stored.quantization == "fp8")
    )


def _why_not_wanted(name: str, expected: set[str], config: ModelConfig) -> str:
    if name in expected:
        return f"tensor {name} is in the checkpoint twice. Keep one of them."
    return (
        f"tensor {name} is not part of {config.architecture} as config.json describes it. "
        "Check that config.json and the weights belong together."
    )


def _check(header: Header, destination: Tensor) -> None:
    if header.shape != tuple(destination.shape):
        raise ConfigError(
            f"{header.file}: tensor {header.name} has shape {list(header.shape)}; config.json asks for "
            f"{list(destination.shape)}. Check that config.json and the weights belong together."
        )
    if (wanted := _QUANTIZED_KINDS.get(destination.dtype)) is not None:
        if header.dtype != wanted:
            raise ConfigError(
                f"{header.file}: tensor {header.name} is {header.dtype}, and by config.json it is {wanted}. "
                "Checkpoints with some linear layers in another dtype are not supported, but for lm_head and routers."
            )
        return
    check_kind(header)


_QUANTIZED_KINDS = {torch.int8: "I8", torch.int32: "I32", torch.int64: "I64", torch.float8_e4m3fn: "F8_E4M3"}


def check_kind(header: Header) -> None:
    if header.dtype not in SAFETENSORS_DTYPES:
        raise ConfigError(
            f"{header.file}: tensor {header.name} is {header.dtype}; it must be one of {', '.join(SAFETENSORS_DTYPES)}. "
            "Quantized weights are read where config.json has a quantization_config that says how."
        )
