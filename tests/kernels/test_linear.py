from functools import partial

import pytest
import torch

import flyball_kernels
from flyball_kernels import Backend
from flyball_kernels.linear import reference
from kernel_checks import CPP, assert_close

PackedLinear = partial(flyball_kernels.PackedLinear, backend=CPP)


def layer(in_features, out_features, dtype, bias):
    weight = torch.randn(out_features, in_features, dtype=dtype) / in_features**0.5
    return weight, torch.randn(out_features, dtype=dtype) if bias else None


@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 4, 13, 14, 15, 64, 113, 250])
def test_any_number_of_rows(num_rows, dtype):
    weight, bias = layer(96, 80, dtype, bias=True)
    x = torch.randn(num_rows, 96, dtype=dtype)
    assert_close(PackedLinear(weight, bias)(x), reference.linear(x, weight, bias))


@pytest.mark.parametrize(("in_features", "out_features"), [(1, 1), (7, 31), (33, 33), (768, 1280), (5, 640)])
@pytest.mark.parametrize("bias", [False, True])
def test_any_weight(in_features, out_features, bias, dtype):
    weight, b = layer(in_features, out_features, dtype, bias)
    x = torch.randn(9, in_features, dtype=dtype)
    assert_close(PackedLinear(weight, b)(x), reference.linear(x, weight, b))


@pytest.mark.parametrize("dot", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "in_features", "out_features"), [(1, 7, 31), (3, 96, 80), (14, 33, 33), (40, 301, 700)]
)
def test_either_arithmetic_of_bf16(num_rows, in_features, out_features, dot):
    if dot and not has_dot():
        pytest.skip("this CPU has no bf16 dot product instruction")
    weight, bias = layer(in_features, out_features, torch.bfloat16, bias=True)
    x = torch.randn(num_rows, in_features, dtype=torch.bfloat16)
    linear = PackedLinear(weight, bias, dot=dot)
    assert_close(linear(x), reference.linear(x, weight, bias))
    torch.testing.assert_close(linear(x), torch.cat([linear(row[None]) for row in x]), rtol=0, atol=0)


def has_dot():
    return torch.ops.flyball.has_dot()


def test_dot_is_refused_where_there_is_none():
    with pytest.raises(ValueError, match="takes bfloat16 and a CPU with AVX512_BF16"):
        PackedLinear(torch.ones(4, 8), dot=True)


def test_dot_is_refused_where_torch_multiplies():
    with pytest.raises(ValueError, match="dot=True is for the cpp backend; this is torch"):
        PackedLinear(torch.ones(4, 8, dtype=torch.bfloat16), dot=True, backend=Backend("torch"))


def test_leading_dimensions_and_strides():
    weight, _ = layer(16, 24, torch.float32, bias=False)
    x = torch.randn(2, 3, 32)[..., ::2]
    assert_close(PackedLinear(weight)(x), reference.linear(x, weight, None))


def test_rows_do_not_leak_into_each_other():
    weight, _ = layer(64, 64, torch.float32, bias=False)
    x = torch.randn(30, 64)
    clean = PackedLinear(weight)(x)
    x[7] = float("nan")
    dirty = PackedLinear(weight)(x)
    assert dirty[7].isnan().all()
    kept = torch.arange(30) != 7
    torch.testing.assert_close(dirty[kept], clean[kept], rtol=0, atol=0)


@pytest.mark.parametrize("num_rows", [2, 3, 5, 14, 40, 120])
def test_a_row_alone_gives_the_same_bits(num_rows, dtype):
    weight, bias = layer(300, 700, dtype, bias=True)
    linear, x = PackedLinear(weight, bias), torch.randn(num_rows, 300, dtype=dtype)
    alone = torch.cat([linear(row[None]) for row in x])
    torch.testing.assert_close(linear(x), alone, rtol=0, atol=0)


def test_weight_is_held_once():
    weight = torch.randn(640, 768)
    held = [value for value in vars(PackedLinear(weight)).values() if isinstance(value, torch.Tensor)]
    assert sum(tensor.nbytes for tensor in held) == weight.nbytes


def test_refuses_what_does_not_fit():
    linear = PackedLinear(torch.ones(4, 8))
    with pytest.raises(ValueError, match="x has rows of 7; this layer takes 8"):
        linear(torch.ones(2, 7))
    with pytest.raises(ValueError, match=r"x is torch\.bfloat16; it must be torch\.float32"):
        linear(torch.ones(2, 8).bfloat16())
    with pytest.raises(ValueError, match=r"weight is torch\.int8"):
        PackedLinear(torch.ones(4, 8, dtype=torch.int8))
    with pytest.raises(ValueError, match=r"bias has shape \[3\]; it must be \[4\]"):
        PackedLinear(torch.ones(4, 8), torch.ones(3))
