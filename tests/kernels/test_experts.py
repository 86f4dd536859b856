"""Mixtures of experts: routing, rows by expert, and linear layers of experts against one layer each."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flyball_kernels import Backend, Float8Linear, GroupedLinear, Int8Linear, PackedLinear, experts
from flyball_kernels.experts import ExpertLinear, Shared, reference
from flyball_kernels.linear import Linear
from flyball_kernels.linear.kernel import most_tiles
from flyball_kernels.linear.reference import Assignment, Grouped
from kernel_checks import CPP, DEVICE, TRITON, assert_close, by_triton, poisoned

TORCH = Backend("torch")
KERNELS = pytest.mark.parametrize("backend", [CPP, TRITON], ids=["cpp", "triton"])
ALL = pytest.mark.parametrize("backend", [CPP, TRITON, TORCH], ids=["cpp", "triton", "torch"])

LAYERS: dict[str, Callable[..., Linear]] = {
    "as they were": PackedLinear,
    "int8": Int8Linear,
    "fp8": Float8Linear,
    "int4": GroupedLinear,
    "w8a16": partial(GroupedLinear, bits=8, group_size=64),
}


@pytest.fixture(autouse=True)
def poisoned_outputs() -> Iterator[None]:
    with poisoned():
        yield


def on(backend: Backend, op: Callable[..., Any]) -> Callable[..., Any]:
    """Return the op by a backend, with tensors of the host in and out."""
    return by_triton(op) if backend == TRITON else partial(op, backend=backend)


def distinct_logits(num_tokens: int, num_experts: int, dtype: torch.dtype) -> Tensor:
    """Return logits of which no two in a row are equal."""
    steps = (
        torch.stack([torch.randperm(num_experts) for _ in range(num_tokens)])
        if num_tokens
        else torch.empty(0, num_experts)
    )
    return (steps / 8 - num_experts / 16).to(dtype)


def some_experts(num_tokens: int, per_token: int, num_experts: int) -> Tensor:
    """Return experts of tokens, the first ones most often, and the last one never."""
    weights = torch.arange(num_experts, 0, -1).float().pow(2)
    if num_experts > per_token:
        weights[-1] = 0
    if not num_tokens:
        return torch.empty(0, per_token, dtype=torch.int32)
    return weights.expand(num_tokens, -1).multinomial(per_token).int()


@KERNELS
@pytest.mark.parametrize("normalizes", [True, False])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "per_token"), [(7, 60, 4), (0, 4, 2), (1, 1, 1), (3, 200, 8), (2, 6, 6)]
)
def test_routes_as_the_reference(
    backend: Backend, num_tokens: int, num_experts: int, per_token: int, normalizes: bool, dtype: torch.dtype
) -> None:
    logits = distinct_logits(num_tokens, num_experts, dtype)
    actual = on(backend, experts.route)(logits, per_token, normalizes=normalizes)
    expected = experts.route(logits, per_token, normalizes=normalizes, backend=TORCH)
    assert actual[1].equal(expected.experts)
    torch.testing.assert_close(actual[0], expected.weights)


@KERNELS
def test_takes_the_first_of_equal_experts(backend: Backend) -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 1.0, 0.0], [0.0] * 5, [float("-inf")] * 3 + [2.0, float("-inf")]])
    weights, chosen = on(backend, experts.route)(logits, 3, normalizes=False)
    assert chosen.tolist() == [[1, 2, 3], [0, 1, 2], [3, 0, 1]]
    expected = logits.softmax(dim=1).gather(1, chosen.long())
    torch.testing.assert_close(weights, expected)


@ALL
def test_a_row_that_is_no_distribution_harms_no_other(backend: Backend) -> None:
    logits = torch.randn(5, 12)
    logits[1, 3], logits[2, 0], logits[3] = float("nan"), float("inf"), float("-inf")
    weights, chosen = on(backend, experts.route)(logits, 4, normalizes=True)
    assert weights.isnan().all(dim=1).tolist() == [False, True, True, True, False]
    assert not weights[[0, 4]].isnan().any()
    assert ((chosen >= 0) & (chosen < 12)).all()
    assert all(len(set(row)) == 4 for row in chosen.tolist())


def test_no_more_experts_than_there_are() -> None:
    with pytest.raises(ValueError, match="experts_per_token is 5 of 4 experts"):
        experts.route(torch.zeros(2, 4), 5, normalizes=True, backend=TORCH)
    with pytest.raises(ValueError, match="at most 1024 altogether"):
        experts.route(torch.zeros(2, 1025), 5, normalizes=True, backend=TORCH)


@KERNELS
@pytest.mark.parametrize(("num_tokens", "per_token", "num_experts"), [(700, 3, 9), (0, 2, 4), (1, 1, 1), (5, 4, 130)])
def test_assigns_as_the_reference(backend: Backend, num_tokens: int, per_token: int, num_experts: int) -> None:
    of_tokens = some_experts(num_tokens, per_token, num_experts)
    actual = on(backend, experts.assign)(of_tokens, num_experts)
    expected = experts.assign(of_tokens, num_experts, backend=TORCH)
    assert [x.tolist() for x in actual] == [x.tolist() for x in expected]


@ALL
def test_rows_keep_their_order_within_an_expert(backend: Backend) -> None:
    order, starts = on(backend, experts.assign)(torch.tensor([[2, 0], [2, 3], [0, 2]]).int(), 5)
    assert (order.tolist(), starts.tolist()) == ([1, 4, 0, 2, 5, 3], [0, 2, 2, 5, 6, 6])


@given(st.lists(st.integers(0, 70), min_size=1, max_size=9), st.sampled_from([1, 16, 64]))
def test_there_are_enough_tiles_for_every_assignment(num_rows: list[int], block_m: int) -> None:
    num_tiles = sum(-(-num // block_m) for num in num_rows)
    assert num_tiles <= most_tiles(sum(num_rows), len(num_rows), block_m)


@given(st.integers(1, 300), st.integers(1, 9), st.sampled_from([1, 16, 64]))
def test_some_assignment_needs_all_tiles(num_rows: int, num_experts: int, block_m: int) -> None:
    each = [1] * min(num_experts, num_rows)
    each[0] += num_rows - len(each)
    assert sum(-(-num // block_m) for num in each) == most_tiles(num_rows, num_experts, block_m)


def layers_of(
    kind: str, sizes: tuple[int, int, int], dtype: torch.dtype, has_bias: bool, backend: Backend
) -> ExpertLinear:
    return ExpertLinear(list_of_layers(kind, sizes, dtype, has_bias, backend), backend=backend)


def list_of_layers(
    kind: str, sizes: tuple[int, int, int], dtype: torch.dtype, has_bias: bool, backend: Backend
) -> list[Linear]:
    """Return layers of the same weights for each backend."""
    num_experts, in_features, out_features = sizes
    torch.manual_seed(1)
    layers = []
    for _ in range(num_experts):
        weight = torch.randn(out_features, in_features).to(dtype) / in_features**0.5
        bias = torch.randn(out_features).to(dtype).to(DEVICE) if has_bias else None
        layers.append(LAYERS[kind](weight.to(DEVICE), bias, backend=backend))
    return layers


# experts, in_features and out_features; tokens, experts of each, and whether there are biases
CASES = [((5, 96, 70), 13, 2, True), ((3, 40, 33), 50, 1, False), ((1, 16, 16), 1, 1, False), ((4, 64, 32), 0, 2, True)]


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize(("sizes", "num_tokens", "per_token", "has_bias"), CASES)
def test_triton_experts(
    kind: str, sizes: tuple[int, int, int], num_tokens: int, per_token: int, has_bias: bool, dtype: torch.dtype
) -> None:
    num_experts, in_features, _ = sizes
    of_tokens = some_experts(num_tokens, per_token, num_experts).to(DEVICE)
    x = torch.randn(num_tokens, in_features).to(dtype).to(DEVICE)
    for inputs in (x, x.repeat_interleave(per_token, dim=0)):  # a row for all experts of a token, or one for each
        actual, expected = (
            layers_of(kind, sizes, dtype, has_bias, backend)(
                inputs, experts.assign(of_tokens, num_experts, backend=backend)
            )
            for backend in (TRITON, TORCH)
        )
        if kind == "int8":
            torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        else:
            assert_close(actual, expected)


@pytest.mark.parametrize("kind", LAYERS)
def test_triton_experts_of_many_rows(kind: str) -> None:
    """The tiles that prompts have, in which rows are no neighbours."""
    sizes = (2, 48, 40)
    of_tokens = some_experts(200, 1, 3).clamp(max=1).to(DEVICE)
    x = torch.randn(200, 48).half().to(DEVICE)
    actual, expected = (
        layers_of(kind, sizes, torch.float16, True, backend)(x, experts.assign(of_tokens, 2, backend=backend))
        for backend in (TRITON, TORCH)
    )
    assert_close(actual, expected)


@pytest.mark.parametrize("kind", ["as they were", "int8", "int4", "w8a16"])
@pytest.mark.parametrize(("sizes", "num_tokens", "per_token", "has_bias"), [*CASES, ((9, 300, 130), 400, 3, True)])
def test_cpp_experts_have_the_bits_of_their_layers(
    kind: str, sizes: tuple[int, int, int], num_tokens: int, per_token: int, has_bias: bool, dtype: torch.dtype
) -> None:
    num_experts, in_features, _ = sizes
    of_tokens = some_experts(num_tokens, per_token, num_experts)
    x = torch.randn(num_tokens, in_features).to(dtype)
    assignment = experts.assign(of_tokens, num_experts, backend=CPP)
    layers = list_of_layers(kind, sizes, dtype, has_bias, CPP)
    for inputs in (x, x.repeat_interleave(per_token, dim=0)):
        actual = ExpertLinear(layers, backend=CPP)(inputs, assignment)
        assert actual.shape == (num_tokens * per_token, sizes[2])
        for row, expert in enumerate(of_tokens.flatten().tolist()):
            alone = layers[expert](inputs[row * len(inputs) // len(actual)][None])[0]
            torch.testing.assert_close(actual[row], alone, rtol=0, atol=0)


def test_torch_layers_beside_cpp_ops_are_called_one_by_one() -> None:
    """As on CPUs where torch's linear layers are the faster ones."""
    backend = Backend("cpp", linear="torch")
    of_tokens, x = some_experts(40, 3, 6), torch.randn(40, 64)
    assignment = experts.assign(of_tokens, 6, backend=backend)
    results = (
        layers_of("as they were", (6, 64, 48), torch.float32, True, one)(x, assignment) for one in (backend, TORCH)
    )
    torch.testing.assert_close(*results)


def test_cpp_refuses_assignments_that_cannot_be() -> None:
    with pytest.raises(IndexError, match="experts holds 4; its values must be at least 0 and below 4"):
        experts.assign(torch.tensor([[0, 4]]).int(), 4, backend=CPP)
    layer = layers_of("as they were", (2, 32, 24), torch.float32, False, CPP)
    for order, starts, error in (
        ([0, 4, 1, 2], [0, 1, 4], "order holds 4"),
        ([0, 1, 2, 3], [0, 5, 4], "that rise from 0 to the 4 rows"),
        ([0, 1, 2, 3], [0, 1, 3], "that rise from 0 to the 4 rows"),
    ):
        with pytest.raises((IndexError, ValueError), match=error):
            layer(torch.randn(4, 32), Assignment(torch.tensor(order).int(), torch.tensor(starts).int()))


def test_triton_experts_some_of_which_have_zeros_and_finer_scales() -> None:
    """Layers of a checkpoint are packed by what they need: here one has zeros, one none, and scales are of three dtypes."""
    scales = torch.rand(3, 20, 2) + 0.5
    scales[0], scales[1] = scales[0].bfloat16().float(), scales[1].half().float()
    zeros = torch.randint(0, 16, (20, 2), dtype=torch.uint8)
    values = torch.randint(0, 16, (3, 20, 64), dtype=torch.uint8)
    grouped = [Grouped(values[i], scales[i], zeros if i == 1 else None, 32) for i in range(3)]
    of_tokens, x = torch.tensor([[2, 0], [1, 2], [0, 1]]).int().to(DEVICE), torch.randn(3, 64)
    results = []
    for backend in (TRITON, TORCH):
        layers = [GroupedLinear(one, backend=backend, dtype=torch.float32) for one in grouped]
        layer = ExpertLinear(layers, backend=backend)
        results.append(layer(x.to(DEVICE), experts.assign(of_tokens, 3, backend=backend)))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@ALL
def test_what_is_no_number_stays_in_its_row(backend: Backend) -> None:
    device = "cpu" if backend == CPP else DEVICE
    of_tokens = some_experts(20, 2, 4).to(device)
    x = torch.randn(20, 32).to(device)
    x[3, 7] = float("nan")
    for kind in set(LAYERS) - ({"fp8"} if backend == CPP else set()):
        layers = [LAYERS[kind](torch.randn(24, 32).to(device), backend=backend) for _ in range(4)]
        out = ExpertLinear(layers, backend=backend)(x, experts.assign(of_tokens, 4, backend=backend))
        assert out.isnan().any(dim=1).nonzero().flatten().tolist() == [6, 7], kind


def test_layers_must_be_alike() -> None:
    def layer(size: int, kind: str = "as they were", dtype: torch.dtype = torch.float32, **settings: object) -> Linear:
        return LAYERS[kind](torch.randn(size, 64, dtype=dtype), backend=TRITON, **settings)

    for other in (layer(24), layer(32, "int8"), layer(32, dtype=torch.float16), layer(32, bias=torch.zeros(32))):
        with pytest.raises(ValueError, match="layers of 2 kinds; all must be alike"):
            ExpertLinear([layer(32), other], backend=TRITON)
    with pytest.raises(ValueError, match="all must be packed alike"):
        ExpertLinear([layer(32, "int4"), layer(32, "int4", group_size=16)], backend=TRITON)


def test_inputs_must_fit_the_assignment() -> None:
    layer = layers_of("as they were", (4, 32, 24), torch.float32, False, TORCH)
    assignment = experts.assign(some_experts(6, 2, 4), 4, backend=TORCH)
    with pytest.raises(ValueError, match=r"x has 5 rows, and 12 are assigned"):
        layer(torch.randn(5, 32), assignment)
    with pytest.raises(ValueError, match=r"x has 0 rows, and 12 are assigned"):
        layer(torch.randn(0, 32), assignment)
    with pytest.raises(ValueError, match=r"starts has shape \[4\]; it must be \[5\]"):
        layer(torch.randn(6, 32), experts.assign(some_experts(6, 2, 3), 3, backend=TORCH))


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy's, in Triton's interpreter
@KERNELS
@pytest.mark.parametrize("shape", [(5, 132), (1, 2), (3, 4096), (0, 8)])
def test_clamped_swiglu(backend: Backend, shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = (torch.randn(shape) * 6).to(dtype)
    if gate_up.numel() > 100:
        gate_up[0, :6] = torch.tensor([1e4, 1e4, -1e4, -1e4, float("nan"), 1.0])
        gate_up[1, :2] = torch.tensor([1.0, float("nan")])
    actual = on(backend, experts.clamped_swiglu)(gate_up, 7.0, 1.702)
    expected = reference.clamped_swiglu(gate_up, 7.0, 1.702)
    assert actual.isnan().equal(expected.isnan())
    assert_close(actual.nan_to_num(), expected.nan_to_num())


@KERNELS
@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("shape", [(5, 3, 66), (1, 1, 1), (2, 8, 1500), (0, 2, 8)])
def test_weighted_sum(backend: Backend, shape: tuple[int, int, int], is_shared: bool, dtype: torch.dtype) -> None:
    outputs, weights = torch.randn(shape).to(dtype), torch.rand(shape[:2])
    shared = (
        Shared(torch.randn(shape[0], shape[2]).to(dtype), torch.randn(shape[0], 1).to(dtype)) if is_shared else None
    )
    placed = shared if shared is None or backend == CPP else Shared(*(x.to(DEVICE) for x in shared))
    actual = on(backend, experts.weighted_sum)(outputs, weights, placed)
    assert_close(actual, experts.weighted_sum(outputs, weights, shared, backend=TORCH))
