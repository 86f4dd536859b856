from functools import partial

import pytest
import torch

import flyball_kernels
from flyball_kernels.rms_norm import reference
from kernel_checks import CPP, assert_close

rms_norm = partial(flyball_kernels.rms_norm, backend=CPP)
add_rms_norm = partial(flyball_kernels.add_rms_norm, backend=CPP)


@pytest.mark.parametrize("shape", [(1, 1), (3, 80), (5, 768), (2, 3, 33), (0, 16)])
def test_equals_the_reference(shape, dtype):
    x, weight = torch.randn(shape, dtype=dtype) * 3, torch.randn(shape[-1], dtype=dtype)
    assert_close(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("shape", [(1, 1), (3, 80), (130, 768)])
def test_addition_comes_first_and_is_returned(shape, dtype):
    x, residual = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
    weight = torch.randn(shape[-1], dtype=dtype)
    normed, total = add_rms_norm(x, residual, weight, 1e-6)
    torch.testing.assert_close(total, x + residual, rtol=0, atol=0)
    assert_close(normed, reference.rms_norm(x + residual, weight, 1e-6))


def test_offset_is_added_before_rounding(dtype):
    x, residual, weight = (torch.randn(shape, dtype=dtype) for shape in ((3, 80), (3, 80), (80,)))
    exact = torch.nn.functional.rms_norm(x.double(), (80,), 1.0 + weight.double(), 1e-6)
    assert_close(rms_norm(x, weight, 1e-6, offset=1.0), exact.to(dtype))
    normed, _ = add_rms_norm(x, residual, weight, 1e-6, offset=1.0)
    assert_close(normed, reference.rms_norm(x + residual, weight, 1e-6, 1.0))


def test_agrees_with_torch():
    x, weight = torch.randn(7, 96), torch.randn(96)
    assert_close(rms_norm(x, weight, 1e-6), torch.nn.functional.rms_norm(x, (96,), weight, 1e-6))


def test_strided_input():
    x = torch.randn(9, 4, 2 * 48)[:, :, :48]
    assert_close(rms_norm(x, torch.ones(48), 1e-6), reference.rms_norm(x, torch.ones(48), 1e-6))


def test_weight_must_fit():
    with pytest.raises(ValueError, match=r"weight has shape \[7\]; it must be \[8\]"):
        rms_norm(torch.ones(2, 8), torch.ones(7), 1e-6)
    with pytest.raises(ValueError, match=r"residual has shape"):
        add_rms_norm(torch.ones(2, 8), torch.ones(3, 8), torch.ones(8), 1e-6)
    with pytest.raises(ValueError, match=r"weight is torch\.float32; it must be torch\.bfloat16"):
        rms_norm(torch.ones(2, 8, dtype=torch.bfloat16), torch.ones(8), 1e-6)
