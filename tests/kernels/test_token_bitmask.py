from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

import flyball_kernels
from flyball_kernels.token_bitmask import kernel, reference
from kernel_checks import CPP, DEVICE, TRITON

apply_token_bitmask = partial(flyball_kernels.apply_token_bitmask, backend=CPP)
BOTH = pytest.mark.parametrize("run", [apply_token_bitmask, reference.apply_token_bitmask], ids=["op", "reference"])


def random_words(*shape: int) -> torch.Tensor:
    """Words of random bits, some of them all ones or all zeros."""
    words = torch.randint(-(2**31), 2**31, shape, dtype=torch.int64)
    kind = torch.randint(0, 3, shape)
    return torch.where(kind == 0, -1, torch.where(kind == 1, 0, words)).int()


@examples(max_examples=60, deadline=None)
@given(data=st.data(), vocab=st.integers(1, 200), num_rows=st.integers(1, 6), spare=st.integers(0, 2))
def test_equals_the_reference(data: st.DataObject, vocab: int, num_rows: int, spare: int) -> None:
    rows = data.draw(st.lists(st.integers(0, num_rows - 1), unique=True))
    bitmask = random_words(len(rows), -(-vocab // 32) + spare)
    logits = torch.randn(num_rows, vocab)
    logits[:, :: 1 + vocab // 3] = -torch.inf
    expected = logits.clone()
    reference.apply_token_bitmask(expected, bitmask, rows)
    apply_token_bitmask(logits, bitmask, rows)
    assert logits.equal(expected)


@BOTH
def test_a_bit_stands_for_a_token(run) -> None:
    logits = torch.zeros(3, 34)
    run(logits, torch.tensor([[1 << 5 | -(1 << 31), 1 << 1]], dtype=torch.int32), [1])
    assert torch.isinf(logits[1]).nonzero().flatten().tolist() == [one for one in range(34) if one not in (5, 31, 33)]
    assert not logits[[0, 2]].any()


def test_many_rows_run_in_parallel() -> None:
    logits, bitmask = torch.randn(64, 3000), random_words(64, 94)
    expected = logits.clone()
    reference.apply_token_bitmask(expected, bitmask, range(64))
    apply_token_bitmask(logits, bitmask, range(64))
    assert logits.equal(expected)


@pytest.mark.parametrize("block", [32, 256, 4096])
@pytest.mark.parametrize("vocab", [1, 80, 3001])
def test_triton_equals_the_reference(vocab: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "BLOCK", block)
    rows, bitmask = [7, 0, 4], random_words(3, -(-vocab // 32) + 1)
    logits = torch.randn(8, vocab)
    expected = logits.clone()
    reference.apply_token_bitmask(expected, bitmask, rows)
    on_device = logits.to(DEVICE)
    for some in (rows, []):
        mask = bitmask[: len(some)].to(DEVICE)
        flyball_kernels.apply_token_bitmask(on_device, mask, some, backend=TRITON)
        assert on_device.cpu().equal(expected)


@pytest.mark.parametrize(
    ("bitmask", "rows", "message"),
    [
        (torch.zeros(1, 2).int(), [0, 1], "shape"),
        (torch.zeros(1, 2), [0], "int32"),
        (torch.zeros(2, 2).int(), [1, 1], "once"),
        (torch.zeros(1, 2).int(), [2], "from 0 to 1"),
        (torch.zeros(1, 1).int(), [0], "40 tokens need 2"),
    ],
)
def test_wrong_arguments_are_named(bitmask: torch.Tensor, rows: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        apply_token_bitmask(torch.zeros(2, 40), bitmask, rows)
