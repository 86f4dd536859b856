"""Triton kernels around the linear layers of experts, which are in ``linear/kernel.py``."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from flyball_kernels.experts.reference import Routing
from flyball_kernels.linear.reference import Assignment
from flyball_kernels.spec import Spec

BLOCK = 1024
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


@triton.jit
def route_kernel(
    logits_ptr,  # [num_tokens, num_experts]
    weights_ptr,  # [num_tokens, PER_TOKEN] fp32, written
    experts_ptr,  # [num_tokens, PER_TOKEN] int32, written
    num_experts,
    PER_TOKEN: tl.constexpr,
    NORMALIZES: tl.constexpr,
    BLOCK_E: tl.constexpr,  # at least num_experts
    BLOCK_K: tl.constexpr,  # at least PER_TOKEN
):
    """Choose a token's experts: the likeliest ones, the first of equal ones first. A row that is no distribution gets NaN."""
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK_E)
    logits = tl.load(logits_ptr + token * num_experts + experts, mask=experts < num_experts, other=float("-inf"))
    logits = logits.to(tl.float32)
    is_bad = tl.max(tl.where(logits < float("inf"), 0, 1), axis=0) > 0  # NaN is not below
    logits = tl.where(is_bad, 0.0, logits)
    top = tl.max(logits, axis=0)
    is_bad = is_bad | (top == float("-inf"))
    weights = tl.exp(logits - tl.where(is_bad, 0.0, top))
    total = tl.sum(weights, axis=0)
    places = tl.arange(0, BLOCK_K)
    chosen = tl.zeros([BLOCK_K], tl.int32)
    chosen_weights = tl.zeros([BLOCK_K], tl.float32)
    is_left = experts < num_experts
    for place in range(PER_TOKEN):
        best = tl.max(tl.where(is_left, logits, float("-inf")), axis=0)
        expert = tl.min(tl.where(is_left & (logits == best), experts, BLOCK_E), axis=0)
        chosen = tl.where(places == place, expert, chosen)
        weight = tl.sum(tl.where(experts == expert, weights, 0.0), axis=0)
        chosen_weights = tl.where(places == place, weight, chosen_weights)
        is_left = is_left & (experts != expert)
    if NORMALIZES:
        total = tl.sum(chosen_weights, axis=0)
    chosen_weights = tl.where(is_bad, float("nan"), chosen_weights / tl.where(is_bad, 1.0, total))
    tl.store(weights_ptr + token * PER_TOKEN + places, chosen_weights, mask=places < PER_TOKEN)
    tl.store(experts_ptr + token * PER_TOKEN + places, chosen, mask=places < PER_TOKEN)


@triton.jit(do_not_specialize=["num_rows"])
def assign_kernel(
    experts_ptr,  # [num_rows] int32
    order_ptr,  # [num_rows] int32, written
    starts_ptr,  # [num_experts + 1] int32, written
    num_rows,
    BLOCK: tl.constexpr,
):
    """Write where an expert's rows begin, and which they are. One program per expert, which reads the experts of all rows."""
    expert = tl.program_id(0)
    num_below = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_rows, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        num_below += tl.where(tl.load(experts_ptr + rows, mask=rows < num_rows, other=expert) < expert, 1, 0)
    place = tl.sum(num_below, axis=0)
    tl.store(starts_ptr + expert, place)
    for start in range(0, num_rows, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        is_ours = tl.load(experts_ptr + rows, mask=rows < num_rows, other=-1) == expert
        until = tl.cumsum(is_ours.to(tl.int32), axis=0)
        tl.store(order_ptr + place + until - 1, rows, mask=is_ours)
        place += tl.max(until, axis=0)
    if expert == tl.num_programs(0) - 1:
        tl.store(starts_ptr + expert + 1, place)


@triton.jit
def clamped_swiglu_kernel(
    gate_up_ptr,  # [num_tokens, 2 * SIZE]
    out_ptr,  # [num_tokens, SIZE]
    limit,
    alpha,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    pairs = tl.program_id(1) * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
    gate_up = tl.load(gate_up_ptr + token * 2 * SIZE + pairs, mask=pairs < 2 * SIZE, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.reshape(gate_up, [BLOCK, 2]))
    gate = tl.where(gate > limit, limit, gate)  # NaN stays
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    out = (up + 1.0) * gate / (1.0 + tl.exp(-gate * alpha))
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + token * SIZE + columns, out.to(out_ptr.dtype.element_ty), mask=columns < SIZE)


@triton.jit
def weighted_sum_kernel(
    outputs_ptr,  # [num_tokens, PER_TOKEN, SIZE]
    weights_ptr,  # [num_tokens, PER_TOKEN] fp32
    shared_ptr,  # [num_tokens, SIZE], or None
    shared_gate_ptr,  # [num_tokens], or None
    out_ptr,  # [num_tokens, SIZE]
    PER_TOKEN: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < SIZE
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(PER_TOKEN):
        row = token * PER_TOKEN + place
        output = tl.load(outputs_ptr + row * SIZE + columns, mask=is_column, other=0.0).to(tl.float32)
        total += output * tl.load(weights_ptr + row)
    if shared_ptr is not None:
        shared = tl.load(shared_ptr + token * SIZE + columns, mask=is_column, other=0.0).to(tl.float32)
        total += shared / (1.0 + tl.exp(-tl.load(shared_gate_ptr + token).to(tl.float32)))
    tl.store(out_ptr + token * SIZE + columns, total.to(out_ptr.dtype.element_ty), mask=is_column)


def route(logits: Tensor, experts_per_token: int, normalizes: bool) -> Routing:
    """Launch the kernel; arguments as the public op, already checked."""
    num_tokens, num_experts = logits.shape
    weights = torch.empty(num_tokens, experts_per_token, device=logits.device)
    experts = torch.empty(num_tokens, experts_per_token, dtype=torch.int32, device=logits.device)
    if num_tokens:
        route_kernel[(num_tokens,)](
            logits.contiguous(),
            weights,
            experts,
            num_experts,
            PER_TOKEN=experts_per_token,
            NORMALIZES=normalizes,
            BLOCK_E=triton.next_power_of_2(num_experts),
            BLOCK_K=triton.next_power_of_2(experts_per_token),
            **OPTIONS | {"num_warps": 1},
        )
    return Routing(weights, experts)


def assign(experts: Tensor, num_experts: int) -> Assignment:
    """Launch the kernel; arguments as the public op, already checked."""
    order = torch.empty(experts.numel(), dtype=torch.int32, device=experts.device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=experts.device)
    assign_kernel[(num_experts,)](experts.contiguous(), order, starts, len(order), BLOCK=BLOCK, **OPTIONS)
    return Assignment(order, starts)


def clamped_swiglu(gate_up: Tensor, limit: float, alpha: float) -> Tensor:
    """Launch the kernel; arguments as the public op, already checked."""
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        block = min(BLOCK, triton.next_power_of_2(size))
        grid = (num_tokens, triton.cdiv(size, block))
        clamped_swiglu_kernel[grid](gate_up.contiguous(), out, limit, alpha, SIZE=size, BLOCK=block, **OPTIONS)
    return out


def weighted_sum(outputs: Tensor, weights: Tensor, shared: Tensor | None, shared_gate: Tensor | None) -> Tensor:
    """Launch the kernel; arguments as the public op, already checked."""
    num_tokens, experts_per_token, size = outputs.shape
    out = torch.empty(num_tokens, size, dtype=outputs.dtype, device=outputs.device)
    if out.numel():
        block = min(BLOCK, triton.next_power_of_2(size))
        tensors = [None if x is None else x.contiguous() for x in (outputs, weights, shared, shared_gate)]
        weighted_sum_kernel[(num_tokens, triton.cdiv(size, block))](
            *tensors, out, PER_TOKEN=experts_per_token, SIZE=size, BLOCK=block, **OPTIONS
        )
    return out


def specs() -> Iterator[Spec]:
    """Yield the variants to compile ahead of time: as many experts as Qwen3-30B-A3B has, and gpt-oss's activation."""
    yield Spec(
        "experts route bf16",
        route_kernel,
        {"logits_ptr": "*bf16", "weights_ptr": "*fp32", "experts_ptr": "*i32", "num_experts": "i32"},
        {"PER_TOKEN": 8, "NORMALIZES": True, "BLOCK_E": 128, "BLOCK_K": 8},
        OPTIONS | {"num_warps": 1},
    )
    types = {"experts_ptr": "*i32", "order_ptr": "*i32", "starts_ptr": "*i32", "num_rows": "i32"}
    yield Spec("experts assign", assign_kernel, types, {"BLOCK": BLOCK}, OPTIONS)
    types = {"gate_up_ptr": "*bf16", "out_ptr": "*bf16", "limit": "fp32", "alpha": "fp32"}
    yield Spec("experts clamped swiglu bf16", clamped_swiglu_kernel, types, {"SIZE": 2880, "BLOCK": BLOCK}, OPTIONS)
    types = {"outputs_ptr": "*bf16", "weights_ptr": "*fp32", "out_ptr": "*bf16"}
    constants = {"PER_TOKEN": 8, "SIZE": 2048, "BLOCK": BLOCK}
    alone = {"shared_ptr": None, "shared_gate_ptr": None}
    yield Spec("experts sum bf16", weighted_sum_kernel, types, constants | alone, OPTIONS)
    types |= {"shared_ptr": "*bf16", "shared_gate_ptr": "*bf16"}
    yield Spec("experts sum bf16 shared", weighted_sum_kernel, types, constants, OPTIONS)
