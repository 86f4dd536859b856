"""Triton kernel for RMSNorm and the residual addition: one program per row, which stays in registers."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from flyball_kernels.spec import Spec

MAX_HIDDEN = 65536
"""Longest row: 64 values for each of 1,024 threads."""


@triton.jit
def rms_norm_kernel(
    x_ptr,  # [num_rows, HIDDEN], rows x_stride apart
    residual_ptr,  # likewise, or None
    weight_ptr,  # [HIDDEN]
    out_ptr,  # [num_rows, HIDDEN]
    total_ptr,  # as out, or None: x + residual
    x_stride,
    residual_stride,
    eps,
    offset,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,  # HIDDEN rounded up to a power of two
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < HIDDEN
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + row * residual_stride + cols, mask=mask, other=0.0).to(tl.float32)
        total = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * HIDDEN + cols, total, mask=mask)
        x = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / HIDDEN + eps)
    weight = offset + tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * HIDDEN + cols, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Launch the kernel; arguments as the public op, already checked."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(_rows(x), None, weight, out, None, eps, offset)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """Launch the kernel; arguments as the public op, already checked."""
    out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _launch(_rows(x), _rows(residual), weight, out, total, eps, offset)
    return out, total


def _rows(x: Tensor) -> Tensor:
    """Return ``x`` as a matrix of contiguous rows."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, total: Tensor | None, eps: float, offset: float
) -> None:
    num_rows, hidden = x.shape
    if hidden > MAX_HIDDEN:
        raise ValueError(f"x has rows of {hidden}; the Triton kernel takes at most {MAX_HIDDEN}. Use backend 'torch'.")
    if num_rows == 0:
        return
    rms_norm_kernel[(num_rows,)](
        x,
        residual,
        weight.contiguous(),
        out,
        total,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
        offset,
        HIDDEN=hidden,
        BLOCK=triton.next_power_of_2(hidden),
        **_options(hidden),
    )


def _options(hidden: int) -> dict[str, int | bool]:
    return {"num_warps": min(max(triton.next_power_of_2(hidden) // 256, 1), 32), "enable_fp_fusion": True}


def specs() -> Iterator[Spec]:
    """Yield the variants to compile ahead of time."""
    for dtype, hidden, adds in (("bf16", 1024, True), ("bf16", 1024, False), ("fp32", 16384, True)):
        tensors = ("x_ptr", "residual_ptr", "weight_ptr", "out_ptr", "total_ptr")
        given = tensors if adds else ("x_ptr", "weight_ptr", "out_ptr")
        types = dict.fromkeys(given, f"*{dtype}") | {"eps": "fp32", "offset": "fp32"}
        types |= {"x_stride": "i32", "residual_stride": "i32"}
        constants = {"HIDDEN": hidden, "BLOCK": triton.next_power_of_2(hidden)}
        constants |= dict.fromkeys(set(tensors) - set(given))
        name = f"{'add_' if adds else ''}rms_norm {dtype} {hidden}"
        yield Spec(name, rms_norm_kernel, types, constants, _options(hidden))
