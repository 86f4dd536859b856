"""Names of dtypes, as flags and config.json spell them, and torch's own."""

from typing import cast

import torch

from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.model_config import DType, ModelConfig

TORCH_DTYPES: dict[DType, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


def resolve_dtype(requested: str, config: ModelConfig) -> DType:
    """The dtype to serve in: ``auto`` is the one the weights were saved in.

    Raises:
        ConfigError: ``requested`` is neither ``auto`` nor a supported dtype.
    """
    if requested == "auto":
        return config.dtype
    if requested not in TORCH_DTYPES:
        raise ConfigError(f"--dtype is {requested!r}; it must be one of auto, {', '.join(TORCH_DTYPES)}.")
    return cast(DType, requested)
