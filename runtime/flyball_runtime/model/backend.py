"""Which implementation the ops run; the engine asks here, because only this layer knows the kernels."""

import torch

from flyball_kernels.backend import Backend, choose_backend
from flyball_runtime.core.errors import ConfigError


def kernel_backend(requested: str, device: torch.device) -> Backend:
    """Return the backend for ``device`` that ``requested`` means.

    Raises:
        ConfigError: it cannot run here; the message says why.
    """
    try:
        return choose_backend(device, requested)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"--kernel-backend {requested}: {error}") from error
