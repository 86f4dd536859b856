"""Triton kernel for the elementwise part of gated linear units: one program per (token, piece of its row)."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from flyball_kernels.spec import Spec

BLOCK = 1024
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


@triton.jit
def swiglu_kernel(
    gate_up_ptr,  # [num_tokens, 2 * SIZE], rows row_stride apart
    out_ptr,  # [num_tokens, SIZE]
    row_stride,
    SIZE: tl.constexpr,
    GELU: tl.constexpr,  # GELU with tanh, or SiLU
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < SIZE
    gate = tl.load(gate_up_ptr + token * row_stride + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + token * row_stride + SIZE + cols, mask=mask, other=0.0).to(tl.float32)
    inner = gate
    if GELU:  # x * (1 + tanh(u)) / 2 is x * sigmoid(2 * u), u = sqrt(2 / pi) * (x + 0.044715 * x**3)
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    activated = gate / (1.0 + tl.exp(-inner))
    tl.store(out_ptr + token * SIZE + cols, (activated * up).to(out_ptr.dtype.element_ty), mask=mask)


def swiglu(gate_up: Tensor, activation: str) -> Tensor:
    """Launch the kernel; arguments as the public op, already checked."""
    num_tokens, width = gate_up.shape
    size = width // 2
    out = torch.empty(num_tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() == 0:
        return out
    gate_up = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    block = min(BLOCK, triton.next_power_of_2(size))
    swiglu_kernel[(num_tokens, triton.cdiv(size, block))](
        gate_up, out, gate_up.stride(0), SIZE=size, GELU=activation == "gelu_tanh", BLOCK=block, **OPTIONS
    )
    return out


def specs() -> Iterator[Spec]:
    """Yield the variants to compile ahead of time."""
    types = {"gate_up_ptr": "*bf16", "out_ptr": "*bf16", "row_stride": "i32"}
    for name, gelu in (("swiglu bf16", False), ("geglu bf16", True)):
        yield Spec(name, swiglu_kernel, types, {"SIZE": 3072, "GELU": gelu, "BLOCK": BLOCK}, OPTIONS)
