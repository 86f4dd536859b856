"""What the elementwise part of a gated linear unit means (Shazeer 2020)."""

from torch import Tensor
from torch.nn import functional as F


def swiglu(gate_up: Tensor, activation: str = "silu") -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return (gate * up).to(gate_up.dtype)
