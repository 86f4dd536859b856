from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from flyball_kernels import Backend
from flyball_kernels.cache_blocks import CacheBlocks, kernel
from kernel_checks import CPP, DEVICE, TRITON, poisoned

BOTH = pytest.mark.parametrize(("backend", "device"), [(CPP, "cpu"), (TRITON, DEVICE)], ids=["torch", "triton"])
SHAPES = {
    "words of 8 bytes": ((4, 2, 8), (4, 2, 8)),
    "several pieces": ((5, 7, 64), (1, 1, 64)),
    "sizes that differ": ((4, 2, 16), (4, 1, 16), (3,)),
    "one number": ((), (1,)),
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kernel, "BLOCK", 128)
    with poisoned():
        yield


def cache(shapes: str, dtype: torch.dtype, device: str) -> list[Tensor]:
    return [torch.randint(-100, 100, (11, *shape)).to(dtype).to(device) for shape in SHAPES[shapes]]


def check(actual: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shapes", SHAPES)
def test_copies_gathers_and_scatters(shapes: str, dtype: torch.dtype, backend: Backend, device: str) -> None:
    tensors = cache(shapes, dtype, device)
    before = [tensor.clone() for tensor in tensors]
    blocks = CacheBlocks(tensors, backend=backend)
    blocks.copy([(7, 2), (7, 10), (0, 4)])
    for old in before:
        old[[2, 10, 4]] = old[[7, 7, 0]]
    check(tensors, before)

    content = blocks.gather([10, 3, 3])
    check([content], [torch.cat([tensor[[10, 3, 3]].reshape(3, -1) for tensor in before], dim=1)])
    blocks.scatter([9, 0, 6], content)
    for old in before:
        old[[9, 0, 6]] = old[[10, 3, 3]]
    check(tensors, before)


@BOTH
def test_each_source_is_read_before_any_target_is_written(backend: Backend, device: str) -> None:
    tensors = cache("sizes that differ", torch.float32, device)
    before = [tensor.clone() for tensor in tensors]
    CacheBlocks(tensors, backend=backend).copy([(0, 1), (1, 0), (1, 2), (4, 5), (5, 6)])
    check(tensors, [tensor[[1, 0, 1, 3, 4, 4, 5, 7, 8, 9, 10]] for tensor in before])


@BOTH
def test_what_no_number_is_moves_too(backend: Backend, device: str) -> None:
    tensors = [torch.full((3, 5), torch.nan, device=device)]
    tensors[0][0] = torch.tensor([0.0, -0.0, torch.inf, 1e-45, 1.0])
    CacheBlocks(tensors, backend=backend).copy([(0, 1)])
    assert tensors[0][1].view(torch.int32).equal(tensors[0][0].view(torch.int32))
    assert tensors[0][2].isnan().all()


@BOTH
def test_nothing_to_move(backend: Backend, device: str) -> None:
    tensors = cache("one number", torch.float32, device)
    blocks = CacheBlocks(tensors, backend=backend)
    before = [tensor.clone() for tensor in tensors]
    blocks.copy([])
    blocks.scatter([], blocks.gather([]))
    check(tensors, before)


@pytest.mark.gpu
def test_blocks_of_a_model_on_a_gpu() -> None:
    tensors = [torch.randn(3000, 16, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(16)]
    blocks = CacheBlocks(tensors, backend=TRITON)
    ids = torch.randperm(3000).tolist()
    pairs = list(zip(ids[:1000], ids[1000:2000], strict=True))
    before = [tensor[ids[:1000]] for tensor in tensors]
    blocks.copy(pairs)
    check([tensor[ids[1000:2000]] for tensor in tensors], before)


def test_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="tensors is empty"):
        CacheBlocks([], backend=CPP)
    with pytest.raises(ValueError, match=r"has shape \[2, 4\]; it must be \[3, 4\]"):
        CacheBlocks([torch.zeros(3, 4), torch.zeros(2, 4)], backend=CPP)
    with pytest.raises(ValueError, match="must be contiguous"):
        CacheBlocks([torch.zeros(4, 3).T], backend=CPP)
    blocks = CacheBlocks([torch.zeros(3, 4), torch.zeros(3, 2, dtype=torch.int8)], backend=CPP)
    with pytest.raises(ValueError, match=r"is torch\.int8; it must be torch\.float32"):
        blocks.gather([0])
    with pytest.raises(ValueError, match=r"content has shape \[1, 5\]; it must be \[1, 6\]"):
        blocks.scatter([0], torch.zeros(1, 5))
