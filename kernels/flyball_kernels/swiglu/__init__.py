"""SwiGLU's elementwise part. CUDA runs the torch reference."""

import torch
from torch import Tensor

from flyball_kernels.backend import Backend
from flyball_kernels.checks import check_shape
from flyball_kernels.swiglu import reference


def swiglu(gate_up: Tensor, *, backend: Backend) -> Tensor:
    """Return ``silu(gate) * up`` of a fused gate-up projection.

    Args:
        gate_up: ``[num_tokens, 2 * intermediate]``, the gate in the first half of each row.
    Returns:
        A new ``[num_tokens, intermediate]``; computed in fp32 and rounded once.
    Raises:
        ValueError: gate_up is not two-dimensional or its rows have odd length.
    """
    check_shape("gate_up", gate_up, None, None)
    if gate_up.shape[1] % 2:
        raise ValueError(f"gate_up has rows of {gate_up.shape[1]}; the length must be even: gate and up side by side.")
    if backend.name == "cpp":
        return torch.ops.flyball.swiglu(gate_up)
    return reference.swiglu(gate_up)
