from collections.abc import Iterator

import pytest
import torch

from flyball_kernels import backend, set_backend

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="session", autouse=True)
def cpp_ops() -> Iterator[None]:
    """The C++ ops must build here, and run: a test that ran the references instead would prove nothing."""
    set_backend("cpu", "cpp")
    yield
    backend._in_force.pop("cpu")


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
