import pytest
import torch

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
