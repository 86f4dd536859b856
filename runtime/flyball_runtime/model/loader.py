"""From a checkpoint directory to a model that can run."""

import logging
import time
from pathlib import Path

import torch
from torch import Tensor

from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.model_config import ModelConfig
from flyball_runtime.model.transformer import CausalLM
from flyball_runtime.model.weights import iter_weights, weight_files

logger = logging.getLogger(__name__)

MAX_NAMES_IN_MESSAGE = 5


def load_model(
    path: str | Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    max_model_len: int | None = None,
) -> CausalLM:
    """Build the model and fill it from the directory's safetensors, converting to ``dtype`` on the way.

    Weights are copied one tensor at a time from the mapped file to where they stay, and packed one layer at a time, so
    memory peaks at the model and one layer.

    Args:
        max_model_len: longest context to prepare for; None is all that the model was made for.
    Raises:
        ConfigError: a file is missing or unreadable; a tensor is missing, unexpected or of the wrong shape or kind; or
            the device cannot hold the model.
    """
    start = time.monotonic()
    files = weight_files(Path(path))
    model = _allocate(config, max_model_len or config.max_context_len, dtype, torch.device(device))
    _fill(dict(model.destinations()), files, config)
    model.pack()
    logger.info(
        "loaded %d parameters as %s from %d file(s) in %.1f s",
        config.num_parameters,
        dtype,
        len(files),
        time.monotonic() - start,
    )
    return model


def _allocate(config: ModelConfig, max_len: int, dtype: torch.dtype, device: torch.device) -> CausalLM:
    try:
        return CausalLM(config, max_len=max_len, dtype=dtype, device=device)
    except RuntimeError as error:  # how torch says "out of memory", on every device
        gib = config.num_parameters * dtype.itemsize / 2**30
        raise ConfigError(
            f"{config.architecture} with {config.num_parameters} parameters needs {gib:.1f} GiB as {dtype}, which {device} "
            f"cannot give ({error}). Use a smaller model or dtype, or a larger machine."
        ) from error


def _fill(waiting: dict[str, Tensor], files: list[Path], config: ModelConfig) -> None:
    """Copy every tensor to its destination; what is over on either side is an error."""
    expected = set(waiting)
    for file, name, tensor in iter_weights(files):
        if _is_ignorable(name, config):
            continue
        if name not in waiting:
            raise ConfigError(f"{file}: {_why_not_wanted(name, expected, config)}")
        _check(file, name, tensor, waiting[name].shape)
        waiting.pop(name).copy_(tensor)
    if waiting:
        names = sorted(waiting)
        shown = ", ".join(names[:MAX_NAMES_IN_MESSAGE])
        more = f" and {len(names) - MAX_NAMES_IN_MESSAGE} more" if len(names) > MAX_NAMES_IN_MESSAGE else ""
        raise ConfigError(
            f"{files[0].parent} lacks {len(names)} tensor(s) that {config.architecture} needs: {shown}{more}. "
            f"Looked in {', '.join(file.name for file in files)}. Download or export the checkpoint again."
        )


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


def _check(file: Path, name: str, tensor: Tensor, shape: torch.Size) -> None:
    if tensor.shape != shape:
        raise ConfigError(
            f"{file}: tensor {name} has shape {list(tensor.shape)}; config.json asks for {list(shape)}. "
            "Check that config.json and the weights belong together."
        )
    if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
        raise ConfigError(
            f"{file}: tensor {name} is {tensor.dtype}; it must be bfloat16, float16 or float32. "
            "Quantized checkpoints are not supported."
        )
