"""Triton kernels for linear layers of 8 and 4 bits.

One program computes a tile of the output, transposed: weights are the left operand of the product, which Hopper's matrix
instructions take from registers, where 4 bits and e4m3 become numbers of 16. Neighbouring programs have the same weights.
Products are exact and sums are fp32, or int32; scales multiply sums.

Tile sizes are the fastest on an H100 of those tried that spill no register (``python -m flyball_kernels.aot``).
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from flyball_kernels.linear.reference import Grouped, Rounded
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
def _places(num_rows, out_features, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the tile's rows and columns in int64, and which of them there are."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    return rows.to(tl.int64), rows < num_rows, columns.to(tl.int64), columns < out_features


@triton.jit
def _store(sums, bias_ptr, out_ptr, rows, is_row, columns, is_column, out_features):
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)[:, None]
    places = out_ptr + rows[None, :] * out_features + columns[:, None]
    tl.store(places, sums.to(out_ptr.dtype.element_ty), mask=is_row[None, :] & is_column[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def int8_kernel(
    x_ptr,  # [num_rows, row_numel] int8
    x_scales_ptr,  # [num_rows] fp32
    weight_ptr,  # [out_features, row_numel] int8
    scales_ptr,  # [out_features] fp32
    bias_ptr,  # [out_features], or None
    out_ptr,  # [num_rows, out_features]
    num_rows,
    out_features,
    row_numel,  # in_features
    BLOCK_M: tl.constexpr,  # rows of a tile
    BLOCK_N: tl.constexpr,  # columns of a tile
    BLOCK_K: tl.constexpr,  # features per turn
):
    rows, is_row, columns, is_column = _places(num_rows, out_features, BLOCK_M, BLOCK_N)
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.int32)
    for start in range(0, row_numel, BLOCK_K):
        features = start + tl.arange(0, BLOCK_K)
        is_feature = (features < row_numel)[None, :]
        x_places = x_ptr + rows[:, None] * row_numel + features[None, :]
        x = tl.load(x_places, mask=is_row[:, None] & is_feature, other=0)
        places = weight_ptr + columns[:, None] * row_numel + features[None, :]
        weight = tl.load(places, mask=is_column[:, None] & is_feature, other=0)
        sums = tl.dot(weight, tl.trans(x), sums, out_dtype=tl.int32)
    x_scales = tl.load(x_scales_ptr + rows, mask=is_row, other=0.0)
    scales = tl.load(scales_ptr + columns, mask=is_column, other=0.0)
    out = sums.to(tl.float32) * (scales[:, None] * x_scales[None, :])
    _store(out, bias_ptr, out_ptr, rows, is_row, columns, is_column, out_features)


@triton.jit(do_not_specialize=["num_rows"])
def float8_kernel(
    x_ptr,  # [num_rows, row_numel]
    weight_ptr,  # [out_features, row_numel] uint8, the bits of e4m3
    scales_ptr,  # [out_features] fp32
    bias_ptr,  # as above, and so on
    out_ptr,
    num_rows,
    out_features,
    row_numel,
    DOT_DTYPE: tl.constexpr,  # what is multiplied, the dtype of x on a GPU
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    rows, is_row, columns, is_column = _places(num_rows, out_features, BLOCK_M, BLOCK_N)
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, row_numel, BLOCK_K):
        features = start + tl.arange(0, BLOCK_K)
        is_feature = (features < row_numel)[None, :]
        x_places = x_ptr + rows[:, None] * row_numel + features[None, :]
        x = tl.load(x_places, mask=is_row[:, None] & is_feature, other=0.0).to(DOT_DTYPE)
        places = weight_ptr + columns[:, None] * row_numel + features[None, :]
        weight = from_e4m3(tl.load(places, mask=is_column[:, None] & is_feature, other=0))
        sums = tl.dot(weight.to(DOT_DTYPE), tl.trans(x), sums, input_precision="ieee")
    sums *= tl.load(scales_ptr + columns, mask=is_column, other=0.0)[:, None]
    _store(sums, bias_ptr, out_ptr, rows, is_row, columns, is_column, out_features)


@triton.jit
def _add_chunk(
    sums, numbers, chunk, x_ptr, scales_ptr, zeros_ptr, rows, is_row, columns, is_column, out_features, row_numel,
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
    x_places = x_ptr + rows[:, None] * row_numel + features[None, :]
    x = tl.load(x_places, mask=is_row[:, None] & (features < row_numel)[None, :], other=0.0).to(DOT_DTYPE)
    part = tl.dot(weight.to(tl.float32).to(DOT_DTYPE), tl.trans(x), input_precision="ieee")
    return sums + part * scales[:, None]


@triton.jit(do_not_specialize=["num_rows"])
def grouped_kernel(
    x_ptr,  # [num_rows, row_numel]
    weight_ptr,  # [out_features, packed_numel] uint8, see Packed
    scales_ptr,  # [num_groups, out_features]
    zeros_ptr,  # [num_groups, out_features] uint8, or None: the middle everywhere
    bias_ptr,
    out_ptr,
    num_rows,
    out_features,
    row_numel,
    packed_numel,
    num_scales,  # num_groups * out_features
    BITS: tl.constexpr,  # of a weight
    CHUNK: tl.constexpr,
    CHUNKS_PER_GROUP: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    rows, is_row, columns, is_column = _places(num_rows, out_features, BLOCK_M, BLOCK_N)
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, packed_numel, CHUNK):
        places = weight_ptr + columns[:, None] * packed_numel + start + tl.arange(0, CHUNK)[None, :]
        packed = tl.load(places, mask=is_column[:, None], other=0)
        chunk = start // CHUNK * (8 // BITS)
        sums = _add_chunk(
            sums, packed if BITS == 8 else packed & 15, chunk, x_ptr, scales_ptr, zeros_ptr, rows, is_row, columns, is_column,
            out_features, row_numel, num_scales, BITS, CHUNK, CHUNKS_PER_GROUP, DOT_DTYPE,
        )  # fmt: skip
        if BITS == 4:
            sums = _add_chunk(
                sums, packed >> 4, chunk + 1, x_ptr, scales_ptr, zeros_ptr, rows, is_row, columns, is_column,
                out_features, row_numel, num_scales, BITS, CHUNK, CHUNKS_PER_GROUP, DOT_DTYPE,
            )  # fmt: skip
    _store(sums, bias_ptr, out_ptr, rows, is_row, columns, is_column, out_features)


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


def choose_tile(num_rows: int, dtype: torch.dtype, bits: int | None = None) -> Tile:
    """Return the tile's sizes: with few rows, narrow tiles leave enough programs to read the weights.

    Args:
        dtype: of what is multiplied; fp32 takes more registers.
        bits: of weights in groups; None: they are int8 or e4m3, and the tile has BLOCK_K, its features per turn.
    """
    if dtype == torch.float32:
        sizes, num_warps = (16, 32, 64), 4
    elif num_rows <= FEW_ROWS:
        sizes, num_warps = (16, 32, 256), 2
    elif num_rows <= SOME_ROWS or bits == 4:  # larger ones of 4 bits need more shared memory than sm_86 has
        sizes, num_warps = (64, 64, 64), 4
    elif bits == 8:
        sizes, num_warps = (128, 64, 64), 4
    else:
        sizes, num_warps = (128, 128, 128 if dtype == torch.int8 else 64), 8
    names = ("BLOCK_M", "BLOCK_N", "BLOCK_K") if bits is None else ("BLOCK_M", "BLOCK_N")
    return Tile(dict(zip(names, sizes, strict=False)), num_warps)


def round_rows(x: Tensor) -> Rounded:
    """Round each row of a contiguous matrix to 8 bits, as the reference does."""
    num_rows, num_features = x.shape
    values = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scales = torch.empty(num_rows, device=x.device)
    if num_rows:
        block = min(2048, triton.next_power_of_2(num_features))
        round_rows_kernel[(num_rows,)](x, values, scales, num_features, BLOCK=block, **OPTIONS)
    return Rounded(values, scales)


def int8_linear(x: Tensor, weight: Rounded, bias: Tensor | None) -> Tensor:
    """Return ``[num_rows, out_features]``; arguments as the reference's, already checked."""
    rounded = round_rows(x.contiguous())
    tile = choose_tile(len(x), torch.int8)
    return _launch(int8_kernel, (*rounded, *weight), bias, x, weight.values.shape[0], (x.shape[1],), tile)


def float8_linear(x: Tensor, weight: Rounded, bias: Tensor | None) -> Tensor:
    """Return ``[num_rows, out_features]``; arguments as the reference's, already checked."""
    inputs = (x.contiguous(), weight.values.view(torch.uint8), weight.scales)
    tile = choose_tile(len(x), x.dtype)
    tile.constants["DOT_DTYPE"] = dot_dtype(x.dtype)
    return _launch(float8_kernel, inputs, bias, x, weight.values.shape[0], (x.shape[1],), tile)


def grouped_linear(x: Tensor, weight: Packed, bias: Tensor | None) -> Tensor:
    """Return ``[num_rows, out_features]`` of ``x`` ``[num_rows, in_features]``."""
    values, scales, zeros, bits, chunk, chunks_per_group = weight
    sizes = (x.shape[1], values.shape[1], scales.numel())
    tile = choose_tile(len(x), x.dtype, bits)
    tile.constants.update(BITS=bits, CHUNK=chunk, CHUNKS_PER_GROUP=chunks_per_group, DOT_DTYPE=dot_dtype(x.dtype))
    inputs = (x.contiguous(), values, scales, zeros)
    return _launch(grouped_kernel, inputs, bias, x, values.shape[0], sizes, tile)


def _launch(
    kernel: Any,
    inputs: tuple[Tensor | None, ...],
    bias: Tensor | None,
    x: Tensor,
    out_features: int,
    sizes: tuple[int, ...],
    tile: Tile,
) -> Tensor:
    num_rows = len(x)
    out = torch.empty(num_rows, out_features, dtype=x.dtype, device=x.device)
    if out.numel():
        grid = (triton.cdiv(num_rows, tile.constants["BLOCK_M"]), triton.cdiv(out_features, tile.constants["BLOCK_N"]))
        kernel[grid](*inputs, bias, out, num_rows, out_features, *sizes, **tile.constants, **_options(tile))
    return out


def _options(tile: Tile) -> dict[str, Any]:
    return OPTIONS | {"num_warps": tile.num_warps}


def specs() -> Iterator[Spec]:
    """Yield the variants to compile ahead of time: few rows and many, common groups, each dtype."""
    rounding = {"x_ptr": "*bf16", "values_ptr": "*i8", "scales_ptr": "*fp32", "row_numel": "i32"}
    yield Spec("linear int8 rounding", round_rows_kernel, rounding, {"BLOCK": 2048}, OPTIONS)
    types = {"x_ptr": "*i8", "x_scales_ptr": "*fp32", "weight_ptr": "*i8", "scales_ptr": "*fp32", "out_ptr": "*bf16"}
    types |= {"num_rows": "i32", "out_features": "i32", "row_numel": "i32"}
    for rows, num_rows in (("few", 1), ("many", 512)):
        tile = choose_tile(num_rows, torch.int8)
        yield Spec(f"linear int8 {rows} rows", int8_kernel, types, tile.constants | {"bias_ptr": None}, _options(tile))
    types = types | {"x_ptr": "*bf16", "weight_ptr": "*u8"}
    del types["x_scales_ptr"]
    for rows, num_rows in (("few", 1), ("many", 512)):
        tile = choose_tile(num_rows, torch.bfloat16)
        constants = tile.constants | {"bias_ptr": None, "DOT_DTYPE": tl.bfloat16}
        yield Spec(f"linear fp8 bf16 {rows} rows", float8_kernel, types, constants, _options(tile))
    yield _grouped_spec(4, "bf16", torch.bfloat16, 32, 1, has_zeros=False)
    yield _grouped_spec(4, "bf16", torch.bfloat16, 128, 512, has_zeros=True)
    yield _grouped_spec(4, "fp16", torch.float16, 128, 1, has_zeros=True)
    yield _grouped_spec(4, "fp32", torch.float32, 32, 512, has_zeros=False)
    yield _grouped_spec(8, "bf16", torch.bfloat16, 128, 1, has_zeros=False)
    yield _grouped_spec(8, "bf16", torch.bfloat16, 128, 512, has_zeros=True)
    yield _grouped_spec(8, "fp16", torch.float16, 32, 512, has_zeros=False)


def _grouped_spec(bits: int, name: str, dtype: torch.dtype, group_size: int, num_rows: int, has_zeros: bool) -> Spec:
    types = {"x_ptr": f"*{name}", "weight_ptr": "*u8", "scales_ptr": f"*{name}", "out_ptr": f"*{name}"}
    types |= dict.fromkeys(("num_rows", "out_features", "row_numel", "packed_numel", "num_scales"), "i32")
    types |= {"zeros_ptr": "*u8"} if has_zeros else {}
    chunk = min(MAX_CHUNK, group_size)
    constants = {"BITS": bits, "CHUNK": chunk, "CHUNKS_PER_GROUP": group_size // chunk, "DOT_DTYPE": dot_dtype(dtype)}
    tile = choose_tile(num_rows, dtype, bits)
    constants |= tile.constants | {"bias_ptr": None} | ({} if has_zeros else {"zeros_ptr": None})
    rows = "few" if num_rows <= FEW_ROWS else "many"
    weights = "int4" if bits == 4 else "w8a16"
    title = f"linear {weights} {name} g{group_size}{' zeros' if has_zeros else ''} {rows} rows"
    return Spec(title, grouped_kernel, types, constants, _options(tile))
