"""Which implementation the ops run; the engine asks here, because only this layer knows the kernels."""

import torch

from flyball_kernels.backend import set_backend
from flyball_runtime.core.errors import ConfigError


def use_kernel_backend(requested: str, device: torch.device) -> str:
    """Put a backend in force for ``device`` and return its name: cpp, torch or triton.

    Raises:
        ConfigError: it cannot run here; the message says why.
    """
    try:
        return set_backend(device, requested)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"--kernel-backend {requested}: {error}") from error
