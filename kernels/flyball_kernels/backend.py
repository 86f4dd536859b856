"""Which implementation the ops run: Triton on CUDA, our C++ on CPU, or the torch references.

CPU linear layers are chosen apart, because torch has good ones too. Facts about the library and the CPU decide, and no
timing: two replicas on equal machines, and two starts of one, have to give the same bits.
"""

import logging
import os

import torch

from flyball_kernels.cpu import library, variants

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "cpp", "torch", "triton")

LINEAR_VARIABLE = "FLYBALL_CPU_LINEAR"
"""Environment variable that names the CPU linear layers to run, one of LINEAR_BACKENDS."""

LINEAR_BACKENDS = ("auto", "cpp", "torch")

MEASURED = frozenset({"x86-64-v3", "x86-64-v4", "x86-64-v4-bf16", "x86-64-v4-amx"})
"""Instruction sets with which the C++ linear layers have been measured against torch's (see docs/decisions.md)."""

_in_force: dict[str, tuple[str, str]] = {}  # device type -> backend, and that of linear layers


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
        ValueError, RuntimeError: as ``resolve_backend``; or LINEAR_VARIABLE asks for what cannot run.
    """
    backend = resolve_backend(device, requested)
    device_type = torch.device(device).type
    linear = _resolve_linear(backend, requested) if device_type == "cpu" else "torch"
    _in_force[device_type] = backend, linear
    return backend


def backend_for(tensor: torch.Tensor) -> str:
    """Return the backend in force for the tensor's device; the first use of a device without a choice takes ``auto``."""
    return _both_for(tensor)[0]


def linear_backend_for(tensor: torch.Tensor) -> str:
    """Return whose linear layers run on the tensor's device: ``cpp`` or ``torch``."""
    return _both_for(tensor)[1]


def reason_for_torch(compiled_for: str, machine: str, cpu_flags: frozenset[str]) -> str | None:
    """Return why torch's linear layers are the better choice on a CPU; None if the C++ ones are.

    Args:
        compiled_for: instruction set of the C++ ops.
        machine, cpu_flags: as ``variants.this_cpu`` returns them.
    """
    if compiled_for not in MEASURED:
        return f"those for {compiled_for} have not been measured"
    names = [variant.name for variant in variants.variants_of(machine) if variant.cpu_flags <= cpu_flags]
    if compiled_for in names[1:]:
        return f"this CPU has {names[0]}, which torch uses, and the C++ ops are compiled for {compiled_for}"
    return None


def _both_for(tensor: torch.Tensor) -> tuple[str, str]:
    device_type = tensor.device.type
    if device_type not in _in_force:
        set_backend(device_type)
    return _in_force[device_type]


def _resolve_linear(backend: str, requested: str) -> str:
    named = os.environ.get(LINEAR_VARIABLE, "auto")
    if named not in LINEAR_BACKENDS:
        raise ValueError(f"{LINEAR_VARIABLE} is {named!r}; it must be one of {', '.join(LINEAR_BACKENDS)}.")
    if backend != "cpp":
        if named == "cpp":
            raise ValueError(
                f"{LINEAR_VARIABLE} is 'cpp', but the backend is {backend!r}. Unset it, or use backend 'cpp'."
            )
        return "torch"
    if named == "auto" and requested == "auto":
        reason = reason_for_torch(torch.ops.flyball.instruction_set(), *variants.this_cpu())
        if reason is not None:
            logger.warning(
                "CPU linear layers: torch, not C++, because %s. %s=cpp runs the C++ ones.", reason, LINEAR_VARIABLE
            )
            return "torch"
    chosen = "torch" if named == "torch" else "cpp"
    logger.info("CPU linear layers: %s", chosen)
    return chosen


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
