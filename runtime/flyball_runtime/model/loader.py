"""From a checkpoint directory to a model that can run."""

import logging
import time
from pathlib import Path

import torch
from torch import Tensor

from flyball_kernels.backend import Backend
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.memory import available_memory_bytes
from flyball_runtime.core.model_config import ModelConfig
from flyball_runtime.model.linear import Place
from flyball_runtime.model.transformer import CausalLM
from flyball_runtime.model.weights import Header, iter_headers, iter_weights, weight_files

logger = logging.getLogger(__name__)

MAX_NAMES_IN_MESSAGE = 5
DTYPES = ("BF16", "F16", "F32", "F64")


def load_model(
    path: str | Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    backend: Backend,
    max_model_len: int | None = None,
) -> CausalLM:
    """Build the model and fill it from the directory's safetensors, converting to ``dtype`` on the way.

    The files' headers are held against the config first, so a checkpoint that does not fit its config.json costs no memory.
    Weights are then copied one tensor at a time from the mapped file to where they stay, and packed one layer at a time, so
    memory peaks at the model and one layer.

    Args:
        max_model_len: longest context to prepare for; None is all that the model was made for.
    Raises:
        ConfigError: a file is missing or unreadable; a tensor is missing, unexpected or of the wrong shape or kind; or
            the device cannot hold the model.
    """
    start = time.monotonic()
    files = weight_files(Path(path))
    _check_headers(files, config)
    model = _allocate(config, max_model_len or config.max_context_len, Place(dtype, torch.device(device), backend))
    _fill(dict(model.destinations()), files)
    model.pack()
    logger.info(
        "loaded %d parameters as %s from %d file(s) in %.1f s",
        config.num_parameters,
        dtype,
        len(files),
        time.monotonic() - start,
    )
    return model


def _check_headers(files: list[Path], config: ModelConfig) -> None:
    """Every tensor that the model needs is there, once, in its shape; what is over on either side is an error."""
    nowhere = Place(torch.bfloat16, torch.device("meta"), Backend("torch"))
    empty = CausalLM(config, max_len=1, place=nowhere)  # shapes without memory
    waiting = {name: tuple(tensor.shape) for name, tensor in empty.destinations()}
    expected = set(waiting)
    for header in iter_headers(files):
        if _is_ignorable(header.name, config):
            continue
        if header.name not in waiting:
            raise ConfigError(f"{header.file}: {_why_not_wanted(header.name, expected, config)}")
        _check(header, waiting.pop(header.name))
    if waiting:
        names = sorted(waiting)
        shown = ", ".join(names[:MAX_NAMES_IN_MESSAGE])
        more = f" and {len(names) - MAX_NAMES_IN_MESSAGE} more" if len(names) > MAX_NAMES_IN_MESSAGE else ""
        raise ConfigError(
            f"{files[0].parent} lacks {len(names)} tensor(s) that {config.architecture} needs: {shown}{more}. "
            f"Looked in {', '.join(file.name for file in files)}. Download or export the checkpoint again."
        )


def _allocate(config: ModelConfig, max_len: int, place: Place) -> CausalLM:
    dtype, device = place.dtype, place.device
    free_bytes = _free_bytes(device)
    if config.num_parameters * dtype.itemsize > free_bytes:
        raise _too_large(config, dtype, device, f"{free_bytes / 2**30:.1f} GiB are free")
    try:
        return CausalLM(config, max_len=max_len, place=place)
    except RuntimeError as error:  # how torch says "out of memory", on every device
        raise _too_large(config, dtype, device, str(error)) from error


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory_bytes()


def _too_large(config: ModelConfig, dtype: torch.dtype, device: torch.device, why: str) -> ConfigError:
    gib = config.num_parameters * dtype.itemsize / 2**30
    return ConfigError(
        f"{config.architecture} with {config.num_parameters} parameters needs {gib:.1f} GiB as {dtype}, which {device} "
        f"cannot give ({why}). Use a smaller model or dtype, or a larger machine."
    )


def _fill(destinations: dict[str, Tensor], files: list[Path]) -> None:
    for name, tensor in iter_weights(files):
        if name in destinations:  # else it is one that the model has without the file
            destinations[name].copy_(tensor)


def _is_ignorable(name: str, config: ModelConfig) -> bool:
    """Whether the model has this without the file: RoPE's frequencies, or the head when it is the embedding."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)


def _why_not_wanted(name: str, expected: set[str], config: ModelConfig) -> str:
    if name in expected:
        return f"tensor {name} is in the checkpoint twice. Keep one of them."
    return (
        f"tensor {name} is not part of {config.architecture} as config.json describes it. "
        "Check that config.json and the weights belong together."
    )


def _check(header: Header, shape: tuple[int, ...]) -> None:
    if header.shape != shape:
        raise ConfigError(
            f"{header.file}: tensor {header.name} has shape {list(header.shape)}; config.json asks for {list(shape)}. "
            "Check that config.json and the weights belong together."
        )
    if header.dtype not in DTYPES:
        raise ConfigError(
            f"{header.file}: tensor {header.name} is {header.dtype}; it must be one of {', '.join(DTYPES)}. "
            "Quantized checkpoints are not supported."
        )
