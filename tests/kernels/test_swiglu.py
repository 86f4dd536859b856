from functools import partial

import pytest
import torch

import flyball_kernels
from flyball_kernels.swiglu import reference
from kernel_checks import CPP, assert_close

swiglu = partial(flyball_kernels.swiglu, backend=CPP)


@pytest.mark.parametrize("shape", [(1, 2), (5, 160), (64, 4096), (3, 66), (0, 8)])
def test_equals_the_reference(shape, dtype):
    gate_up = torch.randn(shape, dtype=dtype) * 4
    assert_close(swiglu(gate_up), reference.swiglu(gate_up))


@pytest.mark.parametrize("shape", [(1, 2), (5, 160), (3, 66)])
def test_gelu_equals_the_reference(shape, dtype):
    gate_up = torch.randn(shape, dtype=dtype) * 4
    assert_close(swiglu(gate_up, activation="gelu_tanh"), reference.swiglu(gate_up, "gelu_tanh"))


def test_extreme_gates():
    gate = torch.tensor([-1e30, -200.0, -88.0, 0.0, 88.0, 200.0, 1e30, float("nan")])
    gate_up = torch.cat([gate, torch.ones(8)])[None]
    for activation in ("silu", "gelu_tanh"):
        expected = reference.swiglu(gate_up, activation)
        torch.testing.assert_close(swiglu(gate_up, activation=activation), expected, equal_nan=True)


def test_rows_must_be_even():
    with pytest.raises(ValueError, match="rows of 5; the length must be even"):
        swiglu(torch.ones(2, 5))
