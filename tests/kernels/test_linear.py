from functools import partial

import pytest
import torch

import flyball_kernels
from flyball_kernels import Backend, GroupedLinear, Int8Linear
from flyball_kernels.linear import reference
from flyball_kernels.linear.reference import Grouped, Rounded
from kernel_checks import CPP, assert_close
from mappings import flags, is_mapped, needs_huge_pages

PackedLinear = partial(flyball_kernels.PackedLinear, backend=CPP)


def layer(in_features, out_features, dtype, bias):
    weight = torch.randn(out_features, in_features, dtype=dtype) / in_features**0.5
    return weight, torch.randn(out_features, dtype=dtype) if bias else None


@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 4, 13, 14, 15, 64, 113, 250])
def test_any_number_of_rows(num_rows, dtype):
    weight, bias = layer(96, 80, dtype, bias=True)
    x = torch.randn(num_rows, 96, dtype=dtype)
    assert_close(PackedLinear(weight, bias)(x), expected_of(x, weight, bias))


@pytest.mark.parametrize(("in_features", "out_features"), [(1, 1), (7, 31), (33, 33), (768, 1280), (5, 640)])
@pytest.mark.parametrize("bias", [False, True])
def test_any_weight(in_features, out_features, bias, dtype):
    weight, b = layer(in_features, out_features, dtype, bias)
    x = torch.randn(9, in_features, dtype=dtype)
    assert_close(PackedLinear(weight, b)(x), expected_of(x, weight, b))


@pytest.fixture
def only_where_it_is(arithmetic):
    reasons = {
        "dot": None if torch.ops.flyball.has_dot() else "has no bf16 dot product instruction",
        "blocks": None if torch.ops.flyball.has_blocks() else "multiplies no numbers of 16 bits in pairs",
    }
    if reason := reasons.get(arithmetic):
        pytest.skip(f"this CPU {reason}")


@pytest.mark.parametrize("arithmetic", ["fma", "dot", "blocks"])
@pytest.mark.parametrize(
    ("num_rows", "in_features", "out_features"),
    [(0, 8, 8), (1, 7, 31), (2, 64, 16), (3, 96, 80), (14, 33, 33), (40, 301, 700), (113, 768, 64)],
)
@pytest.mark.usefixtures("only_where_it_is")
def test_any_arithmetic_of_bf16(num_rows, in_features, out_features, arithmetic):
    weight, bias = layer(in_features, out_features, torch.bfloat16, bias=True)
    x = torch.randn(num_rows, in_features, dtype=torch.bfloat16)
    linear = PackedLinear(weight, bias, arithmetic=arithmetic)
    assert_close(linear(x), expected_of(x, weight, bias, arithmetic))
    torch.testing.assert_close(linear(x), torch.cat([linear(row) for row in x.split(1)]), rtol=0, atol=0)


def expected_of(x, weight, bias, arithmetic=None):
    """What the layer computes of numbers as its arithmetic takes them."""
    if (arithmetic or torch.ops.flyball.linear_arithmetic(weight.dtype)) == "blocks":
        x, weight = as_blocks(x, 13), as_blocks(weight, 12)
    return reference.linear(x, weight, bias)


BLOCK_SIZE = 64


def as_blocks(matrix, bits):
    """Round each block of a row to multiples of the power of two that gives the largest magnitude so many bits."""
    padded = torch.nn.functional.pad(matrix.double(), (0, -matrix.shape[1] % BLOCK_SIZE))
    blocks = padded.unflatten(1, (padded.shape[1] // BLOCK_SIZE, BLOCK_SIZE))
    largest = blocks.abs().amax(dim=2, keepdim=True)
    units = torch.ldexp(torch.ones_like(largest), largest.frexp().exponent - bits)
    rounded = torch.where(largest < 2.0**-100, 0.0, (blocks / units).round() * units)
    return rounded.flatten(1)[:, : matrix.shape[1]].to(matrix.dtype)  # the same numbers


@pytest.mark.parametrize("bits", [12, 13])
def test_blocks_are_off_by_less_than_the_rounding_to_bf16(bits):
    x = torch.randn(50, 768, dtype=torch.bfloat16) * torch.logspace(-30, 30, 50)[:, None].bfloat16()
    x[3, 7], x[4, 5], x[5] = 1.9921875, 3e38, 1e-40
    rounded = as_blocks(x, bits)
    largest = x.double().view(50, -1, BLOCK_SIZE).abs().amax(dim=2).repeat_interleave(BLOCK_SIZE, dim=1)
    assert ((rounded.double() - x.double()).abs() <= (largest / 2**bits).clamp(min=1e-30)).all()
    kept = (x.double().abs() >= largest / 2 ** (bits - 8)) & (largest > 1e-30)
    assert kept.float().mean() > 0.8
    torch.testing.assert_close(rounded[kept], x[kept], rtol=0, atol=0)


@pytest.mark.parametrize("arithmetic", ["blocks"])
@pytest.mark.usefixtures("only_where_it_is")
def test_blocks_take_numbers_as_they_say():
    """The largest products, numbers too small for a unit, and blocks that have nothing in common."""
    x = torch.randn(40, 300, dtype=torch.bfloat16) * torch.logspace(-20, 10, 40)[:, None].bfloat16()
    x[:3], x[3, ::2], x[4], x[5] = 1.9921875, -1.9921875, 0.0, 1e-40
    x[6, :64] *= 2**20
    weight = torch.randn(70, 300, dtype=torch.bfloat16)
    weight[:3], weight[3, ::2], weight[4], weight[5] = -1.9921875, 1.9921875, 0.0, 1e-40
    weight[6, 64:128] *= 2**-20
    out = PackedLinear(weight, arithmetic="blocks")(x).double()
    exact = as_blocks(x, 13).double() @ as_blocks(weight, 12).double().T
    error = (out - exact).abs()
    scale = x.double().norm(dim=1, keepdim=True) * weight.double().norm(dim=1)
    assert (error <= exact.abs() * 2**-8 + scale * 2**-20).all()
    assert (out[4:6] == 0).all()
    assert (out[:, 4:6] == 0).all()


@pytest.mark.parametrize("arithmetic", ["blocks"])
@pytest.mark.usefixtures("only_where_it_is")
def test_blocks_that_are_no_numbers():
    weight, _ = layer(130, 80, torch.bfloat16, bias=False)
    x = torch.randn(9, 130, dtype=torch.bfloat16)
    weight[4, 129], weight[6, 0], x[3, 5], x[7, 129] = float("inf"), float("nan"), float("nan"), -float("inf")
    out = PackedLinear(weight, arithmetic="blocks")(x)
    assert out.isnan().all(dim=0).nonzero().flatten().tolist() == [4, 6]
    assert out.isnan().all(dim=1).nonzero().flatten().tolist() == [3, 7]
    assert int(out.isnan().sum()) == 2 * 9 + 2 * 80 - 4


def test_an_arithmetic_is_refused_where_there_is_none():
    with pytest.raises(ValueError, match="takes bfloat16 and a CPU with AVX512_BF16"):
        PackedLinear(torch.ones(4, 8), arithmetic="dot")
    with pytest.raises(ValueError, match="blocks of whole numbers take bfloat16 and a CPU with AVX2"):
        PackedLinear(torch.ones(4, 8), arithmetic="blocks")
    with pytest.raises(ValueError, match="arithmetic is fast; it must be fma, dot or blocks"):
        PackedLinear(torch.ones(4, 8), arithmetic="fast")
    with pytest.raises(ValueError, match="arithmetic='fma' is for the cpp backend; this is torch"):
        PackedLinear(torch.ones(4, 8, dtype=torch.bfloat16), arithmetic="fma", backend=Backend("torch"))


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


KINDS = {
    "16 bits": PackedLinear,
    "int8": partial(Int8Linear, backend=CPP),
    "w8a16": partial(GroupedLinear, bits=8, backend=CPP),
    "int4": partial(GroupedLinear, backend=CPP),
    "w4a8": partial(GroupedLinear, input_bits=8, backend=CPP),
}


# threads share the columns of a block of rows, or have blocks of their own
@pytest.mark.parametrize("num_rows", [40, 120, 700])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_bits_do_not_depend_on_the_number_of_threads(kind, num_rows, dtype, set_num_threads):
    weight, bias = layer(160, 300, dtype, bias=True)
    linear, x = kind(weight, bias), torch.randn(num_rows, 160, dtype=dtype)
    alone = torch.cat([linear(rows) for rows in x.split(1)])
    for num_threads in (1, 2, 3, 7):
        set_num_threads(num_threads)
        torch.testing.assert_close(linear(x), alone, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [PackedLinear, partial(Int8Linear, backend=CPP)], ids=["bf16", "int8"])
def test_an_output_that_exceeds_the_caches_has_the_same_bits(kind):
    """With AMX it goes past them, from 2 MiB for each thread on."""
    weight, bias = layer(32, 4096, torch.bfloat16, bias=True)
    linear, x = kind(weight, bias), torch.randn(280 * torch.get_num_threads(), 32).bfloat16()
    out = linear(x)
    assert out.nbytes > torch.get_num_threads() * 2 * 2**20
    torch.testing.assert_close(out, torch.cat([linear(rows) for rows in x.split(40)]), rtol=0, atol=0)


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


BACKENDS = pytest.mark.parametrize("backend", [CPP, Backend("torch")], ids=["cpp", "torch"])


@pytest.mark.parametrize(
    ("num_rows", "in_features", "out_features"),
    [(0, 8, 8), (1, 1, 1), (1, 7, 31), (3, 96, 80), (9, 5, 640), (14, 33, 33), (40, 301, 700), (113, 768, 64)],
)
@pytest.mark.parametrize("bias", [False, True])
def test_8_bits_are_those_of_the_reference(num_rows, in_features, out_features, bias, dtype):
    weight, b = layer(in_features, out_features, dtype, bias)
    x = torch.randn(num_rows, in_features, dtype=dtype) * torch.logspace(-3, 3, num_rows)[:, None].to(dtype)
    expected = Int8Linear(weight, b, backend=Backend("torch"))(x)
    assert_close(Int8Linear(weight, b, backend=CPP)(x), expected)


@BACKENDS
def test_8_bits_are_close_to_the_layer_itself(backend):
    weight, _ = layer(1024, 256, torch.float32, bias=False)
    x = torch.randn(50, 1024)
    exact = reference.linear(x, weight, None)
    error = Int8Linear(weight, backend=backend)(x) - exact
    # each factor of a product is off by 1 / sqrt(12) units, one of which is 1 / 127 of the largest of 1024 normal values
    assert error.std() / exact.std() == pytest.approx(2**0.5 / 12**0.5 * 3.25 / 127, rel=0.1)


@BACKENDS
def test_8_bits_hold_whole_numbers_exactly(backend):
    weight = torch.randint(-127, 128, (70, 4096)).float()
    x = torch.randint(-127, 128, (30, 4096)).float()
    weight[:, 0] = x[:, 0] = 127  # so that a unit is 1
    exact = (x.double() @ weight.double().T).float()
    torch.testing.assert_close(Int8Linear(weight, backend=backend)(x), exact, rtol=1e-6, atol=0)


@BACKENDS
def test_8_bits_hold_the_largest_products(backend):
    """A checkpoint may have -128; sums of such products fit 16 bits in pairs, and no more of them."""
    values = torch.tensor([-128, 127, -1, 0])[:, None].expand(4, 70).to(torch.int8).contiguous()
    x = torch.tensor([1.0, -1.0])[:, None].repeat(10, 70)
    out = Int8Linear(Rounded(values, torch.ones(4)), backend=backend, dtype=torch.float32)(x)
    torch.testing.assert_close(out, x @ values.float().T, rtol=1e-6, atol=0)


BITS = pytest.mark.parametrize("bits", [4, 8])


def input_bits_beside(bits):
    return (16, 8) if bits == 4 else (16,)


@BACKENDS
@BITS
@pytest.mark.parametrize("group_size", [32, 128, 1024])
@pytest.mark.parametrize("largest", [1.0, 1.9921875])  # all bits of the mantissa
def test_groups_hold_the_largest_products(backend, bits, group_size, largest):
    most, middle = 2**bits - 1, 2 ** (bits - 1)
    values = torch.tensor([0, most, middle])[:, None].expand(3, 1024).to(torch.uint8).contiguous()
    groups = torch.ones(3, 1024 // group_size)
    zeros = torch.tensor([0, 0, most])[:, None].expand_as(groups).to(torch.uint8)
    weight = Grouped(values, groups, zeros, group_size, bits)
    x = torch.tensor([largest, -largest])[:, None].repeat(1, 1024).bfloat16()
    expected = (x.float() @ torch.tensor([0.0, most, middle - most])[:, None].expand(3, 1024).T).bfloat16().float()
    for input_bits in input_bits_beside(bits):
        out = GroupedLinear(weight, backend=backend, dtype=torch.bfloat16, input_bits=input_bits)(x)
        torch.testing.assert_close(out.float(), expected, rtol=1e-6, atol=0)


@BACKENDS
def test_8_bits_of_a_row_do_not_depend_on_other_rows(backend, dtype):
    weight, bias = layer(96, 80, dtype, bias=True)
    linear = Int8Linear(weight, bias, backend=backend)
    x = torch.randn(40, 96, dtype=dtype)
    x[7, 5], x[9, 0], x[11] = float("nan"), float("inf"), 0.0
    out = linear(x)
    torch.testing.assert_close(out, torch.cat([linear(row[None]) for row in x]), rtol=0, atol=0, equal_nan=True)
    assert out.isnan().all(dim=1).nonzero().flatten().tolist() == [7, 9]
    torch.testing.assert_close(out[11], bias, rtol=0, atol=0)


@BACKENDS
def test_8_bits_of_a_column_that_is_zero_or_no_number(backend):
    weight, _ = layer(96, 80, torch.float32, bias=False)
    weight[3], weight[4, 1], weight[5] = 0.0, float("nan"), 1e-40
    x = torch.randn(5, 96)
    x[2] = 1e-42
    out = Int8Linear(weight, backend=backend)(x)
    assert (out[:, [3, 5]].abs() < 1e-30).all()
    assert (out[2, 6:].abs() < 1e-30).all()
    assert out.isnan().all(dim=0).nonzero().flatten().tolist() == [4]


@BACKENDS
def test_what_8_bits_cannot_do_is_refused(backend):
    with pytest.raises(ValueError, match="x has rows of 4; this layer takes 8"):
        Int8Linear(torch.ones(3, 8), backend=backend)(torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"x is torch\.float16; it must be torch\.float32"):
        Int8Linear(torch.ones(3, 8), backend=backend)(torch.ones(2, 8, dtype=torch.float16))
    with pytest.raises(ValueError, match="weight has 65537 in_features; in 8 bits it may have 65536"):
        Int8Linear(torch.ones(1, 65537), backend=backend)


def grouped(in_features, out_features, group_size, zeros, bits=4):
    """Return weights whose sums are about as large as inputs, like those of ``layer``: tolerances count on it."""
    num_groups = -(-in_features // group_size)
    return Grouped(
        torch.randint(0, 2**bits, (out_features, in_features), dtype=torch.uint8),
        torch.randn(out_features, num_groups) / (2 ** (bits - 1) * in_features**0.5),
        torch.randint(0, 2**bits, (out_features, num_groups), dtype=torch.uint8) if zeros else None,
        group_size,
        bits,
    )


@BITS
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "in_features", "out_features", "group_size"),
    [
        (0, 8, 8, 8),
        (1, 1, 1, 2),
        (1, 7, 31, 4),
        (1, 256, 300, 32),
        (2, 130, 700, 128),
        (3, 96, 80, 32),
        (9, 5, 640, 1024),
        (13, 34, 33, 2),
        (14, 33, 33, 16),
        (40, 301, 700, 128),
        (113, 768, 64, 32),
        (3, 9001, 40, 9000),  # a group of several runs, and one of a single feature
        (6, 4102, 33, 4098),
    ],
)
def test_groups_are_those_of_the_reference(num_rows, in_features, out_features, group_size, zeros, bits, dtype):
    weight = grouped(in_features, out_features, group_size, zeros, bits)
    bias = torch.randn(out_features, dtype=dtype)
    x = torch.randn(num_rows, in_features, dtype=dtype)
    taken = as_16_bits(x, group_size, bits) if dtype == torch.bfloat16 and rounds_inputs_beside(bits) else x
    expected = GroupedLinear(weight, bias, backend=Backend("torch"), dtype=dtype)(taken)
    assert_close(GroupedLinear(weight, bias, backend=CPP, dtype=dtype)(x), expected)
    if 8 not in input_bits_beside(bits):
        return
    in_8_bits = {"dtype": dtype, "input_bits": 8}
    expected = GroupedLinear(weight, bias, backend=Backend("torch"), **in_8_bits)(x)
    assert_close(GroupedLinear(weight, bias, backend=CPP, **in_8_bits)(x), expected)


def rounds_inputs_beside(bits):
    return torch.ops.flyball.linear_grouped_arithmetic(bits) != "fp32 FMA"


MAX_RUN = {4: 4096, 8: 256}
"""Features, by bits of a weight."""


def as_16_bits(x, group_size, bits):
    """Round inputs in bf16 to 16 bits in each group, or in parts of groups that are too large for sums of 32 bits."""
    rounded = x.float()
    for first in range(0, x.shape[1], group_size):
        group = rounded[:, first : first + group_size]
        num_runs = -(-min(group_size, x.shape[1]) // MAX_RUN[bits])
        run_size = -(-min(group_size, x.shape[1]) // num_runs)
        for run in group.split(-(-run_size // 4) * 4, dim=1):
            largest = run.abs().amax(dim=1, keepdim=True)
            exponents = largest.double().mul(256.5 / 255).frexp().exponent - 15
            units = torch.where(largest > 1e-30, torch.ldexp(torch.ones_like(largest), exponents), 1.0)
            run.copy_((run / units).round() * units)
    return rounded.bfloat16()  # the same numbers


@BITS
@pytest.mark.parametrize("group_size", [32, 128])
def test_groups_have_inputs_of_16_bits(group_size, bits):
    if not rounds_inputs_beside(bits):
        pytest.skip("this CPU multiplies weights in groups as fp32, by inputs as they are")
    x = torch.randn(50, 768, dtype=torch.bfloat16) * torch.logspace(-30, 30, 50)[:, None].bfloat16()
    x[3, 7], x[4, 5], x[5] = 1.9921875, 3e38, 1e-40
    rounded = as_16_bits(x, group_size, bits)
    largest = x.float().view(50, -1, group_size).abs().amax(dim=2).repeat_interleave(group_size, dim=1)
    assert ((rounded.float() - x.float()).abs() <= (largest / 32640).clamp(min=1e-30)).all()
    kept = (x.float().abs() >= largest / 64) & (largest > 1e-30)
    assert kept.float().mean() > 0.9
    torch.testing.assert_close(rounded[kept], x[kept], rtol=0, atol=0)
    linear = GroupedLinear(grouped(768, 80, group_size, zeros=True, bits=bits), backend=CPP, dtype=torch.bfloat16)
    torch.testing.assert_close(linear(x), linear(rounded), rtol=0, atol=0)


@BACKENDS
@pytest.mark.parametrize("group_size", [32, 128, 1024])
def test_inputs_of_8_bits_beside_weights_of_4_are_close_to_themselves(backend, group_size):
    weight = grouped(1024, 256, group_size, zeros=False)
    x = torch.randn(50, 1024) * torch.logspace(-20, 20, 50)[:, None]
    linear = partial(GroupedLinear, weight, backend=backend, dtype=torch.float32)
    exact, rounded = linear()(x), linear(input_bits=8)(x)
    relative = (rounded - exact).std(dim=1) / exact.std(dim=1)
    # an input is off by 1 / sqrt(12) units, one of which is 1 / 127 of the largest of 32 or 128 normal values
    expected = {32: 2.32, 128: 2.84, 1024: 2.84}[group_size] / 127 / 12**0.5
    assert relative.mean() == pytest.approx(expected, rel=0.1)
    assert relative.max() < 2 * expected


@BACKENDS
@BITS
@pytest.mark.parametrize("group_size", [32, 128])
def test_groups_are_close_to_the_layer_itself(backend, bits, group_size):
    weight, _ = layer(1024, 256, torch.float32, bias=False)
    x = torch.randn(50, 1024)
    exact = reference.linear(x, weight, None)
    error = GroupedLinear(weight, backend=backend, bits=bits, group_size=group_size)(x) - exact
    # a weight is off by 1 / sqrt(12) units, one of which is 1 / 8 or 1 / 128 of the largest of so many normal values; those
    # on the other side that are larger than 7.5 or 127.5 units lose more
    largest = {32: 2.32, 128: 2.84}[group_size]
    assert error.std() / exact.std() == pytest.approx(largest / 2 ** (bits - 1) / 12**0.5, rel=0.15)


@BACKENDS
@BITS
def test_groups_hold_whole_numbers_exactly(backend, bits):
    middle = 2 ** (bits - 1)
    weight = torch.randint(-middle, middle, (70, 320)).float()
    weight[:, ::32] = -middle  # so that a unit is 1
    x = torch.randint(-127, 128, (30, 320)).float()
    x[:, ::32] = -127
    for input_bits in input_bits_beside(bits):
        out = GroupedLinear(weight, backend=backend, bits=bits, input_bits=input_bits)(x)
        torch.testing.assert_close(out, x @ weight.T, rtol=1e-6, atol=0)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("bits", "input_bits"), [(4, 16), (4, 8), (8, 16)])
def test_scales_in_16_bits_have_the_bits_of_scales_in_32(bits, input_bits, zeros, dtype):
    short = grouped(320, 128, 32, zeros, bits)
    short = short._replace(scales=short.scales.to(dtype).float())
    long = short._replace(scales=short.scales.clone())
    long.scales[-1] = 1 / 3  # no number of 16 bits; a layer's scales are all alike
    layers = [GroupedLinear(one, backend=CPP, dtype=dtype, input_bits=input_bits) for one in (short, long)]
    for num_rows in (1, 3, 14, 60):
        x = torch.randn(num_rows, 320, dtype=dtype)
        outs = [layer(x)[:, :-1] for layer in layers]
        torch.testing.assert_close(*outs, rtol=0, atol=0)
    held = [layer._weight.nbytes for layer in layers]
    assert held[1] - held[0] == (0 if dtype == torch.float32 else 128 * 320 // 32 * 2)


@pytest.mark.parametrize("num_rows", range(2, 13))
@pytest.mark.parametrize(("bits", "input_bits"), [(4, 16), (4, 8), (8, 16)])
@pytest.mark.parametrize("group_size", [32, 30, 5000])
def test_few_rows_in_groups_have_the_bits_of_one(num_rows, bits, input_bits, group_size):
    weight = grouped(5000, 40, group_size, zeros=True, bits=bits)
    linear = GroupedLinear(weight, backend=CPP, dtype=torch.bfloat16, input_bits=input_bits)
    x = torch.randn(num_rows, 5000, dtype=torch.bfloat16)
    torch.testing.assert_close(linear(x), torch.cat([linear(row[None]) for row in x]), rtol=0, atol=0)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("num_rows", [13, 14, 40, 120])  # one tile, several, and more than a block of them
@pytest.mark.parametrize(("bits", "input_bits"), [(4, 16), (4, 8), (8, 16)])
def test_groups_of_a_row_do_not_depend_on_other_rows(num_rows, bits, input_bits, zeros, dtype):
    linear = GroupedLinear(grouped(96, 80, 32, zeros, bits), backend=CPP, dtype=dtype, input_bits=input_bits)
    x = torch.randn(num_rows, 96, dtype=dtype)
    x[7, 5], x[9, 0], x[11] = float("nan"), float("inf"), 0.0
    out = linear(x)
    torch.testing.assert_close(out, torch.cat([linear(row[None]) for row in x]), rtol=0, atol=0, equal_nan=True)
    finite = out.isfinite().all(dim=1)
    assert (~finite).nonzero().flatten().tolist() == [7, 9]
    assert (out[11] == 0).all()


@BACKENDS
@BITS
def test_groups_that_are_zero_or_no_number(backend, bits):
    weight, _ = layer(96, 80, torch.float32, bias=False)
    weight[3], weight[4, 1], weight[5], weight[6, 95] = 0.0, float("nan"), 1e-40, float("inf")
    for input_bits in input_bits_beside(bits):
        out = GroupedLinear(weight, backend=backend, bits=bits, input_bits=input_bits)(torch.randn(5, 96))
        assert (out[:, [3, 5]].abs() < 1e-30).all()
        assert out.isnan().all(dim=0).nonzero().flatten().tolist() == [4, 6]


@BACKENDS
def test_what_groups_cannot_do_is_refused(backend):
    with pytest.raises(ValueError, match="x has rows of 4; this layer takes 8"):
        GroupedLinear(torch.ones(3, 8), backend=backend)(torch.ones(2, 4))
    with pytest.raises(ValueError, match="group_size is 3; it must be an even number above 0"):
        GroupedLinear(torch.ones(3, 8), backend=backend, group_size=3)
    weight = grouped(96, 80, 32, zeros=True)
    with pytest.raises(ValueError, match=r"scales has shape \[80, 3\]; it must be \[80, 2\]"):
        GroupedLinear(weight._replace(group_size=64), backend=backend, dtype=torch.float32)
    with pytest.raises(ValueError, match="values hold 16; in 4 bits they are at most 15"):
        GroupedLinear(weight._replace(values=weight.values + 1), backend=backend, dtype=torch.float32)
    with pytest.raises(ValueError, match="do not tell the dtype of inputs"):
        GroupedLinear(weight, backend=backend)
    with pytest.raises(ValueError, match="bits is 5; weights are rounded to 4 or 8"):
        GroupedLinear(torch.ones(3, 8), backend=backend, bits=5)
    with pytest.raises(ValueError, match="bits is 2; it must be 4 or 8"):
        GroupedLinear(weight._replace(bits=2), backend=backend, dtype=torch.float32)
    with pytest.raises(
        ValueError, match="input_bits is 8 beside weights of 8 bits; it may be 16, or 8 beside weights of 4"
    ):
        GroupedLinear(torch.ones(3, 8), backend=backend, bits=8, input_bits=8)


@needs_huge_pages
@pytest.mark.skipif(is_mapped("libasan"), reason="each weight has memory of its own there")
def test_weights_lie_in_huge_pages_however_small_they_are():
    weights = [torch.randn(size, 64, dtype=torch.bfloat16) for size in (1, 3000, 500, 200_000)]
    for packed in [torch.ops.flyball.linear_pack(weight, "fma") for weight in weights]:
        assert "hg" in flags(packed.data_ptr())
        assert "hg" in flags(packed.data_ptr() + packed.nbytes - 1)


def test_weights_that_come_and_go_leave_others_alone():
    rng = torch.Generator().manual_seed(3)
    x = torch.randn(2, 64)
    there = {}
    for number in range(60):
        size = 150_000 if number % 20 == 7 else int(torch.randint(1, 20_000, (), generator=rng))
        weight = torch.randn(size, 64, generator=rng)
        there[number] = PackedLinear(weight, None), reference.linear(x, weight, None)
        for gone in [one for one in there if torch.rand((), generator=rng) < 0.3]:
            del there[gone]
        for linear, expected in there.values():
            assert_close(linear(x), expected)
