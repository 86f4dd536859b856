"""Which implementation the ops run: Triton on CUDA, our C++ on CPU, or the torch references.

CPU linear layers are chosen apart, because torch has good ones too. Facts about the library and the CPU decide, and no
timing: two replicas on equal machines, and two starts of one, have to give the same bits.
"""

import logging
import os
from dataclasses import dataclass

import torch

from flyball_kernels import flash_attention
from flyball_kernels.cpu import library, variants

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "cpp", "torch", "triton")

ATTENTION_BACKENDS = ("auto", "flyball", "flash_attn")

LINEAR_VARIABLE = "FLYBALL_CPU_LINEAR"
"""Environment variable that names the CPU linear layers to run, one of LINEAR_BACKENDS."""

LINEAR_BACKENDS = ("auto", "cpp", "torch")

MEASURED = frozenset({"x86-64-v3", "x86-64-v4", "x86-64-v4-vnni", "x86-64-v4-bf16", "x86-64-v4-amx"})
"""Instruction sets with which the C++ linear layers have been measured against torch's (see docs/decisions.md).

For 16 and 32 bits, x86-64-v4-vnni has the instructions of x86-64-v4.
"""


@dataclass(frozen=True)
class Backend:
    """An implementation of the ops, from ``choose_backend``; every op takes it.

    Attributes:
        name: ``cpp``, ``torch`` or ``triton``.
        linear: whose linear layers run, ``cpp`` or ``torch``.
        attention: whose paged attention runs, ``flyball``'s or that of FlashAttention 3, ``flash_attn``.
    """

    name: str
    linear: str = "torch"
    attention: str = "flyball"


def choose_backend(device: torch.device | str, requested: str = "auto", attention: str = "auto") -> Backend:
    """Return the backend that ``requested`` means on ``device``, with the attention that is asked for; ``auto`` is Flyball's.

    ``auto`` is ``triton`` on CUDA, ``cpp`` on CPU and ``torch`` elsewhere (meta tensors). Where the C++ ops can be neither
    loaded nor built it is ``torch`` on CPU too, with a warning that says what is missing and how to get it.

    Raises:
        ValueError: ``requested`` or ``attention`` is not a backend, or cannot run on this device; or LINEAR_VARIABLE asks for
            what cannot.
        RuntimeError: ``cpp`` was asked for and its library can be neither loaded nor built.
    """
    name = _resolve(device, requested)
    on_cpu = torch.device(device).type == "cpu"
    linear = _resolve_linear(name, requested) if on_cpu else "torch"
    return Backend(name, linear, _resolve_attention(torch.device(device), name, attention))


def _resolve(device: torch.device | str, requested: str) -> str:
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


def _resolve_attention(device: torch.device, backend: str, requested: str) -> str:
    if requested not in ATTENTION_BACKENDS:
        raise ValueError(f"attention backend is {requested!r}; it must be one of {', '.join(ATTENTION_BACKENDS)}.")
    if requested != "flash_attn":
        return "flyball"
    flash_attention.check_can_run(device)
    if backend != "triton":
        raise ValueError(f"attention backend 'flash_attn' goes with kernel backend 'triton', not with {backend!r}.")
    return requested


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
