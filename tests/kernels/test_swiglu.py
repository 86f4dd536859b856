from functools import partial

import pytest
import torch

import flyball_kernels
from flyball_kernels.swiglu import reference
from kernel_checks import CPP, assert_close, by_triton

swiglu = partial(flyball_kernels.swiglu, backend=CPP)

BOTH = pytest.mark.parametrize("swiglu", [swiglu, by_triton(flyball_kernels.swiglu)], ids=["cpp", "triton"])


@BOTH
@pytest.mark.parametrize("shape", [(1, 2), (5, 160), (64, 4096), (3, 66), (0, 8)])
def test_equals_the_reference(shape, dtype, swiglu):
    gate_up = torch.randn(shape, dtype=dtype) * 4
    assert_close(swiglu(gate_up), reference.swiglu(gate_up))


@BOTH
@pytest.mark.parametrize("shape", [(1, 2), (5, 160), (3, 66)])
def test_gelu_equals_the_reference(shape, dtype, swiglu):
    gate_up = torch.randn(shape, dtype=dtype) * 4
    assert_close(swiglu(gate_up, activation="gelu_tanh"), reference.swiglu(gate_up, "gelu_tanh"))


@BOTH
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy's, in Triton's interpreter
def test_extreme_gates(swiglu):
    gate = torch.tensor([-1e30, -200.0, -88.0, 0.0, 88.0, 200.0, 1e30, float("nan")])
    gate_up = torch.cat([gate, torch.ones(8)])[None]
    for activation in ("silu", "gelu_tanh"):
        expected = reference.swiglu(gate_up, activation)
        torch.testing.assert_close(swiglu(gate_up, activation=activation), expected, equal_nan=True)


@BOTH
def test_strided_input(swiglu):
    for gate_up in (torch.randn(5, 100)[:, 10:76], torch.randn(66, 5).T):
        assert_close(swiglu(gate_up), reference.swiglu(gate_up))


def test_rows_must_be_even():
    with pytest.raises(ValueError, match="rows of 5; the length must be even"):
        swiglu(torch.ones(2, 5))
