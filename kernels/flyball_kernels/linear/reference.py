"""What a linear layer means."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return out.to(x.dtype)


class Assignment(NamedTuple):
    """Which of several layers of equal shape each row of the output needs.

    Attributes:
        order: ``[num_rows]`` int32, the rows in the order of their layers, those of one layer in their own order.
        starts: ``[num_layers + 1]`` int32, where the rows of a layer begin in ``order``; those of the last one end at num_rows.
    """

    order: Tensor
    starts: Tensor


class Rounded(NamedTuple):
    """A matrix of numbers of 8 bits, ``[rows, columns]`` int8 or float8_e4m3fn, and their unit in each row, ``[rows]`` fp32."""

    values: Tensor
    scales: Tensor


def round_rows(matrix: Tensor) -> Rounded:
    """Round each row to numbers from -127 to 127. A row with a value that is not finite has the scale NaN."""
    values, scales = _scale_rows(matrix, 127.0)
    return Rounded(values.round().nan_to_num().to(torch.int8), scales)


def _scale_rows(matrix: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """Return the rows, each with this as its largest magnitude, and what a 1 in them stands for."""
    most = matrix.float().abs().amax(dim=1)
    most = torch.where(most.isfinite(), most, torch.nan)
    # with a number in place of a tensor, torch multiplies by a rounded reciprocal: on either side, on some devices
    new_most = torch.full_like(most, largest)
    units = torch.where(most > 1e-30, new_most / most, 0.0)
    return matrix.float() * units[:, None], most / new_most


class Grouped(NamedTuple):
    """A matrix of few bits: ``scales * (values - zeros)``, where groups of a row have their own scale and zero.

    Attributes:
        values: ``[rows, columns]`` uint8, from 0 to 15, or to 255 with 8 bits.
        scales: ``[rows, num_groups]`` fp32.
        zeros: ``[rows, num_groups]`` uint8; None: ``middle`` everywhere.
        group_size: columns of a group; the last one may have fewer.
        bits: 4 or 8.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    group_size: int
    bits: int = 4

    @property
    def middle(self) -> int:
        """Half of the numbers: 8, or 128."""
        return 1 << (self.bits - 1)

    def without_needless_zeros(self) -> "Grouped":
        """Return the same matrix, without zeros if all of them are the middle."""
        is_needed = self.zeros is not None and not bool((self.zeros == self.middle).all())
        return self if is_needed else self._replace(zeros=None)

    def scales_in(self, *dtypes: torch.dtype) -> Tensor:
        """Return the scales in the first of these dtypes that rounds none of them, else in fp32."""
        for dtype in dtypes:
            if torch.equal(self.scales.to(dtype).float(), self.scales):
                return self.scales.to(dtype)
        return self.scales


def round_groups(matrix: Tensor, group_size: int, bits: int = 4) -> Grouped:
    """Round groups of each row to numbers of so many bits, whose zeros are the middle. That of largest magnitude becomes 0."""
    middle = 1 << (bits - 1)
    rows, columns = matrix.shape
    padding = -columns % group_size
    groups = F.pad(matrix.float(), (0, padding)).view(rows, -1, group_size)
    most = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    scales = most / -float(middle)
    # a group of zeros has no scale of use, nor one too small to be divided by
    units = torch.where(scales.abs() > 1e-30, torch.full_like(scales, 1.0) / scales, 0.0)
    values = (groups * units).round().nan_to_num().clamp(-middle, middle - 1) + middle
    values = values.to(torch.uint8).view(rows, -1)[:, :columns].contiguous()
    return Grouped(values, scales[:, :, 0], None, group_size, bits)


def unrounded(weight: Grouped) -> Tensor:
    """Return the matrix as fp32."""
    scales = _of_columns(weight.scales, weight)
    zeros = float(weight.middle) if weight.zeros is None else _of_columns(weight.zeros.float(), weight)
    return (weight.values.float() - zeros) * scales


def _of_columns(of_groups: Tensor, weight: Grouped) -> Tensor:
    return of_groups.repeat_interleave(weight.group_size, dim=1)[:, : weight.values.shape[1]]


MAX_INPUT_GROUP = 128
"""Features whose inputs have one unit where they are rounded to 8 bits beside weights of 4; with more, more is lost."""


def round_inputs(x: Tensor, group_size: int) -> Tensor:
    """Return inputs ``[rows, features]`` as fp32, rounded to 8 bits in each group, or in equal parts of large ones."""
    group_size = min(group_size, x.shape[1])
    num_parts = -(-group_size // MAX_INPUT_GROUP)
    part_size = -(-group_size // (4 * num_parts)) * 4  # the C++ kernel multiplies four features at a time
    groups = [part for group in x.split(group_size, dim=1) for part in group.split(part_size, dim=1)]
    rounded = [round_rows(group) for group in groups]
    return torch.cat([values.float() * scales[:, None] for values, scales in rounded], dim=1)


def int8_linear(x: Tensor, weight: Rounded, bias: Tensor | None) -> Tensor:
    rounded = round_rows(x)
    sums = rounded.values.double() @ weight.values.double().T  # exact
    out = sums.float() * (rounded.scales[:, None] * weight.scales)
    return (out if bias is None else out + bias.float()).to(x.dtype)


MAX_FLOAT8 = 448.0
"""The largest number of e4m3."""


def round_to_float8(matrix: Tensor) -> Rounded:
    """Round each row to e4m3, its largest magnitude to MAX_FLOAT8. A row with a value that is not finite has the scale NaN."""
    values, scales = _scale_rows(matrix, MAX_FLOAT8)
    return Rounded(values.nan_to_num().clamp(-MAX_FLOAT8, MAX_FLOAT8).to(torch.float8_e4m3fn), scales)


def with_nan_in_scales(weight: Rounded) -> Rounded:
    """Return a matrix of e4m3 with NaN as the scale of each row that has a NaN, for kernels that read NaN as a number."""
    is_nan = (weight.values.view(torch.uint8) & 0x7F) == 0x7F
    return weight._replace(scales=weight.scales.masked_fill(is_nan.any(dim=1), torch.nan))


def float8_linear(x: Tensor, weight: Rounded, bias: Tensor | None) -> Tensor:
    out = F.linear(x.float(), weight.values.float()) * weight.scales
    return (out if bias is None else out + bias.float()).to(x.dtype)
