"""RMSNorm, alone or with the residual addition before it."""

import torch
from torch import Tensor

from flyball_kernels.backend import Backend
from flyball_kernels.checks import check_dtype, check_shape
from flyball_kernels.rms_norm import reference


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, backend: Backend, offset: float = 0.0) -> Tensor:
    """Scale the last dimension of ``x`` to unit root mean square, times ``offset + weight``.

    Args:
        x: ``[..., hidden]`` bf16, fp16 or fp32.
        weight: ``[hidden]``, dtype of ``x``.
        eps: added to the mean square.
        offset: 1 for weights that are relative to one (Gemma), which 16 bits would round.
    Returns:
        A new contiguous tensor like ``x``; computed in fp32 and rounded once.
    Raises:
        ValueError: weight does not fit ``x``, or rows are longer than the Triton kernel takes (65,536).
    """
    _check(x, weight)
    if backend.name == "cpp":
        return torch.ops.flyball.rms_norm(x, weight, eps, offset)
    if backend.name == "triton":
        from flyball_kernels.rms_norm import kernel  # triton is there on Linux only

        return kernel.rms_norm(x, weight, eps, offset)
    return reference.rms_norm(x, weight, eps, offset)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, backend: Backend, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return ``(rms_norm(x + residual), x + residual)``, both new tensors, in one pass over memory.

    Args:
        x, residual: ``[..., hidden]``, same shape and dtype.
        weight, eps, offset: as ``rms_norm``.
    Raises:
        ValueError: the tensors do not fit each other.
    """
    _check(x, weight)
    check_shape("residual", residual, *x.shape)
    check_dtype("residual", residual, x.dtype)
    if backend.name == "cpp":
        return torch.ops.flyball.add_rms_norm(x, residual, weight, eps, offset)
    if backend.name == "triton":
        from flyball_kernels.rms_norm import kernel  # triton is there on Linux only

        return kernel.add_rms_norm(x, residual, weight, eps, offset)
    return reference.add_rms_norm(x, residual, weight, eps, offset)


def _check(x: Tensor, weight: Tensor) -> None:
    check_shape("weight", weight, x.shape[-1])
    check_dtype("weight", weight, x.dtype)
