"""Which implementation the ops run: Triton on CUDA, our C++ on CPU, or the torch references."""

import logging
import os

import torch

from flyball_kernels.cpu import library

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "cpp", "torch", "triton")

_in_force: dict[str, str] = {}  # device type -> backend
_by_name: set[str] = set()  # device types whose backend was asked for by name


def resolve_backend(device: torch.device | str, requested: str = "auto") -> str:
    """Return the backend that ``requested`` means on ``device``: ``cpp``, ``torch`` or ``triton``.

    ``auto`` is ``triton`` on CUDA, ``cpp`` on CPU and ``torch`` elsewhere (meta tensors). Where the C++ ops can be neither
    loaded nor built it is ``torch`` on CPU too, with a warning that says what is missing and how to get it.

    Raises:
        ValueError: ``requested`` is not a backend, or cannot run on this device.
        RuntimeError: ``cpp`` was asked for and its library can be neither loaded nor built.
    """
    device_type = torch.device(device).type
    if requested not in BACKENDS:
        raise ValueError(f"kernel backend is {requested!r}; it must be one of {', '.join(BACKENDS)}.")
    if requested == "auto":
        return _cpp_or_torch() if device_type == "cpu" else "triton" if device_type == "cuda" else "torch"
    if requested == "cpp":
        if device_type != "cpu":
            raise ValueError(f"kernel backend 'cpp' runs on cpu, not on {device_type}; use 'triton' or 'auto'.")
        library.load()
    if requested == "triton" and device_type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"kernel backend 'triton' runs on cuda, not on {device_type}; use 'cpp' or 'auto'.")
    return requested


def set_backend(device: torch.device | str, requested: str = "auto") -> str:
    """Resolve ``requested`` for ``device``, make it the backend of every op on that device type, and return it.

    Raises:
        ValueError, RuntimeError: as ``resolve_backend``.
    """
    backend = resolve_backend(device, requested)
    device_type = torch.device(device).type
    _in_force[device_type] = backend
    (_by_name.discard if requested == "auto" else _by_name.add)(device_type)
    return backend


def backend_for(tensor: torch.Tensor) -> str:
    """Return the backend in force for the tensor's device; the first use of a device without a choice takes ``auto``."""
    device_type = tensor.device.type
    return _in_force.get(device_type) or set_backend(device_type)


def is_asked_for(tensor: torch.Tensor) -> bool:
    """Return whether the backend of the tensor's device was asked for by name, so that no op may choose another."""
    return tensor.device.type in _by_name


def _cpp_or_torch() -> str:
    try:
        library.load()
    except RuntimeError as error:
        logger.warning(
            "The C++ CPU ops are not available, so the slower torch references run instead. %s "
            "To choose this on purpose, pass --kernel-backend torch.",
            error,
        )
        return "torch"
    return "cpp"
