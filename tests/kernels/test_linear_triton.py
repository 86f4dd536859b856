"""The linear layers of 8 and 4 bits in Triton, against their references."""

from collections.abc import Iterator
from functools import partial
from typing import Literal

import pytest
import torch
from torch import Tensor

from flyball_kernels import Backend, Float8Linear, GroupedLinear, Int8Linear
from flyball_kernels.linear import kernel, reference
from flyball_kernels.linear.reference import Grouped
from kernel_checks import DEVICE, TRITON, assert_close, poisoned

TORCH = Backend("torch")
SIZES = [(0, 16, 16), (1, 1, 1), (3, 300, 70), (17, 96, 33), pytest.param(70, 40, 130, marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def poisoned_outputs() -> Iterator[None]:
    with poisoned():
        yield


def inputs(num_rows: int, in_features: int, out_features: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(num_rows, in_features, dtype=dtype) * torch.logspace(-2, 2, num_rows)[:, None].to(dtype)
    weight = torch.randn(out_features, in_features, dtype=dtype) / in_features**0.5
    return x.to(DEVICE), weight.to(DEVICE), torch.randn(out_features, dtype=dtype).to(DEVICE)


@pytest.mark.parametrize(("num_rows", "in_features", "out_features"), SIZES)
def test_triton_int8(num_rows: int, in_features: int, out_features: int, dtype: torch.dtype) -> None:
    x, weight, bias = inputs(num_rows, in_features, out_features, dtype)
    for some in (bias, None):
        actual, expected = Int8Linear(weight, some, backend=TRITON)(x), Int8Linear(weight, some, backend=TORCH)(x)
        # the same numbers of 8 bits, exact sums, and what is left in the same order
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_triton_rounds_inputs_to_8_bits_as_the_reference_does(dtype: torch.dtype) -> None:
    x = torch.randn(9, 300).mul(torch.logspace(-6, 4, 9)[:, None]).to(dtype)
    x[0], x[1, 5], x[2, 299], x[3, 0] = 0.0, float("nan"), float("inf"), -float("inf")
    x[4] = torch.arange(300).sub(150).clamp(-127, 127) / 2  # ties
    x[5] = 1e-33  # too small for units
    rounded, expected = kernel.round_rows(x.to(DEVICE)), reference.round_rows(x)
    is_finite = x.isfinite()
    assert rounded.values.cpu()[is_finite].equal(expected.values[is_finite])
    torch.testing.assert_close(rounded.scales.cpu(), expected.scales, rtol=0, atol=0, equal_nan=True)


def test_triton_int8_of_what_is_no_number() -> None:
    x, weight, bias = inputs(20, 96, 40, torch.float32)
    x[7, 5], x[9, 0], weight[4, 1], weight[3] = float("nan"), float("inf"), float("nan"), 0.0
    expected = Int8Linear(weight, bias, backend=TORCH)(x)
    actual = Int8Linear(weight, bias, backend=TRITON)(x)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    assert actual.isnan().all(dim=1).nonzero().flatten().tolist() == [7, 9]


@pytest.mark.parametrize(("num_rows", "in_features", "out_features"), SIZES)
def test_triton_fp8(num_rows: int, in_features: int, out_features: int, dtype: torch.dtype) -> None:
    x, weight, bias = inputs(num_rows, in_features, out_features, dtype)
    for some in (bias, None):
        assert_close(Float8Linear(weight, some, backend=TRITON)(x), Float8Linear(weight, some, backend=TORCH)(x))


def test_triton_reads_every_number_of_e4m3() -> None:
    values = torch.arange(256, dtype=torch.uint8)
    values = values[(values & 127) != 127].view(torch.float8_e4m3fn)[:, None].to(DEVICE)  # all but NaN
    layer = Float8Linear(reference.Rounded(values, torch.ones(254, device=DEVICE)), backend=TRITON, dtype=torch.float32)
    assert layer(torch.ones(1, 1, device=DEVICE)).flatten().equal(values.float().flatten())


def test_fp8_is_close_to_the_layer_itself() -> None:
    weight, x = torch.randn(256, 1024) / 32, torch.randn(50, 1024)
    exact = reference.linear(x, weight, None)
    error = Float8Linear(weight, backend=TORCH)(x) - exact
    # with 3 bits behind the first one, what is left of a number is off by up to 1/16, and by 0.026 of it on the average
    assert error.std() / exact.std() == pytest.approx(0.026, rel=0.1)


def test_fp8_of_what_is_no_number() -> None:
    _, weight, _ = inputs(1, 96, 40, torch.float32)
    weight[3], weight[4, 1], weight[5], weight[6, 95] = 0.0, float("nan"), 1e-40, float("inf")
    for backend in (TORCH, TRITON):
        out = Float8Linear(weight, backend=backend)(torch.randn(5, 96).to(DEVICE))
        assert (out[:, [3, 5]].abs() < 1e-30).all()
        assert out.isnan().all(dim=0).nonzero().flatten().tolist() == [4, 6]


def test_fp8_of_a_checkpoint_that_has_no_number() -> None:
    values = torch.randn(20, 96).to(torch.float8_e4m3fn).to(DEVICE)
    values.view(torch.uint8)[3, 5], values.view(torch.uint8)[7, 95] = 0x7F, 0xFF
    rounded = reference.Rounded(values, torch.ones(20, device=DEVICE))
    for backend in (TORCH, TRITON):
        out = Float8Linear(rounded, backend=backend, dtype=torch.float32)(torch.randn(5, 96).to(DEVICE))
        assert out.isnan().all(dim=0).nonzero().flatten().tolist() == [3, 7]
        assert out.isfinite().sum() == 5 * 18


def grouped(in_features: int, out_features: int, group_size: int, zeros: bool, bits: int = 4) -> Grouped:
    num_groups = -(-in_features // group_size)
    return Grouped(
        torch.randint(0, 2**bits, (out_features, in_features), dtype=torch.uint8).to(DEVICE),
        torch.randn(out_features, num_groups).to(DEVICE) / (2 ** (bits - 4) * in_features**0.5),
        torch.randint(0, 2**bits, (out_features, num_groups), dtype=torch.uint8).to(DEVICE) if zeros else None,
        group_size,
        bits,
    )


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "in_features", "out_features", "group_size"),
    [(0, 16, 16, 16), (1, 7, 31, 8), (3, 301, 70, 128), (17, 96, 33, 32), (70, 130, 65, 48), (2, 500, 33, 256)],
)
def test_triton_groups(
    num_rows: int, in_features: int, out_features: int, group_size: int, zeros: bool, bits: int, dtype: torch.dtype
) -> None:
    weight = grouped(in_features, out_features, group_size, zeros, bits)
    x, bias = (torch.randn(*shape, dtype=dtype).to(DEVICE) for shape in ((num_rows, in_features), (out_features,)))
    for some in (bias, None):
        expected = GroupedLinear(weight, some, backend=TORCH, dtype=dtype)(x)
        assert_close(GroupedLinear(weight, some, backend=TRITON, dtype=dtype)(x), expected)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # of NumPy in the interpreter: 0 * inf
@pytest.mark.parametrize("bits", [4, 8])
def test_triton_groups_of_what_is_no_number(bits: Literal[4, 8]) -> None:
    _, weight, _ = inputs(1, 96, 40, torch.float32)
    weight[3], weight[4, 1], weight[5], weight[6, 95] = 0.0, float("nan"), 1e-40, float("inf")
    out = GroupedLinear(weight, backend=TRITON, bits=bits, group_size=32)(torch.randn(5, 96).to(DEVICE))
    assert (out[:, [3, 5]].abs() < 1e-30).all()
    assert out.isnan().all(dim=0).nonzero().flatten().tolist() == [4, 6]


@pytest.mark.parametrize(
    ("dtype", "held"),
    [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16), (torch.float32, torch.float32)],
)
def test_scales_of_4_bits_are_held_in_16_bits_where_that_rounds_none(dtype: torch.dtype, held: torch.dtype) -> None:
    scales = torch.randn(5, 3).to(dtype).float()
    packed = kernel.pack_groups(grouped(96, 5, 32, zeros=False)._replace(scales=scales.to(DEVICE)))
    assert packed.scales.dtype == held
    assert packed.scales.cpu().float().T.equal(scales)
    weight = torch.randn(5, 96, dtype=torch.bfloat16)
    assert kernel.pack_groups(reference.round_groups(weight, 32)).scales.dtype == torch.bfloat16


def test_triton_refuses_groups_that_it_cannot_cut() -> None:
    with pytest.raises(ValueError, match="group_size is 24; on a GPU it must be a multiple of 16"):
        GroupedLinear(torch.ones(3, 96, device=DEVICE), backend=TRITON, group_size=24)


def test_triton_refuses_inputs_of_8_bits_beside_weights_of_4() -> None:
    with pytest.raises(ValueError, match="with inputs of 8 are for the cpp and torch backends; this is triton"):
        GroupedLinear(torch.ones(3, 96, device=DEVICE), backend=TRITON, input_bits=8)


def test_fp8_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="fp8 linear layers are for the triton and torch backends; this is cpp"):
        Float8Linear(torch.ones(3, 8), backend=Backend("cpp"))
    with pytest.raises(ValueError, match="x has rows of 4; this layer takes 8"):
        Float8Linear(torch.ones(3, 8), backend=TORCH)(torch.ones(2, 4))
    rounded = reference.round_to_float8(torch.ones(3, 8))
    with pytest.raises(ValueError, match="do not tell the dtype of inputs"):
        Float8Linear(rounded, backend=TORCH)
    with pytest.raises(ValueError, match=r"values is torch\.float32; it must be torch\.float8_e4m3fn"):
        Float8Linear(rounded._replace(values=torch.ones(3, 8)), backend=TORCH, dtype=torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 16, 300])
@pytest.mark.parametrize("name", ["int8", "w8a16", "int4", "fp8"])
def test_a_large_layer_on_a_gpu(name: str, num_rows: int, dtype: torch.dtype) -> None:
    w8a16 = partial(GroupedLinear, bits=8)
    layer = {"int8": Int8Linear, "w8a16": w8a16, "int4": GroupedLinear, "fp8": Float8Linear}[name]
    weight = torch.randn(6144, 4096, dtype=dtype, device="cuda") / 64
    x = torch.randn(num_rows, 4096, dtype=dtype, device="cuda")
    assert_close(layer(weight, backend=TRITON)(x), layer(weight, backend=TORCH)(x))
