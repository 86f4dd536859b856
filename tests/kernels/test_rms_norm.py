from functools import partial

import pytest
import torch

import flyball_kernels
from flyball_kernels.rms_norm import reference
from kernel_checks import CPP, assert_close, by_triton

rms_norm = partial(flyball_kernels.rms_norm, backend=CPP)
add_rms_norm = partial(flyball_kernels.add_rms_norm, backend=CPP)

BOTH = pytest.mark.parametrize(
    ("rms_norm", "add_rms_norm"),
    [(rms_norm, add_rms_norm), (by_triton(flyball_kernels.rms_norm), by_triton(flyball_kernels.add_rms_norm))],
    ids=["cpp", "triton"],
)


@BOTH
@pytest.mark.parametrize("shape", [(1, 1), (3, 80), (5, 768), (2, 3, 33), (0, 16)])
def test_equals_the_reference(shape, dtype, rms_norm, add_rms_norm):
    x, weight = torch.randn(shape, dtype=dtype) * 3, torch.randn(shape[-1], dtype=dtype)
    assert_close(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


@BOTH
@pytest.mark.parametrize("shape", [(1, 1), (3, 80), (130, 768), (0, 16)])
def test_addition_comes_first_and_is_returned(shape, dtype, rms_norm, add_rms_norm):
    x, residual = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
    weight = torch.randn(shape[-1], dtype=dtype)
    normed, total = add_rms_norm(x, residual, weight, 1e-6)
    torch.testing.assert_close(total, x + residual, rtol=0, atol=0)
    assert_close(normed, reference.rms_norm(x + residual, weight, 1e-6))


@BOTH
def test_offset_is_added_before_rounding(dtype, rms_norm, add_rms_norm):
    x, residual, weight = (torch.randn(shape, dtype=dtype) for shape in ((3, 80), (3, 80), (80,)))
    exact = torch.nn.functional.rms_norm(x.double(), (80,), 1.0 + weight.double(), 1e-6)
    assert_close(rms_norm(x, weight, 1e-6, offset=1.0), exact.to(dtype))
    normed, _ = add_rms_norm(x, residual, weight, 1e-6, offset=1.0)
    assert_close(normed, reference.rms_norm(x + residual, weight, 1e-6, 1.0))


def test_agrees_with_torch():
    x, weight = torch.randn(7, 96), torch.randn(96)
    assert_close(rms_norm(x, weight, 1e-6), torch.nn.functional.rms_norm(x, (96,), weight, 1e-6))


@BOTH
def test_strided_input(rms_norm, add_rms_norm):
    weight = torch.ones(48)
    for x in (
        torch.randn(9, 4, 2 * 48)[:, :, :48],
        torch.randn(5, 130)[:, 40:88],
        torch.randn(48, 5).T,
        torch.randn(5, 96)[:, ::2],
    ):
        assert_close(rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
        residual = torch.randn(x.shape)
        for actual, expected in zip(
            add_rms_norm(x, residual, weight, 1e-6), reference.add_rms_norm(x, residual, weight, 1e-6), strict=True
        ):
            assert_close(actual, expected)


def test_rows_that_no_program_of_triton_can_hold():
    with pytest.raises(ValueError, match="x has rows of 65537; the Triton kernel takes at most 65536"):
        by_triton(flyball_kernels.rms_norm)(torch.ones(1, 65537), torch.ones(65537), 1e-6)


def test_weight_must_fit():
    with pytest.raises(ValueError, match=r"weight has shape \[7\]; it must be \[8\]"):
        rms_norm(torch.ones(2, 8), torch.ones(7), 1e-6)
    with pytest.raises(ValueError, match=r"residual has shape"):
        add_rms_norm(torch.ones(2, 8), torch.ones(3, 8), torch.ones(8), 1e-6)
    with pytest.raises(ValueError, match=r"weight is torch\.float32; it must be torch\.bfloat16"):
        rms_norm(torch.ones(2, 8, dtype=torch.bfloat16), torch.ones(8), 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_rows", "hidden"), [(8192, 4096), (3, 65536)])
def test_large_rows_on_a_gpu(num_rows, hidden, dtype):
    x, residual, weight = (torch.randn(shape, dtype=dtype) for shape in ((num_rows, hidden),) * 2 + ((hidden,),))
    normed, total = by_triton(flyball_kernels.add_rms_norm)(x, residual, weight, 1e-6)
    torch.testing.assert_close(total, x + residual, rtol=0, atol=0)
    assert_close(normed, reference.rms_norm(x + residual, weight, 1e-6))
