"""The elementwise part of gated linear units, SwiGLU and GeGLU."""

from typing import Literal

import torch
from torch import Tensor

from flyball_kernels.backend import Backend
from flyball_kernels.checks import check_shape
from flyball_kernels.swiglu import reference

Activation = Literal["silu", "gelu_tanh"]


def swiglu(gate_up: Tensor, *, backend: Backend, activation: Activation = "silu") -> Tensor:
    """Return ``activation(gate) * up`` of a fused gate-up projection.

    Args:
        gate_up: ``[num_tokens, 2 * intermediate]``, the gate in the first half of each row.
        activation: ``silu`` (SwiGLU), or GELU in its approximation with tanh (GeGLU).
    Returns:
        A new ``[num_tokens, intermediate]``; computed in fp32 and rounded once.
    Raises:
        ValueError: gate_up is not two-dimensional or its rows have odd length.
    """
    check_shape("gate_up", gate_up, None, None)
    if gate_up.shape[1] % 2:
        raise ValueError(f"gate_up has rows of {gate_up.shape[1]}; the length must be even: gate and up side by side.")
    if backend.name == "cpp":
        return torch.ops.flyball.swiglu(gate_up, activation == "gelu_tanh")
    if backend.name == "triton":
        from flyball_kernels.swiglu import kernel  # triton is there on Linux only

        return kernel.swiglu(gate_up, activation)
    return reference.swiglu(gate_up, activation)
