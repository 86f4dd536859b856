"""What a linear layer means."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return out.to(x.dtype)


class Rounded(NamedTuple):
    """A matrix of whole numbers, ``[rows, columns]`` int8, and their unit in each row, ``[rows]`` fp32."""

    values: Tensor
    scales: Tensor


def round_rows(matrix: Tensor) -> Rounded:
    """Round each row to numbers from -127 to 127. A row with a value that is not finite has the scale NaN."""
    most = matrix.float().abs().amax(dim=1)
    most = torch.where(most.isfinite(), most, torch.nan)
    # a number divided by a tensor is the tensor's reciprocal, rounded, times the number
    units = torch.where(most > 1e-30, torch.full_like(most, 127.0) / most, 0.0)
    values = (matrix.float() * units[:, None]).round().nan_to_num()
    return Rounded(values.to(torch.int8), most / 127.0)


def int8_linear(x: Tensor, weight: Rounded, bias: Tensor | None) -> Tensor:
    rounded = round_rows(x)
    sums = rounded.values.double() @ weight.values.double().T  # exact
    out = sums.float() * (rounded.scales[:, None] * weight.scales)
    return (out if bias is None else out + bias.float()).to(x.dtype)
