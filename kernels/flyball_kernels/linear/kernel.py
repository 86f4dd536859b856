"""Triton kernels for linear layers of 8 and 4 bits, and for those of experts, of any dtype.

One program computes a tile of the output, transposed: weights are the left operand of the product, which Hopper's matrix
instructions take from registers, where 4 bits and e4m3 become numbers of 16. Neighbouring programs have the same weights.
Products are exact and sums are fp32, or int32; scales multiply sums.

Experts are layers of equal shape, one after the other in each tensor, of which a row of the output needs one. A tile has
rows of one expert. The host does not know how many tiles that makes, so it starts as many as there can be, and the last ones
end at once.

Tile sizes are the fastest on an H100 of those tried that spill no register (``python -m flyball_kernels.aot``); those of
experts spill none either, and have not been measured.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from flyball_kernels.linear.reference import Assignment, Grouped, Rounded
from flyball_kernels.rounding import from_e4m3, scales_and_units, whole_numbers
from flyball_kernels.spec import Spec

MAX_CHUNK = 64
FEW_ROWS, SOME_ROWS = 16, 64
OPTIONS = {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": False}
"""Without fusion, numbers are rounded to 8 bits, and sums scaled, as the reference does it."""


@triton.jit
def round_rows_kernel(
    x_ptr,  # [num_rows, row_numel]
    values_ptr,  # likewise int8, written
    scales_ptr,  # [num_rows] fp32, written
    row_numel,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([BLOCK], tl.float32)
    num_bad = tl.zeros([BLOCK], tl.int32)
    for start in range(0, row_numel, BLOCK):
        features = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * row_numel + features, mask=features < row_numel, other=0.0).to(tl.float32)
        is_finite = tl.abs(x) < float("inf")
        num_bad += tl.where(is_finite, 0, 1)
        largest = tl.maximum(largest, tl.where(is_finite, tl.abs(x), 0.0))
    scale, units = scales_and_units(tl.max(largest, axis=0), tl.sum(num_bad, axis=0) == 0, 127.0)
    for start in range(0, row_numel, BLOCK):
        features = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * row_numel + features, mask=features < row_numel, other=0.0).to(tl.float32)
        tl.store(values_ptr + row * row_numel + features, whole_numbers(x, units), mask=features < row_numel)
    tl.store(scales_ptr + row, scale)


@triton.jit
def _rows(
    num_rows, order_ptr, starts_ptr, num_experts, PER_X: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr
):  # fmt: skip
    """Return the tile's expert, its rows of the output and of x, all in int64, and which of the rows there are.

    Of a tile too much the expert is num_experts or more.
    """
    tile = tl.program_id(0)
    if order_ptr is None:
        expert = 0
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        is_row = rows < num_rows
    else:
        experts = tl.arange(0, BLOCK_E)
        starts = tl.load(starts_ptr + experts, mask=experts < num_experts, other=0)
        ends = tl.load(starts_ptr + experts + 1, mask=experts < num_experts, other=0)
        num_tiles = (ends - starts + BLOCK_M - 1) // BLOCK_M
        tiles_until = tl.cumsum(num_tiles, axis=0)
        expert = tl.sum((tiles_until <= tile).to(tl.int32), axis=0)
        first = starts + (tile - (tiles_until - num_tiles)) * BLOCK_M
        places = tl.sum(tl.where(experts == expert, first, 0), axis=0) + tl.arange(0, BLOCK_M)
        is_row = places < tl.sum(tl.where(experts == expert, ends, 0), axis=0)
        rows = tl.load(order_ptr + places, mask=is_row, other=0)
    return tl.cast(expert, tl.int64), rows.to(tl.int64), (rows // PER_X).to(tl.int64), is_row


@triton.jit
def _columns(out_features, BLOCK_N: tl.constexpr):
    """Return the tile's columns in int64, and which of them there are."""
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    return columns.to(tl.int64), columns < out_features


@triton.jit
def _store(sums, bias_ptr, out_ptr, expert, rows, is_row, columns, is_column, out_features):
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert * out_features + columns, mask=is_column, other=0.0)
        sums += bias.to(tl.float32)[:, None]
    places = out_ptr + rows[None, :] * out_features + columns[:, None]
    tl.store(places, sums.to(out_ptr.dtype.element_ty), mask=is_row[None, :] & is_column[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def int8_kernel(
    x_ptr,  # [num_rows / PER_X, row_numel] int8
    x_scales_ptr,  # [num_rows / PER_X] fp32
    weight_ptr,  # [num_experts, out_features, row_numel] int8
    scales_ptr,  # [num_experts, out_features] fp32
    bias_ptr,  # [num_experts, out_features], or None
    out_ptr,  # [num_rows, out_features]
    order_ptr,  # [num_rows] int32, rows in the order of their experts; or None: there is one for all
    starts_ptr,  # [num_experts + 1] int32, where an expert's rows begin in that order; or None
    num_rows,
    num_experts,
    out_features,
    row_numel,  # in_features
    PER_X: tl.constexpr,  # neighbouring rows that have the same row of x
    BLOCK_M: tl.constexpr,  # rows of a tile
    BLOCK_N: tl.constexpr,  # columns of a tile
    BLOCK_K: tl.constexpr,  # features per turn
    BLOCK_E: tl.constexpr,  # at least num_experts
):
    expert, rows, x_rows, is_row = _rows(num_rows, order_ptr, starts_ptr, num_experts, PER_X, BLOCK_M, BLOCK_E)
    if expert >= num_experts:
        return
    columns, is_column = _columns(out_features, BLOCK_N)
    weight_ptr += expert * out_features * row_numel
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.int32)
    for start in range(0, row_numel, BLOCK_K):
        features = start + tl.arange(0, BLOCK_K)
        is_feature = (features < row_numel)[None, :]
        x_places = x_ptr + x_rows[:, None] * row_numel + features[None, :]
        x = tl.load(x_places, mask=is_row[:, None] & is_feature, other=0)
        places = weight_ptr + columns[:, None] * row_numel + features[None, :]
        weight = tl.load(places, mask=is_column[:, None] & is_feature, other=0)
        sums = tl.dot(weight, tl.trans(x), sums, out_dtype=tl.int32)
    x_scales = tl.load(x_scales_ptr + x_rows, mask=is_row, other=0.0)
    scales = tl.load(scales_ptr + expert * out_features + columns, mask=is_column, other=0.0)
    out = sums.to(tl.float32) * (scales[:, None] * x_scales[None, :])
    _store(out, bias_ptr, out_ptr, expert, rows, is_row, columns, is_column, out_features)


@triton.jit(do_not_specialize=["num_rows"])
def float_kernel(
    x_ptr,  # [num_rows / PER_X, row_numel]
    weight_ptr,  # [num_experts, out_features, row_numel], of the dtype of x, or uint8: the bits of e4m3
    scales_ptr,  # [num_experts, out_features] fp32, or None: the weights are not e4m3
    bias_ptr,  # as above, and so on
    out_ptr,
    order_ptr,
    starts_ptr,
    num_rows,
    num_experts,
    out_features,
    row_numel,
    DOT_DTYPE: tl.constexpr,  # what is multiplied, the dtype of x on a GPU
    PER_X: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    expert, rows, x_rows, is_row = _rows(num_rows, order_ptr, starts_ptr, num_experts, PER_X, BLOCK_M, BLOCK_E)
    if expert >= num_experts:
        return
    columns, is_column = _columns(out_features, BLOCK_N)
    weight_ptr += expert * out_features * row_numel
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, row_numel, BLOCK_K):
        features = start + tl.arange(0, BLOCK_K)
        is_feature = (features < row_numel)[None, :]
        x_places = x_ptr + x_rows[:, None] * row_numel + features[None, :]
        x = tl.load(x_places, mask=is_row[:, None] & is_feature, other=0.0).to(DOT_DTYPE)
        places = weight_ptr + columns[:, None] * row_numel + features[None, :]
        weight = tl.load(places, mask=is_column[:, None] & is_feature, other=0)
        if scales_ptr is not None:
            weight = from_e4m3(weight)
        sums = tl.dot(weight.to(DOT_DTYPE), tl.trans(x), sums, input_precision="ieee")
    if scales_ptr is not None:
        sums *= tl.load(scales_ptr + expert * out_features + columns, mask=is_column, other=0.0)[:, None]
    _store(sums, bias_ptr, out_ptr, expert, rows, is_row, columns, is_column, out_features)


@triton.jit
def _add_chunk(
    sums, numbers, chunk, x_ptr, scales_ptr, zeros_ptr, x_rows, is_row, columns, is_column, out_features, row_numel,
    num_scales, BITS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS_PER_GROUP: tl.constexpr, DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """Return the sums with the products of a chunk of features, whose weights are numbers of BITS bits."""
    places = (chunk // CHUNKS_PER_GROUP).to(tl.int64) * out_features + columns
    is_scale = is_column & (places < num_scales)  # the last chunk may be padding
    scales = tl.load(scales_ptr + places, mask=is_scale, other=0.0).to(tl.float32)
    weight = numbers.to(tl.int32)
    if zeros_ptr is None:
        weight -= 1 << (BITS - 1)
    else:
        weight -= tl.load(zeros_ptr + places, mask=is_scale, other=0).to(tl.int32)[:, None]
    features = chunk * CHUNK + tl.arange(0, CHUNK)
    x_places = x_ptr + x_rows[:, None] * row_numel + features[None, :]
    x = tl.load(x_places, mask=is_row[:, None] & (features < row_numel)[None, :], other=0.0).to(DOT_DTYPE)
    part = tl.dot(weight.to(tl.float32).to(DOT_DTYPE), tl.trans(x), input_precision="ieee")
    return sums + part * scales[:, None]


@triton.jit(do_not_specialize=["num_rows"])
def grouped_kernel(
    x_ptr,  # [num_rows / PER_X, row_numel]
    weight_ptr,  # [num_experts, out_features, packed_numel] uint8, see Packed
    scales_ptr,  # [num_experts, num_groups, out_features]
    zeros_ptr,  # [num_experts, num_groups, out_features] uint8, or None: the middle everywhere
    bias_ptr,
    out_ptr,
    order_ptr,
    starts_ptr,
    num_rows,
    num_experts,
    out_features,
    row_numel,
    packed_numel,
    num_scales,  # num_groups * out_features
    BITS: tl.constexpr,  # of a weight
    CHUNK: tl.constexpr,
    CHUNKS_PER_GROUP: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    PER_X: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    expert, rows, x_rows, is_row = _rows(num_rows, order_ptr, starts_ptr, num_experts, PER_X, BLOCK_M, BLOCK_E)
    if expert >= num_experts:
        return
    columns, is_column = _columns(out_features, BLOCK_N)
    weight_ptr += expert * out_features * packed_numel
    scales_ptr += expert * num_scales
    if zeros_ptr is not None:
        zeros_ptr += expert * num_scales
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, packed_numel, CHUNK):
        places = weight_ptr + columns[:, None] * packed_numel + start + tl.arange(0, CHUNK)[None, :]
        packed = tl.load(places, mask=is_column[:, None], other=0)
        chunk = start // CHUNK * (8 // BITS)
        sums = _add_chunk(
            sums, packed if BITS == 8 else packed & 15, chunk, x_ptr, scales_ptr, zeros_ptr, x_rows, is_row, columns, is_column,
            out_features, row_numel, num_scales, BITS, CHUNK, CHUNKS_PER_GROUP, DOT_DTYPE,
        )  # fmt: skip
        if BITS == 4:
            sums = _add_chunk(
                sums, packed >> 4, chunk + 1, x_ptr, scales_ptr, zeros_ptr, x_rows, is_row, columns, is_column,
                out_features, row_numel, num_scales, BITS, CHUNK, CHUNKS_PER_GROUP, DOT_DTYPE,
            )  # fmt: skip
    _store(sums, bias_ptr, out_ptr, expert, rows, is_row, columns, is_column, out_features)


class Packed(NamedTuple):
    """Weights in groups as the kernel takes them.

    Features are cut into chunks, none of which lies in two groups. A byte holds a weight of 8 bits, or those of two features of
    4: one of a chunk in its low half, and the feature of the next chunk that is as far from its beginning in its high half. So
    both halves meet inputs that are neighbours, and no number changes its place in registers.

    Attributes:
        values: ``[out_features, features * bits / 8]`` uint8; the features are rounded up to the chunks that bytes have.
        scales: ``[num_groups, out_features]`` of 16 bits if that rounds none of them, else fp32.
        zeros: ``[num_groups, out_features]`` uint8; None: the middle everywhere.
        bits: of a weight, 4 or 8.
        chunk: features of a chunk, a power of two from 16 to MAX_CHUNK.
        chunks_per_group: chunks that have one scale.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    chunk: int
    chunks_per_group: int


def pack_groups(weight: Grouped) -> Packed:
    """Return the weights as the kernel takes them.

    Raises:
        ValueError: the group size is not a multiple of 16, and there are several groups.
    """
    out_features, in_features = weight.values.shape
    group_size = weight.group_size
    if group_size >= in_features:  # one group, of any size that holds them
        group_size = max(16, triton.next_power_of_2(in_features))
    chunk = min(MAX_CHUNK, group_size & -group_size)
    if chunk < 16:
        raise ValueError(
            f"group_size is {group_size}; on a GPU it must be a multiple of 16. Use such weights, or a CPU."
        )
    at_once = 8 // weight.bits
    chunks = F.pad(weight.values, (0, -in_features % (at_once * chunk)), value=weight.middle)
    chunks = chunks.view(out_features, -1, at_once, chunk)
    values = chunks[:, :, 0] if at_once == 1 else chunks[:, :, 0] | chunks[:, :, 1] << 4
    zeros = None if weight.zeros is None else weight.zeros.T.contiguous()
    scales = weight.scales_in(torch.bfloat16, torch.float16).T.contiguous()
    return Packed(values.flatten(1).contiguous(), scales, zeros, weight.bits, chunk, group_size // chunk)


def dot_dtype(dtype: torch.dtype) -> tl.dtype:
    """Return the dtype in which inputs of ``dtype`` are multiplied."""
    if triton.knobs.runtime.interpret and dtype == torch.bfloat16:
        return tl.float32  # the interpreter multiplies bf16 matrices as integers
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]


class Tile(NamedTuple):
    """How a kernel is compiled: its constants, and options beside ``OPTIONS``."""

    constants: dict[str, Any]
    num_warps: int


def choose_tile(num_rows: int, dtype: torch.dtype, bits: int | None = None, *, of_experts: bool = False) -> Tile:
    """Return the tile's sizes: with few rows, narrow tiles leave enough programs to read the weights.

    Args:
        num_rows: of each expert on the average, if there are experts.
        dtype: of what is multiplied; fp32 takes more registers.
        bits: of weights in groups; None: they are in none, and the tile has BLOCK_K, its features per turn.
        of_experts: rows of x are then no neighbours, and addresses take more registers.
    """
    if dtype == torch.float32:
        sizes, num_warps = (16, 32, 64), 4
    elif num_rows <= FEW_ROWS:
        sizes, num_warps = (16, 32, 256), 2
    elif of_experts and bits is not None:
        sizes, num_warps = (64, 64, 64), 8
    elif of_experts and num_rows > SOME_ROWS:
        sizes, num_warps = (64, 128, 128 if dtype == torch.int8 else 64), 8
    elif num_rows <= SOME_ROWS or bits == 4:  # larger ones of 4 bits need more shared memory than sm_86 has
        sizes, num_warps = (64, 64, 64), 4
    elif bits == 8:
        sizes, num_warps = (128, 64, 64), 4
    else:
        sizes, num_warps = (128, 128, 128 if dtype == torch.int8 else 64), 8
    names = ("BLOCK_M", "BLOCK_N", "BLOCK_K") if bits is None else ("BLOCK_M", "BLOCK_N")
    return Tile(dict(zip(names, sizes, strict=False)), num_warps)


def most_tiles(num_rows: int, num_experts: int, block_m: int) -> int:
    """Return how many tiles of so many rows there can be, of each of which one expert has all rows."""
    return min(num_rows, num_experts + (num_rows - num_experts) // block_m)  # one tile of each expert may not be full


def round_rows(x: Tensor) -> Rounded:
    """Round each row of a contiguous matrix to 8 bits, as the reference does."""
    num_rows, num_features = x.shape
    values = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scales = torch.empty(num_rows, device=x.device)
    if num_rows:
        block = min(2048, triton.next_power_of_2(num_features))
        round_rows_kernel[(num_rows,)](x, values, scales, num_features, BLOCK=block, **OPTIONS)
    return Rounded(values, scales)


def int8_linear(x: Tensor, weight: Rounded, bias: Tensor | None, experts: Assignment | None = None) -> Tensor:
    """Return ``[num_rows, out_features]``; arguments as the reference's, already checked.

    Args:
        experts: which of the layers each row needs; the weights' tensors then have a dimension more, the first.
    """
    rounded = round_rows(x.contiguous())
    return _launch(int8_kernel, (*rounded, *weight), bias, x, weight.values, (), torch.int8, experts)


def float8_linear(x: Tensor, weight: Rounded, bias: Tensor | None, experts: Assignment | None = None) -> Tensor:
    """As ``int8_linear``."""
    values = weight.values.view(torch.uint8)
    return _launch(float_kernel, (x.contiguous(), values, weight.scales), bias, x, values, (), x.dtype, experts)


def float_linear(x: Tensor, weight: Tensor, bias: Tensor | None, experts: Assignment) -> Tensor:
    """As ``int8_linear``, of weights that are as they were."""
    return _launch(float_kernel, (x.contiguous(), weight, None), bias, x, weight, (), x.dtype, experts)


def grouped_linear(x: Tensor, weight: Packed, bias: Tensor | None, experts: Assignment | None = None) -> Tensor:
    """Return ``[num_rows, out_features]`` of ``x`` ``[num_rows, in_features]``; experts as in ``int8_linear``."""
    inputs = (x.contiguous(), weight.values, weight.scales, weight.zeros)
    sizes = (weight.values.shape[-1], weight.scales.shape[-2:].numel())
    return _launch(grouped_kernel, inputs, bias, x, weight.values, sizes, x.dtype, experts, weight)


def _launch(
    kernel: Any,
    inputs: tuple[Tensor | None, ...],
    bias: Tensor | None,
    x: Tensor,
    values: Tensor,
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    experts: Assignment | None,
    packed: Packed | None = None,
) -> Tensor:
    """Launch a kernel.

    Args:
        values: of the weights, ``[..., out_features, any]``.
        sizes: arguments of the kernel after ``row_numel``.
        dtype: of what is multiplied.
    """
    out_features = values.shape[-2]
    num_rows, num_experts = (len(x), 1) if experts is None else (len(experts.order), len(values))
    out = torch.empty(num_rows, out_features, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    bits = None if packed is None else packed.bits
    constants, num_warps = choose_tile(triton.cdiv(num_rows, num_experts), dtype, bits, of_experts=experts is not None)
    num_tiles = most_tiles(num_rows, num_experts, constants["BLOCK_M"])
    if kernel is not int8_kernel:
        constants["DOT_DTYPE"] = dot_dtype(dtype)
    if packed is not None:
        constants |= {"BITS": packed.bits, "CHUNK": packed.chunk, "CHUNKS_PER_GROUP": packed.chunks_per_group}
    kernel[num_tiles, triton.cdiv(out_features, constants["BLOCK_N"])](
        *inputs,
        bias,
        out,
        *((None, None) if experts is None else experts),
        num_rows,
        num_experts,
        out_features,
        x.shape[1],
        *sizes,
        **constants,
        PER_X=num_rows // len(x),
        BLOCK_E=triton.next_power_of_2(num_experts),
        **OPTIONS | {"num_warps": num_warps},
    )
    return out


def stack_groups(layers: Sequence[Packed]) -> Packed:
    """Return layers of equal shape one after the other: tensors have a dimension more, the first.

    Raises:
        ValueError: their groups are of different sizes, or their weights of different bits.
    """
    first = layers[0]
    for layer in layers:
        if layer[3:] != first[3:]:
            raise ValueError(f"experts have weights packed as {layer[3:]} and {first[3:]}; all must be packed alike.")
    scales_dtypes = {layer.scales.dtype for layer in layers}
    scales = torch.stack([layer.scales if len(scales_dtypes) == 1 else layer.scales.float() for layer in layers])
    zeros = None
    if any(layer.zeros is not None for layer in layers):
        middle = torch.full_like(first.scales, 1 << (first.bits - 1), dtype=torch.uint8)
        zeros = torch.stack([middle if layer.zeros is None else layer.zeros for layer in layers])
    return Packed(torch.stack([layer.values for layer in layers]), scales, zeros, *first[3:])


def specs() -> Iterator[Spec]:
    """Yield the variants to compile ahead of time: few rows and many, common groups, each dtype, one layer and 128 experts."""
    rounding = {"x_ptr": "*bf16", "values_ptr": "*i8", "scales_ptr": "*fp32", "row_numel": "i32"}
    yield Spec("linear int8 rounding", round_rows_kernel, rounding, {"BLOCK": 2048}, OPTIONS)
    for num_experts in (1, 128):
        of_int8 = {"x_ptr": "*i8", "x_scales_ptr": "*fp32", "weight_ptr": "*i8", "scales_ptr": "*fp32"}
        of_float8 = {"weight_ptr": "*u8", "scales_ptr": "*fp32"}
        for num_rows in (1, 512) if num_experts == 1 else (1, 64, 512):
            yield _spec("int8", int8_kernel, of_int8, "bf16", torch.int8, num_rows, num_experts)
            yield _spec("fp8 bf16", float_kernel, of_float8, "bf16", torch.bfloat16, num_rows, num_experts)
    for num_rows in (1, 64, 512):
        yield _spec("bf16", float_kernel, {"weight_ptr": "*bf16"}, "bf16", torch.bfloat16, num_rows, 128)
    yield _grouped_spec(4, "bf16", torch.bfloat16, 32, 1, has_zeros=False)
    yield _grouped_spec(4, "bf16", torch.bfloat16, 128, 512, has_zeros=True)
    yield _grouped_spec(4, "bf16", torch.bfloat16, 128, 1, has_zeros=True, num_experts=128)
    yield _grouped_spec(4, "bf16", torch.bfloat16, 128, 512, has_zeros=True, num_experts=128)
    yield _grouped_spec(4, "fp16", torch.float16, 128, 1, has_zeros=True)
    yield _grouped_spec(4, "fp32", torch.float32, 32, 512, has_zeros=False)
    yield _grouped_spec(8, "bf16", torch.bfloat16, 128, 1, has_zeros=False)
    yield _grouped_spec(8, "bf16", torch.bfloat16, 128, 512, has_zeros=True)
    yield _grouped_spec(8, "fp16", torch.float16, 32, 512, has_zeros=False)


def _spec(
    title: str,
    kernel: Any,
    types: dict[str, str],
    name: str,
    dtype: torch.dtype,
    num_rows: int,
    num_experts: int,
    packed: dict[str, int] | None = None,
) -> Spec:
    """Return a variant for so many rows of each expert.

    Args:
        types: of arguments that not all kernels have.
        name: Triton's, of the dtype of the output.
        packed: constants of weights in groups.
    """
    types = {"x_ptr": f"*{name}", "out_ptr": f"*{name}", **types}
    types |= dict.fromkeys(("num_rows", "out_features", "row_numel"), "i32")
    tile = choose_tile(num_rows, dtype, packed and packed["BITS"], of_experts=num_experts > 1)
    constants: dict[str, Any] = {
        "bias_ptr": None,
        "PER_X": 1 if num_experts == 1 else 8,
        "BLOCK_E": num_experts,
        **tile.constants,
        **(packed or {}),
    }
    if kernel is not int8_kernel:
        constants["DOT_DTYPE"] = dot_dtype(dtype)
    if num_experts == 1:
        constants |= {"num_experts": 1, "order_ptr": None, "starts_ptr": None}
    else:
        types |= {"order_ptr": "*i32", "starts_ptr": "*i32", "num_experts": "i32"}
    constants |= {name: None for name in ("scales_ptr", "zeros_ptr") if name not in types and name in kernel.arg_names}
    rows = {1: "few", 64: "some", 512: "many"}[num_rows]
    title = f"linear {title}{f' {num_experts} experts' if num_experts > 1 else ''} {rows} rows"
    return Spec(title, kernel, types, constants, OPTIONS | {"num_warps": tile.num_warps})


def _grouped_spec(
    bits: int, name: str, dtype: torch.dtype, group_size: int, num_rows: int, has_zeros: bool, num_experts: int = 1
) -> Spec:
    types = {"weight_ptr": "*u8", "scales_ptr": f"*{name}", **({"zeros_ptr": "*u8"} if has_zeros else {})}
    types |= dict.fromkeys(("packed_numel", "num_scales"), "i32")
    chunk = min(MAX_CHUNK, group_size)
    packed = {"BITS": bits, "CHUNK": chunk, "CHUNKS_PER_GROUP": group_size // chunk}
    title = f"{'int4' if bits == 4 else 'w8a16'} {name} g{group_size}{' zeros' if has_zeros else ''}"
    return _spec(title, grouped_kernel, types, name, dtype, num_rows, num_experts, packed)
