import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from flyball_kernels.cpu import library

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="session", autouse=True)
def cpp_ops() -> None:
    """The C++ ops must build here."""
    library.load()


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def interpreted_bf16_is_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have Triton's interpreter round to bf16 as a GPU does; on its own it cuts the lower bits off."""
    convert = interpreter._convert_float

    def rounded(values: np.ndarray, given: tl.dtype, wanted: tl.dtype, mode: object) -> np.ndarray:
        if (given, wanted) != (tl.float32, tl.bfloat16):
            return convert(values, given, wanted, mode)
        bits = np.ascontiguousarray(values).view(np.float32)
        return torch.from_numpy(bits).bfloat16().view(torch.int16).numpy().view(np.uint16)

    monkeypatch.setattr(interpreter, "_convert_float", rounded)
