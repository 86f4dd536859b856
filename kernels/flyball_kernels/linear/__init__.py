"""A linear layer that holds its weight in the layout that is fastest on its device."""

import torch
from torch import Tensor
from torch.nn import functional as F

from flyball_kernels.backend import Backend
from flyball_kernels.checks import check_dtype, check_shape


class PackedLinear:
    """``x @ weight.T + bias`` for inference.

    On CPU the C++ kernel keeps the weight in panels of output features, whatever the number of rows it will meet, and
    this packed copy is the only one held: drop your own reference to ``weight``. Its out_features are rounded up to the
    panel's (32 with AVX-512, 16 with AVX2, else 8), its in_features to 2. Elsewhere, and with the ``torch`` backend, the
    weight is kept as it is for ``torch.nn.functional.linear``; so it is where torch's linear layers are chosen (see
    ``backend.py``) and ``dot`` is None.

    Args:
        weight: ``[out_features, in_features]`` bf16, fp16 or fp32.
        bias: ``[out_features]`` or None, dtype of ``weight``.
        dot: whether bf16 weights use the CPU's bf16 dot product instructions, AMX or AVX512_BF16; None: where that is
            the faster way.
    Raises:
        ValueError: the shapes or dtypes do not fit, or there is no dot product for this backend, dtype or CPU.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, *, backend: Backend, dot: bool | None = None
    ) -> None:
        check_shape("weight", weight, None, None)
        check_dtype("weight", weight, torch.bfloat16, torch.float16, torch.float32)
        if bias is not None:
            check_shape("bias", bias, weight.shape[0])
            check_dtype("bias", bias, weight.dtype)
        self.out_features, self.in_features = weight.shape
        is_cpp = backend.name == "cpp"
        if dot and not is_cpp:
            raise ValueError(
                f"dot=True is for the cpp backend; this is {backend.name}. Leave dot out, or choose cpp on a CPU."
            )
        self._dot = is_cpp and self._uses_dot(weight.dtype) if dot is None else dot
        self._packed = is_cpp and (dot is not None or backend.linear == "cpp")
        self._weight = torch.ops.flyball.linear_pack(weight.detach(), self._dot) if self._packed else weight.detach()
        self._bias = None if bias is None else bias.detach().contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``[..., out_features]`` of ``x`` ``[..., in_features]``, in the dtype of the weight.

        Products and sums are fp32, rounded once. With the ``cpp`` backend a row's result is the same to the last bit
        whatever rows stand beside it and however many.

        Raises:
            ValueError: the last dimension of ``x`` is not in_features, or its dtype is not the weight's.
        """
        if x.shape[-1] != self.in_features:
            raise ValueError(f"x has rows of {x.shape[-1]}; this layer takes {self.in_features}.")
        check_dtype("x", x, self._weight.dtype)
        if not self._packed:
            return F.linear(x, self._weight, self._bias)
        rows = x.reshape(-1, self.in_features)
        out = torch.ops.flyball.linear(rows, self._weight, self._bias, self.out_features, self._dot)
        return out.view(*x.shape[:-1], self.out_features)

    @staticmethod
    def _uses_dot(dtype: torch.dtype) -> bool:
        return dtype == torch.bfloat16 and bool(torch.ops.flyball.linear_prefers_dot())
