"""A linear layer that holds its weight in the layout that is fastest on its device."""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from flyball_kernels.backend import Backend
from flyball_kernels.checks import check_contiguous, check_dtype, check_shape
from flyball_kernels.linear import reference
from flyball_kernels.linear.reference import Grouped, Rounded

GROUP_SIZES = {4: 32, 8: 128}
"""Features of a group that have one scale, unless told, by bits: of weights that are rounded as they come, more lose more."""

MAX_INT8_FEATURES = 65536
"""With more in_features, sums of products of bytes do not fit 32 bits."""


Arithmetic = Literal["fma", "dot", "blocks"]


class PackedLinear:
    """``x @ weight.T + bias`` for inference.

    On CPU the C++ kernel keeps the weight in panels of output features, whatever the number of rows it will meet, and
    this packed copy is the only one held: drop your own reference to ``weight``. Its out_features are rounded up to the
    panel's (32 with AVX-512, 16 with AVX2, else 8), its in_features to 2, or in blocks, from 64 on, to 64. Elsewhere, and with
    the ``torch`` backend, the weight is kept as it is for ``torch.nn.functional.linear``; so it is where torch's linear layers
    are chosen (see ``backend.py``) and ``arithmetic`` is None.

    Args:
        weight: ``[out_features, in_features]`` bf16, fp16 or fp32.
        bias: ``[out_features]`` or None, dtype of ``weight``.
        arithmetic: of the ``cpp`` backend; None chooses the fastest. ``"fma"`` multiplies in fp32. For bf16 there are
            ``"dot"``, the CPU's bf16 dot product (AMX, AVX512_BF16, Arm's BF16), and ``"blocks"``, whole numbers that share an
            exponent in blocks of 64 features (AVX2, AVX512_VNNI).
    Raises:
        ValueError: the shapes or dtypes do not fit, or this backend, dtype or CPU does not have the arithmetic.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, *, backend: Backend, arithmetic: Arithmetic | None = None
    ) -> None:
        _check(weight, bias)
        self.out_features, self.in_features = weight.shape
        is_cpp = backend.name == "cpp"
        if arithmetic is not None and not is_cpp:
            raise ValueError(
                f"arithmetic={arithmetic!r} is for the cpp backend; this is {backend.name}. "
                "Leave it out, or choose cpp on a CPU."
            )
        self._dtype = weight.dtype
        self._packed = is_cpp and (arithmetic is not None or backend.linear == "cpp")
        self._weight = weight.detach()
        if self._packed:
            self._arithmetic = arithmetic or torch.ops.flyball.linear_arithmetic(weight.dtype)
            self._weight = torch.ops.flyball.linear_pack(self._weight, self._arithmetic)
        self._bias = None if bias is None else bias.detach().contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``[..., out_features]`` of ``x`` ``[..., in_features]``, in the dtype of the weight.

        Products and sums are fp32, rounded once. In blocks, weights of less than 1/16 of the largest of their block are off
        by at most 1/4096 of that, and inputs of less than 1/32 by at most 1/8192, where bf16 had rounded the largest itself by
        up to 1/512; and a row with a value that is not finite gives NaN. With the ``cpp`` backend a row's result is the same to
        the last bit whatever rows stand beside it and however many.

        Raises:
            ValueError: the last dimension of ``x`` is not in_features, or its dtype is not the weight's.
        """
        _check_input(x, self.in_features, self._dtype)
        if not self._packed:
            return F.linear(x, self._weight, self._bias)
        rows = x.reshape(-1, self.in_features)
        out = torch.ops.flyball.linear(rows, self._weight, self._bias, self.out_features, self._arithmetic)
        return out.view(*x.shape[:-1], self.out_features)

    @property
    def kernel(self) -> Any:
        """The layer for C++ ops that contain one; None where the weight is not packed."""
        if not self._packed:
            return None
        return torch.classes.flyball.Linear.packed(
            self._weight, self._bias, self.out_features, self.in_features, self._arithmetic
        )


class Int8Linear:
    """``x @ weight.T + bias`` for inference, in 8 bits (W8A8).

    Each row of the weight is rounded to multiples of its largest magnitude over 127, and so is each row of ``x`` as it
    comes (LLM.int8() without its outliers: Dettmers et al. 2022, section 2). Sums are exact; the result is rounded once.

    Weights take half the memory of bf16, and a CPU with AVX512_VNNI multiplies them twice as fast. Elsewhere
    the C++ kernel gains less. With the ``triton`` backend the weight stays ``[out_features, in_features]`` int8, with a
    scale for each row. The ``torch`` backend is a reference.

    Args:
        weight: ``[out_features, in_features]`` bf16, fp16 or fp32; at most MAX_INT8_FEATURES in_features. Or what it was
            rounded to, ``Rounded``.
        bias: ``[out_features]`` or None, of ``dtype``.
        dtype: of ``x`` and the result: that of ``weight``, which need not be told.
    Raises:
        ValueError: the shapes or dtypes do not fit.
    """

    def __init__(
        self,
        weight: Tensor | Rounded,
        bias: Tensor | None = None,
        *,
        backend: Backend,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._is_cpp, self._is_triton = backend.name == "cpp", backend.name == "triton"
        self._dtype = _dtype_of(weight, dtype)
        if isinstance(weight, Rounded):
            rounded = weight
            _check_rounded(rounded, bias, torch.int8, self._dtype)
        else:
            _check(weight, bias)
            rounded = Rounded(*self._round_rows(weight.detach()))
        self.out_features, self.in_features = rounded.values.shape
        if self.in_features > MAX_INT8_FEATURES:
            raise ValueError(f"weight has {self.in_features} in_features; in 8 bits it may have {MAX_INT8_FEATURES}.")
        self._weight = torch.ops.flyball.linear_int8_pack(*rounded) if self._is_cpp else rounded
        self._bias = None if bias is None else bias.detach().contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``[..., out_features]`` of ``x`` ``[..., in_features]``, in the dtype of the weight.

        A row's result is the same to the last bit whatever rows stand beside it. A row with a value that is not finite
        gives NaN.

        Raises:
            ValueError: the last dimension of ``x`` is not in_features, or its dtype is not the weight's.
        """
        _check_input(x, self.in_features, self._dtype)
        rows = x.reshape(-1, self.in_features)
        if self._is_cpp:
            out = torch.ops.flyball.linear_int8(rows, *self._weight, self._bias, self.out_features)
        elif self._is_triton:
            from flyball_kernels.linear import kernel  # triton is there on Linux only

            out = kernel.int8_linear(rows, self._weight, self._bias)
        else:
            out = reference.int8_linear(rows, self._weight, self._bias)
        return out.view(*x.shape[:-1], self.out_features)

    @property
    def kernel(self) -> Any:
        """As in ``PackedLinear``; None with the ``torch`` backend."""
        if not self._is_cpp:
            return None
        return torch.classes.flyball.Linear.int8(*self._weight, self._bias, self.out_features, self.in_features)

    def _round_rows(self, weight: Tensor) -> Rounded:
        if self._is_triton:
            from flyball_kernels.linear import kernel

            return kernel.round_rows(weight.contiguous())
        return torch.ops.flyball.linear_int8_round(weight) if self._is_cpp else reference.round_rows(weight)


class GroupedLinear:
    """``x @ weight.T + bias`` for inference, with weights of 4 or 8 bits and inputs of 16 (W4A16, W8A16) or 8 (W4A8).

    Groups of each row of the weight have a scale of their own. Sums are fp32, and the result is rounded once. A row with a
    value that is not finite gives NaN or infinity.

    With inputs of 16 bits, products are exact, but for the C++ kernel with bf16 on a CPU with AVX2 or SDOT, which multiplies
    whole numbers: there inputs of less than 1/64 of the largest one of their group (or 4,096 features of it; beside weights of
    8 bits 256) are off by at most 1/32640 of that. With inputs of 8 bits, those of a group, or of equal parts of one with at
    most 128 features, are rounded to multiples of their largest magnitude over 127, as llama.cpp does for Q4_0. That is for
    weights of 4 bits, and for the ``cpp`` and ``torch`` backends.

    Weights of 4 bits take little more than a quarter of the memory of bf16, those of 8 bits half of it, and on a CPU few rows
    about as much less time. Many rows take about half the time with inputs of 8 bits; ``Int8Linear`` has both in 8.
    ``kernel.Packed`` describes the layout of the ``triton`` backend. The ``torch`` backend is a reference.

    Args:
        weight: ``[out_features, in_features]`` bf16, fp16 or fp32, which is rounded in groups; or what it was rounded to,
            ``Grouped``.
        bias: ``[out_features]`` or None, of ``dtype``.
        bits: 4 or 8, of a weight that is rounded here.
        group_size: of a weight that is rounded here, unless that of ``GROUP_SIZES``: an even number, with several groups and
            the ``triton`` backend a multiple of 16.
        dtype: of ``x`` and the result: that of ``weight``, which need not be told.
        input_bits: 16, or 8 beside weights of 4.
    Raises:
        ValueError: the shapes or dtypes do not fit, or the backend has no kernel for inputs of 8 bits.
    """

    def __init__(
        self,
        weight: Tensor | Grouped,
        bias: Tensor | None = None,
        *,
        backend: Backend,
        bits: Literal[4, 8] = 4,
        group_size: int | None = None,
        dtype: torch.dtype | None = None,
        input_bits: Literal[8, 16] = 16,
    ) -> None:
        self._is_cpp, self._is_triton = backend.name == "cpp", backend.name == "triton"
        if self._is_triton and input_bits == 8:
            raise ValueError("weights of 4 bits with inputs of 8 are for the cpp and torch backends; this is triton.")
        self._dtype = _dtype_of(weight, dtype)
        if isinstance(weight, Grouped):
            grouped = weight
            _check_bias(bias, weight.values.shape[0], self._dtype)
        else:
            _check(weight, bias)
            if bits not in GROUP_SIZES:
                raise ValueError(f"bits is {bits}; weights are rounded to 4 or 8.")
            size = GROUP_SIZES[bits] if group_size is None else group_size
            _check_group_size(size)
            grouped = reference.round_groups(weight.detach(), size, bits)
        _check_grouped(grouped)
        if input_bits not in ((8, 16) if grouped.bits == 4 else (16,)):
            raise ValueError(
                f"input_bits is {input_bits} beside weights of {grouped.bits} bits; it may be 16, or 8 beside weights of 4."
            )
        self.out_features, self.in_features = grouped.values.shape
        grouped = grouped.without_needless_zeros()
        self._input_bits, self._group_size = input_bits, grouped.group_size
        if self._is_triton:
            from flyball_kernels.linear import kernel  # triton is there on Linux only

            self._weight = kernel.pack_groups(grouped)
        elif self._is_cpp:
            self._weight, self._settings = self._packed(grouped)
        else:
            self._weight = reference.unrounded(grouped)
        self._bias = None if bias is None else bias.detach().contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``[..., out_features]`` of ``x`` ``[..., in_features]``, in the dtype of the weight.

        With the ``cpp`` backend a row's result is the same to the last bit whatever rows stand beside it.

        Raises:
            ValueError: the last dimension of ``x`` is not in_features, or its dtype is not the weight's.
        """
        _check_input(x, self.in_features, self._dtype)
        rows = x.reshape(-1, self.in_features)
        if self._is_cpp:
            out = torch.ops.flyball.linear_grouped(rows, self._weight, self._bias, self.out_features, *self._settings)
        elif self._is_triton:
            from flyball_kernels.linear import kernel

            out = kernel.grouped_linear(rows, self._weight, self._bias)
        else:
            rounds = self._input_bits == 8
            inputs = reference.round_inputs(rows, self._group_size) if rounds else rows
            out = reference.linear(inputs, self._weight, self._bias).to(self._dtype)
        return out.view(*x.shape[:-1], self.out_features)

    @property
    def kernel(self) -> Any:
        """As in ``PackedLinear``; None with the ``torch`` backend."""
        if not self._is_cpp:
            return None
        return torch.classes.flyball.Linear.grouped(
            self._weight, self._bias, self.out_features, self.in_features, *self._settings
        )

    def _packed(self, grouped: Grouped) -> tuple[Tensor, tuple[Any, ...]]:
        """Return the weight, and what the C++ op has to know of it."""
        scales, offsets = grouped.scales_in(self._dtype), None
        if grouped.zeros is not None:
            offsets = grouped.scales * (grouped.zeros.float() - grouped.middle)
        bits, group_size, input_bits = grouped.bits, grouped.group_size, self._input_bits
        packed = torch.ops.flyball.linear_grouped_pack(
            grouped.values, scales, offsets, bits, group_size, self._dtype, input_bits
        )
        return packed, (bits, group_size, offsets is not None, scales.dtype, input_bits)


class Float8Linear:
    """``x @ weight.T + bias`` for inference, with weights of 8 bits in e4m3 and inputs as they are (W8A16).

    Each row of the weight has a scale. Products are exact, sums are fp32, and the result is rounded once. A weight of NaN makes
    its output feature NaN. The weight stays ``[out_features, in_features]``. The ``torch`` backend is a reference; there is no
    C++ kernel.

    Args:
        weight: ``[out_features, in_features]`` bf16, fp16 or fp32; or what it was rounded to, ``Rounded`` with float8_e4m3fn.
        bias: ``[out_features]`` or None, of ``dtype``.
        dtype: of ``x`` and the result: that of ``weight``, which need not be told.
    Raises:
        ValueError: the shapes or dtypes do not fit, or the backend is neither ``triton`` nor ``torch``.
    """

    def __init__(
        self,
        weight: Tensor | Rounded,
        bias: Tensor | None = None,
        *,
        backend: Backend,
        dtype: torch.dtype | None = None,
    ) -> None:
        if backend.name not in ("triton", "torch"):
            raise ValueError(f"fp8 linear layers are for the triton and torch backends; this is {backend.name}.")
        self._is_triton = backend.name == "triton"
        self._dtype = _dtype_of(weight, dtype)
        if isinstance(weight, Rounded):
            _check_rounded(weight, bias, torch.float8_e4m3fn, self._dtype)
            self._weight = reference.with_nan_in_scales(weight)
        else:
            _check(weight, bias)
            self._weight = reference.round_to_float8(weight.detach())
        self.out_features, self.in_features = self._weight.values.shape
        self._bias = None if bias is None else bias.detach().contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``[..., out_features]`` of ``x`` ``[..., in_features]``, in the dtype of the weight.

        Raises:
            ValueError: the last dimension of ``x`` is not in_features, or its dtype is not the weight's.
        """
        _check_input(x, self.in_features, self._dtype)
        rows = x.reshape(-1, self.in_features)
        if self._is_triton:
            from flyball_kernels.linear import kernel  # triton is there on Linux only

            out = kernel.float8_linear(rows, self._weight, self._bias)
        else:
            out = reference.float8_linear(rows, self._weight, self._bias)
        return out.view(*x.shape[:-1], self.out_features)

    @property
    def kernel(self) -> None:
        """As in ``PackedLinear``; None with either backend."""
        return None


Linear = PackedLinear | Int8Linear | GroupedLinear | Float8Linear


def _check_rounded(weight: Rounded, bias: Tensor | None, values_dtype: torch.dtype, dtype: torch.dtype) -> None:
    check_shape("values", weight.values, None, None)
    check_dtype("values", weight.values, values_dtype)
    check_contiguous("values", weight.values)
    check_shape("scales", weight.scales, weight.values.shape[0])
    check_dtype("scales", weight.scales, torch.float32)
    _check_bias(bias, weight.values.shape[0], dtype)


def _check_grouped(weight: Grouped) -> None:
    check_shape("values", weight.values, None, None)
    check_dtype("values", weight.values, torch.uint8)
    num_rows, num_columns = weight.values.shape
    if weight.bits not in GROUP_SIZES:
        raise ValueError(f"bits is {weight.bits}; it must be 4 or 8.")
    _check_group_size(weight.group_size)
    num_groups = -(-num_columns // weight.group_size)
    check_shape("scales", weight.scales, num_rows, num_groups)
    check_dtype("scales", weight.scales, torch.float32)
    if weight.zeros is not None:
        check_shape("zeros", weight.zeros, num_rows, num_groups)
        check_dtype("zeros", weight.zeros, torch.uint8)
    most = int(weight.values.max()) if weight.values.numel() else 0
    if most >= 2 * weight.middle:
        raise ValueError(f"values hold {most}; in {weight.bits} bits they are at most {2 * weight.middle - 1}.")


def _check_group_size(group_size: int) -> None:
    if group_size < 2 or group_size % 2:
        raise ValueError(f"group_size is {group_size}; it must be an even number above 0.")


def _check(weight: Tensor, bias: Tensor | None) -> None:
    check_shape("weight", weight, None, None)
    check_dtype("weight", weight, torch.bfloat16, torch.float16, torch.float32)
    _check_bias(bias, weight.shape[0], weight.dtype)


def _check_bias(bias: Tensor | None, out_features: int, dtype: torch.dtype) -> None:
    if bias is not None:
        check_shape("bias", bias, out_features)
        check_dtype("bias", bias, dtype)


def _dtype_of(weight: Tensor | Rounded | Grouped, dtype: torch.dtype | None) -> torch.dtype:
    if isinstance(weight, (Rounded, Grouped)):
        if dtype is None:
            raise ValueError("weights that have been rounded do not tell the dtype of inputs. Pass dtype.")
        return dtype
    if dtype not in (None, weight.dtype):
        raise ValueError(f"dtype is {dtype}, and the weight is {weight.dtype}. Leave dtype out.")
    return weight.dtype


def _check_input(x: Tensor, in_features: int, dtype: torch.dtype) -> None:
    if x.shape[-1] != in_features:
        raise ValueError(f"x has rows of {x.shape[-1]}; this layer takes {in_features}.")
    check_dtype("x", x, dtype)
