"""What the kernel tests share: tolerances with their reasons, guarded outputs."""

import torch
from torch import Tensor

from flyball_kernels import Backend

CPP = Backend("cpp", linear="cpp")
"""What the tests of an op ask for by name: one that ran the reference instead would prove nothing."""

# Kernels compute in fp32 and round once, as the references do. The two may differ in the order of fp32 additions
# (a few units of 2**-24 of the largest term), which moves a 16-bit result by at most one unit in its last place.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # of Triton kernels; on cpu the interpreter runs them

TOLERANCES = {
    torch.float32: {"rtol": 2e-5, "atol": 2e-5},
    torch.bfloat16: {"rtol": 2**-7, "atol": 2e-5},
    torch.float16: {"rtol": 2**-10, "atol": 2e-5},
}


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Compare with the tolerance of the tensors' dtype."""
    torch.testing.assert_close(actual, expected, **TOLERANCES[actual.dtype])


def guarded(*shape: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a NaN-filled tensor and the whole buffer around it, whose first and last 64 elements are guards."""
    numel = torch.Size(shape).numel()
    buffer = torch.full((numel + 128,), float("nan"), dtype=dtype)
    buffer[:64] = buffer[-64:] = 7.0
    return buffer[64:-64].view(shape), buffer


def assert_guards_intact(buffer: Tensor) -> None:
    """Raise if a kernel wrote outside its tensor."""
    assert (buffer[:64] == 7.0).all() and (buffer[-64:] == 7.0).all()
