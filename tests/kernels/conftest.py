from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from flyball_kernels.cpu import library

HERE = Path(__file__).parent
APART = ("gpu", "slow")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of each test with Triton's interpreter, which is slow, the first case is always run; the others are slow tests."""
    if torch.cuda.is_available():
        return
    seen = set()
    for item in items:
        if HERE not in item.path.parents or "triton" not in item.name or any(map(item.get_closest_marker, APART)):
            continue
        test = item.nodeid.split("[")[0]
        if test in seen:
            item.add_marker(pytest.mark.slow)
        seen.add(test)


@pytest.fixture(scope="session", autouse=True)
def cpp_ops() -> None:
    """The C++ ops must build here."""
    library.load()


@pytest.fixture
def set_num_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


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
