"""What the kernel tests share: tolerances with their reasons, guarded outputs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from flyball_kernels import Backend

CPP = Backend("cpp", linear="cpp")
"""What the tests of an op ask for by name: one that ran the reference instead would prove nothing."""

TRITON = Backend("triton")

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


@contextmanager
def poisoned() -> Iterator[None]:
    """Have torch fill what it allocates with NaN, so that a kernel that forgets to write is caught."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def by_triton(op: Callable[..., Any]) -> Callable[..., Any]:
    """Return the op by its Triton kernel, on a GPU or in the interpreter, with tensors of the CPU in and out."""

    def run(*tensors: Any, **settings: Any) -> Any:
        given = [x.to(DEVICE) if isinstance(x, Tensor) else x for x in tensors]
        with poisoned():
            result = op(*given, backend=TRITON, **settings)
        return tuple(x.cpu() for x in result) if isinstance(result, tuple) else result.cpu()

    return run


def assert_guards_intact(buffer: Tensor) -> None:
    """Raise if a kernel wrote outside its tensor."""
    assert (buffer[:64] == 7.0).all() and (buffer[-64:] == 7.0).all()
