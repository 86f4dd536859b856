"""Decoder layers as one op against their parts, one after another."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_inputs import attention_inputs, ordered_for
from flyball_kernels import (
    Backend,
    DecoderHead,
    DecoderLayer,
    DecoderStack,
    DecodeSampling,
    GroupedLinear,
    Int8Linear,
    Mixture,
    PackedLinear,
    SharedExpert,
    kv_cache,
)
from flyball_kernels.decoder_layer import reference
from flyball_kernels.rms_norm import add_rms_norm
from flyball_kernels.sampling import NO_TOKEN, sample
from kernel_checks import CPP

TORCH = Backend("torch")
KINDS: dict[str, Any] = {
    "plain": PackedLinear,
    "int8": Int8Linear,
    "w8a16": partial(GroupedLinear, bits=8, group_size=32),
    "int4": partial(GroupedLinear, group_size=32),
    "w4a8": partial(GroupedLinear, group_size=32, input_bits=8),
}
BATCHES = {
    "one decode": ([1], [70]),
    "a long context": ([1], [1500]),  # its keys are split
    "decodes": ([1] * 9, [1, 16, 17, 40, 64, 65, 100, 3, 600]),
    "a prompt among decodes": ([40, 1, 1], [40, 90, 33]),
    "more rows than a linear layer takes at a time": ([150, 1], [170, 20]),
    "more rows than a layer takes at a time": ([700, 1], [720, 20]),
}
EVEN = {  # as much for each of two or three threads
    "even decodes": ([1] * 90, [50 + 7 * i % 20 for i in range(90)]),
    "decodes with long contexts": ([1] * 96, [500 + 61 * i % 30 for i in range(96)]),
    "drafts": ([3] * 60, [40 + i % 3 for i in range(60)]),
    "prompts": ([40] * 12, [40 + i % 2 for i in range(12)]),
    "prompts of more rows than a thread takes at a time": ([350] * 6, [350] * 6),
}


def layer_weights(
    dtype: torch.dtype,
    *,
    hidden: int = 96,
    inner: int = 144,
    num_q_heads: int = 6,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    bias: bool = False,
    qk_norm: bool = False,
) -> dict[str, Tensor | None]:
    """Return what a layer is made of, in the dtype; linear layers as pairs of weight and bias."""
    q_size, width = num_q_heads * head_dim, (num_q_heads + 2 * num_kv_heads) * head_dim
    sizes = {
        "qkv": (width, hidden),
        "output": (hidden, q_size),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
    }
    weights: dict[str, Any] = {
        name: (torch.randn(n, k).mul(k**-0.5).to(dtype), torch.randn(n).to(dtype) if bias else None)
        for name, (n, k) in sizes.items()
    }
    norms = {
        "attention_norm": hidden,
        "mlp_norm": hidden,
        **({"q_norm": head_dim, "k_norm": head_dim} if qk_norm else {}),
    }
    return weights | {name: (1 + torch.randn(size) / 4).to(dtype) for name, size in norms.items()}


def with_linears(weights: dict[str, Any], kind: str, backend: Backend) -> dict[str, Any]:
    return {
        name: KINDS[kind](*value, backend=backend) if isinstance(value, tuple) else value
        for name, value in weights.items()
    }


def mixture_of(
    kind: str,
    dtype: torch.dtype,
    *,
    hidden: int = 96,
    inner: int = 48,
    num_experts: int = 8,
    experts_per_token: int = 3,
    normalizes: bool = True,
    activation: str = "silu",
    shared: int | None = None,
    bias: bool = False,
) -> dict[str, Any]:
    """Return what a mixture is made of; the router and the shared expert's gate are not rounded.

    Args:
        shared: inner size of the expert that all tokens use.
    """

    def linear(out_features: int, in_features: int, kind: str = kind) -> Any:
        weight = torch.randn(out_features, in_features).mul(in_features**-0.5).to(dtype)
        return KINDS[kind](weight, torch.randn(out_features).to(dtype) if bias else None, backend=CPP)

    return {
        "router": linear(num_experts, hidden, "plain"),
        "gate_up": [linear(2 * inner, hidden) for _ in range(num_experts)],
        "down": [linear(hidden, inner) for _ in range(num_experts)],
        "experts_per_token": experts_per_token,
        "normalizes": normalizes,
        "activation": activation,
        "shared": None
        if shared is None
        else SharedExpert(linear(2 * shared, hidden), linear(hidden, shared), linear(1, hidden, "plain")),
    }


def instead_of_mlp(layer: dict[str, Any], mixture: dict[str, Any]) -> dict[str, Any]:
    return layer | {"gate_up": None, "down": None, "mixture": mixture}


def with_mixture(layer: dict[str, Any]) -> dict[str, Any]:
    """Return what a layer as one op is made of."""
    return layer | ({"mixture": Mixture(**layer["mixture"])} if layer.get("mixture") else {})


NUM_STEPS = 7
DECODES = {  # so many tokens that are to come, and contexts with all of them
    "one": ([NUM_STEPS], [70]),
    "several": ([NUM_STEPS] * 9, [7, 16, 17, 22, 40, 64, 100, 8, 600]),
    "many": ([NUM_STEPS] * 90, [50 + 7 * i % 20 for i in range(90)]),
}


def step(
    batch: str,
    dtype: torch.dtype,
    hidden: int = 96,
    head_dim: int = 32,
    num_kv_heads: int = 2,
    kv_dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    """Return the tensors of one call: tokens go where their block tables say, in a cache with what came before them.

    The caches are in the order of the C++ ops.
    """
    query_lens, context_lens = (BATCHES | EVEN | DECODES)[batch]
    given = attention_inputs(
        query_lens, context_lens, head_dim=head_dim, num_kv_heads=num_kv_heads, dtype=dtype, kv_dtype=kv_dtype
    )
    given.pop("query")
    positions = torch.cat([torch.arange(c - q, c) for q, c in zip(query_lens, context_lens, strict=True)])
    sequence = torch.repeat_interleave(torch.arange(len(query_lens)), torch.tensor(query_lens))
    slots = given["block_tables"][sequence, positions // 16].long() * 16 + positions % 16
    for name in ("k_cache", "v_cache"):  # what the op has to write
        kv_cache.write(given[name], slots, torch.full((len(slots), num_kv_heads, head_dim), torch.nan, dtype=dtype))
    x, residual = (torch.randn(sum(query_lens), hidden).to(dtype) for _ in range(2))
    return {**ordered_for(CPP, given), "x": x, "residual": residual, "positions": positions, "slot_mapping": slots}


def angles(head_dim: int = 32, rotary_dim: int | None = None) -> Tensor:
    rotary_dim = rotary_dim or head_dim
    turns = torch.arange(2000)[:, None] * 10000.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    return torch.cat((turns.cos(), turns.sin()), dim=1)


def copied(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in given.items()}


def run(
    layers: list[DecoderLayer],
    given: dict[str, Any],
    *others: dict[str, Any],
    wanted: tuple[Tensor, Tensor] | tuple[()] = (),
    **ends: Any,
) -> tuple[Tensor, Tensor]:
    """Run layers as one op; caches, slots and block tables of those but the first are in ``others``.

    Args:
        wanted: ``logits_indices`` and ``cu_logits_lens``.
        ends: embedding and head.
    """
    each = [given, *others]
    return call(stack_of(layers, each, **ends), each, wanted)


def stack_of(layers: list[DecoderLayer], each: list[dict[str, Any]], **ends: Any) -> DecoderStack:
    return DecoderStack(layers, [(one["k_cache"], one["v_cache"]) for one in each], range(len(each)), **ends)


def call(
    stack: DecoderStack, each: list[dict[str, Any]], wanted: tuple[Tensor, Tensor] | tuple[()] = ()
) -> tuple[Tensor, Tensor]:
    return stack(
        each[0]["x"],
        each[0]["residual"],
        each[0]["positions"],
        [one["slot_mapping"] for one in each],
        [one["block_tables"] for one in each],
        each[0]["cu_query_lens"],
        each[0]["context_lens"],
        *wanted,
    )


def last_tokens(given: dict[str, Any], nums: list[int]) -> tuple[Tensor, Tensor]:
    """Return which tokens are the last ones, so many of each sequence, and how many, cumulative."""
    ends = given["cu_query_lens"][1:].tolist()
    indices = [token for end, num in zip(ends, nums, strict=True) for token in range(end - num, end)]
    return torch.tensor(indices, dtype=torch.int64), torch.tensor([0, *nums]).cumsum(0).int()


def assert_same_bits(layer: dict[str, Any], given: dict[str, Any]) -> None:
    """Run the op and its parts, in this order; outputs and caches must be equal, unused slots (NaN) included."""
    parts, op = copied(given), copied(given)
    expected = reference.decoder_layer(**parts, **layer, backend=CPP)
    actual = run([DecoderLayer(**with_mixture(layer))], op)
    for name, one, other in (
        ("out", actual[0], expected[0]),
        ("residual", actual[1], expected[1]),
        ("k_cache", op["k_cache"], parts["k_cache"]),
        ("v_cache", op["v_cache"], parts["v_cache"]),
    ):
        torch.testing.assert_close(
            one, other, rtol=0, atol=0, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert actual[0].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", BATCHES)
def test_gives_the_bits_of_its_parts(batch, kind, dtype):
    layer = with_linears(layer_weights(dtype), kind, CPP)
    assert_same_bits({**layer, "cos_sin_cache": angles(), "eps": 1e-5, "scale": 32**-0.5}, step(batch, dtype))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inner", [672, 648], ids=["whole panels of gates", "a part of a panel"])
def test_gates_in_panels_have_the_bits_of_gates_in_rows(inner, kind, activation, dtype):
    """One row takes several panels at a time, a few take one, and many take one in several tiles."""
    layer = with_linears(layer_weights(dtype, inner=inner, bias=True), kind, CPP)
    for batch in ("one decode", "decodes", "a prompt among decodes", "more rows than a linear layer takes at a time"):
        given = step(batch, dtype)
        assert_same_bits(
            {**layer, "cos_sin_cache": angles(), "eps": 1e-5, "scale": 32**-0.5, "activation": activation}, given
        )


@pytest.mark.parametrize("batch", BATCHES)
def test_gives_the_bits_of_its_parts_with_an_int8_cache(batch, dtype):
    layer = with_linears(layer_weights(dtype, qk_norm=True), "plain", CPP)
    given = step(batch, dtype, kv_dtype=torch.int8)
    assert given["k_cache"].dtype == torch.int8
    assert_same_bits({**layer, "cos_sin_cache": angles(), "eps": 1e-5, "scale": 32**-0.5}, given)


@pytest.mark.parametrize(
    "settings",
    [
        {"sliding_window": 20},
        {"softcap": 3.0},
        {"activation": "gelu_tanh"},
        {"norm_offset": 1.0},
        {"cos_sin_cache": angles(rotary_dim=16)},
        {"cos_sin_cache": angles().bfloat16()},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_reach_its_parts(settings):
    layer = with_linears(layer_weights(torch.bfloat16, bias=True, qk_norm=True), "plain", CPP)
    plain: dict[str, Any] = {**layer, "cos_sin_cache": angles(), "eps": 1e-5, "scale": 0.3}
    given = step("a prompt among decodes", torch.bfloat16)
    assert_same_bits(plain | settings, given)
    out, _ = run([DecoderLayer(**plain)], copied(given))
    changed, _ = run([DecoderLayer(**plain | settings)], copied(given))
    assert not torch.equal(out, changed)


def test_the_first_layer_has_no_residual(dtype):
    layer = with_linears(layer_weights(dtype), "plain", CPP)
    given = step("decodes", dtype) | {"residual": None}
    assert_same_bits({**layer, "cos_sin_cache": angles(), "eps": 1e-5, "scale": 0.2}, given)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", BATCHES)
def test_several_layers_give_the_bits_of_one_after_another(batch, kind):
    settings: dict[str, Any] = {"cos_sin_cache": angles(), "eps": 1e-5, "scale": 0.2}
    layers = [
        DecoderLayer(**with_linears(layer_weights(torch.bfloat16), kind, CPP), **settings, sliding_window=window)
        for window in (None, 20, None)
    ]
    given = [step(batch, torch.bfloat16) | {"residual": None} for _ in layers]  # each its own cache, slots and tables
    at_once = [copied(one) for one in given]
    actual = run(layers, *at_once)
    x, residual = given[0]["x"], None
    for layer, one in zip(layers, given, strict=True):
        x, residual = run([layer], one | {"x": x, "residual": residual})
    assert torch.equal(actual[0], x) and torch.equal(actual[1], residual)
    for name in ("k_cache", "v_cache"):
        for one, other in zip(at_once, given, strict=True):
            torch.testing.assert_close(one[name], other[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("wants", ["the last", "some", "none"])
@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", BATCHES)
def test_wanted_tokens_have_the_bits_that_they_have_among_all(batch, kind, num_layers, wants, dtype):
    settings: dict[str, Any] = {"cos_sin_cache": angles(), "eps": 1e-5, "scale": 0.2}
    layers = [
        DecoderLayer(**with_linears(layer_weights(dtype), kind, CPP), **settings, sliding_window=window)
        for window in (20, None, 20)[:num_layers]
    ]
    given = [step(batch, dtype) for _ in layers]
    given[0]["residual"] = None  # of one layer, the input is the sum that goes on
    lens = given[0]["cu_query_lens"].diff().tolist()
    nums = {
        "the last": [1 for _ in lens],
        "some": [min(num, (2, 0, 5)[index % 3]) for index, num in enumerate(lens)],
        "none": [0 for _ in lens],
    }[wants]
    wanted = last_tokens(given[0], nums)
    of_all, of_wanted = ([copied(one) for one in given] for _ in range(2))
    expected = run(layers, *of_all)
    actual = run(layers, *of_wanted, wanted=wanted)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other[wanted[0]], rtol=0, atol=0)
    for name in ("k_cache", "v_cache"):
        for one, other in zip(of_wanted, of_all, strict=True):
            torch.testing.assert_close(one[name], other[name], rtol=0, atol=0, equal_nan=True)

    norm, linear = torch.randn(96).to(dtype), KINDS[kind](torch.randn(133, 96).to(dtype), backend=CPP)
    head = DecoderHead(norm=norm, linear=linear, eps=1e-5)
    expected = run(layers, *[copied(one) for one in given], head=head)
    actual = run(layers, *[copied(one) for one in given], wanted=wanted, head=head)
    torch.testing.assert_close(actual[0], expected[0][wanted[0]], rtol=0, atol=0)


@pytest.mark.parametrize("head_dim", [32, 20])  # of six query heads: 120 columns are no multiple of a panel's
@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
@pytest.mark.parametrize("has_mixture", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_wanted_tokens_of_other_layers_have_the_same_bits(kind, has_mixture, kv_dtype, head_dim):
    layer = with_linears(layer_weights(torch.bfloat16, head_dim=head_dim, qk_norm=True, bias=True), kind, CPP)
    if has_mixture:
        layer = instead_of_mlp(layer, mixture_of(kind, torch.bfloat16, shared=32))
    op = DecoderLayer(**with_mixture(layer), cos_sin_cache=angles(head_dim), eps=1e-5, scale=0.2)
    given = step("a prompt among decodes", torch.bfloat16, head_dim=head_dim, kv_dtype=kv_dtype)
    wanted = last_tokens(given, [3, 0, 1])
    of_all, of_wanted = copied(given), copied(given)
    expected = run([op], of_all)
    for one, other in zip(run([op], of_wanted, wanted=wanted), expected, strict=True):
        torch.testing.assert_close(one, other[wanted[0]], rtol=0, atol=0)
    for name in ("k_cache", "v_cache"):
        torch.testing.assert_close(of_wanted[name], of_all[name], rtol=0, atol=0, equal_nan=True)


def test_wanted_tokens_are_checked():
    layer = with_linears(layer_weights(torch.bfloat16), "plain", CPP)
    op = DecoderLayer(**layer, cos_sin_cache=angles(), eps=1e-5, scale=0.2)
    given = step("a prompt among decodes", torch.bfloat16)
    indices, lens = last_tokens(given, [1, 1, 1])
    with pytest.raises(IndexError, match="logits_indices holds 42; its values must be at least 0 and below 42"):
        run([op], given, wanted=(indices + 1, lens))
    with pytest.raises(ValueError, match=r"logits_indices is Int.*must be Long"):
        run([op], given, wanted=(indices.int(), lens))
    with pytest.raises(ValueError, match=r"cu_logits_lens is .*\[3\].*\[4\]"):
        run([op], given, wanted=(indices, lens[1:]))
    with pytest.raises(IndexError, match="cu_query_lens goes from 0 to 3; it must go from 0 to 2"):
        run([op], given, wanted=(indices[1:], lens))
    with pytest.raises(ValueError, match="logits_indices and cu_logits_lens go together"):
        run([op], given, wanted=(indices,))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", BATCHES)
def test_embedding_and_head_give_the_bits_of_their_ops(batch, kind, dtype):
    vocab = 4133  # no multiple of anything
    settings: dict[str, Any] = {"cos_sin_cache": angles(), "eps": 1e-5, "scale": 0.2}
    layers = [DecoderLayer(**with_linears(layer_weights(dtype), kind, CPP), **settings) for _ in range(2)]
    embedding = torch.randn(vocab, 96).to(dtype)
    norm, linear = torch.randn(96).to(dtype), KINDS[kind](torch.randn(vocab, 96).to(dtype), backend=CPP)
    head = DecoderHead(norm=norm, linear=linear, eps=1e-3, norm_offset=1.0)
    given = [step(batch, dtype) | {"residual": None} for _ in layers]
    token_ids = torch.randint(vocab, given[0]["positions"].shape)
    token_ids[0] = vocab - 1

    whole = [copied(one) for one in given]
    whole[0]["x"] = token_ids
    logits, _ = run(layers, *whole, embedding=embedding, head=head)
    given[0]["x"] = embedding[token_ids]
    out, residual = run(layers, *given)
    hidden, _ = add_rms_norm(out, residual, norm, 1e-3, offset=1.0, backend=CPP)
    torch.testing.assert_close(logits, linear(hidden), rtol=0, atol=0)
    for one, other in zip(whole, given, strict=True):
        torch.testing.assert_close(one["k_cache"], other["k_cache"], rtol=0, atol=0, equal_nan=True)


def test_embedding_and_head_are_checked():
    settings: dict[str, Any] = {"cos_sin_cache": angles(), "eps": 1e-5, "scale": 0.2}
    layer = DecoderLayer(**with_linears(layer_weights(torch.bfloat16), "plain", CPP), **settings)
    given = step("decodes", torch.bfloat16) | {"x": torch.arange(9)}
    first, table = given | {"residual": None}, torch.randn(9, 96).bfloat16()
    with pytest.raises(ValueError, match="with an embedding there is no residual"):
        run([layer], given, embedding=table)
    with pytest.raises(ValueError, match="token ids is Int of shape"):
        run([layer], first | {"x": torch.arange(9).int()}, embedding=table)
    with pytest.raises(ValueError, match=r"embedding is Float of shape \[9, 96\].*must be BFloat16"):
        run([layer], first, embedding=table.float())
    for ids in (torch.arange(9) + 1, torch.arange(9) - 1):
        with pytest.raises(IndexError, match=r"token ids holds .*; its values must be at least 0 and below 9"):
            run([layer], first | {"x": ids}, embedding=table)
    with pytest.raises(ValueError, match=r"linear has no C\+\+ weights"):
        DecoderHead(norm=torch.ones(96), linear=PackedLinear(torch.ones(50, 96), backend=TORCH), eps=1e-5)
    narrow = PackedLinear(torch.ones(50, 95).bfloat16(), backend=CPP)
    with pytest.raises(ValueError, match=r"norm has shape \[96\]; it must be \[95\]"):
        DecoderHead(norm=torch.ones(96), linear=narrow, eps=1e-5)
    with pytest.raises(ValueError, match="the head takes 95 features; the layers give 96"):
        head = DecoderHead(norm=torch.ones(95).bfloat16(), linear=narrow, eps=1e-5)
        run([layer], first, embedding=table, head=head)
    with pytest.raises(ValueError, match="the head's norm is Float"):
        wide = PackedLinear(torch.ones(50, 96).bfloat16(), backend=CPP)
        run([layer], first, embedding=table, head=DecoderHead(norm=torch.ones(96), linear=wide, eps=1e-5))


@pytest.fixture(params=[1, 2, 7])
def num_threads(request, set_num_threads) -> int:
    set_num_threads(request.param)
    return request.param


# as many threads as there are share an expert, or each has some of them
@pytest.mark.parametrize(("num_experts", "per_token"), [(1, 1), (5, 2), (40, 6)])
@pytest.mark.parametrize("batch", ["one decode", "decodes", "more rows than a layer takes at a time"])
def test_a_mixture_gives_the_bits_of_its_parts(batch, num_experts, per_token, num_threads, dtype):
    mixture = mixture_of("plain", dtype, num_experts=num_experts, experts_per_token=per_token)
    layer = instead_of_mlp(with_linears(layer_weights(dtype), "plain", CPP), mixture)
    assert_same_bits(layer | {"cos_sin_cache": angles(), "eps": 1e-5, "scale": 0.2}, step(batch, dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "settings",
    [{"normalizes": False}, {"activation": "gelu_tanh"}, {"shared": 48}, {"shared": 144, "bias": True}],
    ids=str,
)
def test_settings_reach_a_mixture(settings, kind, dtype):
    layer = instead_of_mlp(with_linears(layer_weights(dtype), kind, CPP), mixture_of(kind, dtype, **settings))
    for batch in ("one decode", "a prompt among decodes"):
        assert_same_bits(layer | {"cos_sin_cache": angles(), "eps": 1e-5, "scale": 0.2}, step(batch, dtype))


@pytest.mark.parametrize("batch", ["decodes", "more rows than a layer takes at a time"])
def test_layers_with_mlps_and_mixtures_of_several_sizes(batch):
    dtype, settings = torch.bfloat16, {"cos_sin_cache": angles(), "eps": 1e-5, "scale": 0.2}
    layers = [
        with_linears(layer_weights(dtype, inner=inner), "plain", CPP) | settings
        for inner in (144, 144, 128, 64, 144, 64)
    ]
    for index, mixture in (
        (1, mixture_of("plain", dtype)),
        (3, mixture_of("plain", dtype, num_experts=3, experts_per_token=3, inner=64, shared=32)),
        (4, mixture_of("plain", dtype)),
    ):
        layers[index] = instead_of_mlp(layers[index], mixture)
    given = [step(batch, dtype) for _ in layers]
    together, alone = [copied(one) for one in given], [copied(one) for one in given]
    out, residual = run([DecoderLayer(**with_mixture(layer)) for layer in layers], together[0], *together[1:])
    x, total = alone[0]["x"], alone[0]["residual"]
    for layer, one in zip(layers, alone, strict=True):
        one |= {name: alone[0][name] for name in ("positions", "cu_query_lens", "context_lens")} | {
            "x": x,
            "residual": total,
        }
        x, total = run([DecoderLayer(**with_mixture(layer))], one)
    torch.testing.assert_close((out, residual), (x, total), rtol=0, atol=0)


def test_mixtures_must_fit():
    mixture = mixture_of("plain", torch.float32)

    def changed(**changes: Any) -> Mixture:
        return Mixture(**mixture | changes)

    def linear(out_features: int, in_features: int, backend: Backend = CPP) -> PackedLinear:
        return PackedLinear(torch.ones(out_features, in_features), backend=backend)

    with pytest.raises(ValueError, match="the router knows 7 experts; there are 8 and 8 layers of experts"):
        changed(router=linear(7, 96))
    with pytest.raises(ValueError, match="a token has 9 of 8 experts"):
        changed(experts_per_token=9)
    with pytest.raises(ValueError, match=r"gate_up takes 96 features and gives 90; .* and give 96"):
        changed(gate_up=[*mixture["gate_up"][1:], linear(90, 96)])
    with pytest.raises(ValueError, match=r"shared_gate takes 96 features and gives 2; .* and give 1\."):
        changed(shared=SharedExpert(linear(20, 96), linear(96, 10), linear(2, 96)))
    with pytest.raises(ValueError, match=r"down has no C\+\+ weights"):
        changed(down=[linear(96, 48, TORCH)] * 8)
    layer = with_linears(layer_weights(torch.float32), "plain", CPP)
    settings = {"cos_sin_cache": angles(), "eps": 1e-5, "scale": 0.2}
    with pytest.raises(ValueError, match="a layer has gate_up and down, or a mixture of experts"):
        DecoderLayer(**layer, **settings, mixture=changed())
    with pytest.raises(ValueError, match="a layer has gate_up and down, or a mixture of experts"):
        DecoderLayer(**layer | {"gate_up": None, "down": None}, **settings)
    narrow = {"router": linear(8, 80), "gate_up": [linear(96, 80)] * 8, "down": [linear(80, 48)] * 8}
    with pytest.raises(ValueError, match=r"mixture\.hidden_size is 80; beside the other layers it must be 96"):
        DecoderLayer(**layer | {"gate_up": None, "down": None}, **settings, mixture=changed(**narrow))


def test_layers_that_cannot_run_as_one_are_refused():
    settings: dict[str, Any] = {"cos_sin_cache": angles(), "eps": 1e-5, "scale": 0.2}
    layer, narrow, single = (
        DecoderLayer(**with_linears(layer_weights(dtype, num_q_heads=num_q_heads), "plain", CPP), **settings)
        for dtype, num_q_heads in ((torch.bfloat16, 6), (torch.bfloat16, 4), (torch.float32, 6))
    )
    given = step("decodes", torch.bfloat16)
    with pytest.raises(ValueError, match="there are no layers to run"):
        run([], given)
    with pytest.raises(ValueError, match="there are 2 layers, caches of 1 and groups of 1"):
        run([layer, layer], given)
    with pytest.raises(ValueError, match="layers that run as one op must have attention of the same sizes and dtype"):
        run([layer, narrow], given, given)
    with pytest.raises(ValueError, match=r"k_cache is BFloat16 .*must be Float"):
        run([layer, single], given, given)
    floats = given | {name: given[name].float() for name in ("k_cache", "v_cache")}
    with pytest.raises(ValueError, match="layers that run as one op must have attention of the same sizes and dtype"):
        run([layer, single], given, floats)


needs_parts = pytest.mark.usefixtures("parts")


@pytest.fixture
def parts() -> None:
    if torch.ops.flyball.linear_bf16_arithmetic() == "AMX":
        pytest.skip("with matrix units threads share each op")


def layers_with_windows(kind: str, dtype: torch.dtype, *windows: int | None) -> list[DecoderLayer]:
    return [
        DecoderLayer(
            **with_linears(layer_weights(dtype), kind, CPP),
            cos_sin_cache=angles(),
            eps=1e-5,
            scale=0.2,
            sliding_window=window,
        )
        for window in windows
    ]


def results(
    layers: list[DecoderLayer], given: list[dict[str, Any]], wanted: Any, **ends: Any
) -> tuple[list[Any], bool]:
    """Return results and caches, and whether threads had sequences of their own."""
    each = [copied(one) for one in given]
    stack = stack_of(layers, each, **ends)
    outputs = call(stack, each, wanted)
    return [*outputs, *(one[name] for one in each for name in ("k_cache", "v_cache"))], stack.num_apart > 0


def is_apart(
    layers: list[DecoderLayer],
    given: list[dict[str, Any]],
    num_threads: int,
    set_num_threads: Callable[[int], None],
    wanted: Any = (),
    **ends: Any,
) -> bool:
    """Return whether threads have sequences of their own. Several runs, of which each must give the bits of one thread."""
    set_num_threads(1)
    expected, _ = results(layers, given, wanted, **ends)
    set_num_threads(num_threads)
    are_apart = set()
    for _ in range(4):  # which thread helps another, and with what, is different in each
        actual, is_one_apart = results(layers, given, wanted, **ends)
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        are_apart.add(is_one_apart)
    (always,) = are_apart
    return always


@needs_parts
@pytest.mark.parametrize(
    ("kind", "wants", "num_threads"),
    [
        ("plain", "all", 2),
        ("plain", "the last", 3),
        ("plain", "some", 2),
        ("int8", "the last", 2),
        ("w8a16", "all", 2),
        ("int4", "some", 2),
        ("w4a8", "the last", 2),
    ],
)
@pytest.mark.parametrize("batch", EVEN)
def test_threads_with_sequences_of_their_own_give_the_same_bits(batch, kind, wants, num_threads, set_num_threads):
    dtype = torch.float32 if wants == "some" else torch.bfloat16
    layers, given = layers_with_windows(kind, dtype, None, 20), [step(batch, dtype) for _ in range(2)]
    lens = given[0]["cu_query_lens"].diff().tolist()
    nums = [1 if wants == "the last" else min(num, (2, 0, 5)[index % 3]) for index, num in enumerate(lens)]
    wanted = () if wants == "all" else last_tokens(given[0], nums)
    norm, linear = torch.randn(96).to(dtype), KINDS[kind](torch.randn(133, 96).to(dtype), backend=CPP)
    head = DecoderHead(norm=norm, linear=linear, eps=1e-5)
    table, ids = torch.randn(50, 96).to(dtype), torch.randint(50, (sum(lens),))
    embedded = [given[0] | {"x": ids, "residual": None}, given[1]]
    for inputs, ends in ((given, {}), (embedded, {"embedding": table, "head": head})):
        assert is_apart(layers, inputs, num_threads, set_num_threads, wanted, **ends)


@needs_parts
@pytest.mark.parametrize(
    ("query_lens", "context_lens"),
    [
        ([1] * 40, [100] * 40),
        ([1] * 80 + [400], [100] * 80 + [400]),
        ([1] * 80, [20] * 79 + [1900]),
        ([200], [200]),
    ],
    ids=["few", "a long prompt", "a long context", "one sequence"],
)
def test_threads_share_what_would_be_uneven(query_lens, context_lens, monkeypatch, set_num_threads):
    monkeypatch.setitem(BATCHES, "uneven", (query_lens, context_lens))
    layers, given = layers_with_windows("plain", torch.bfloat16, None), [step("uneven", torch.bfloat16)]
    assert not is_apart(layers, given, 2, set_num_threads)


@needs_parts
def test_threads_share_a_step_in_which_a_sequence_reads_what_another_one_writes(set_num_threads):
    layers, given = layers_with_windows("plain", torch.bfloat16, None, 20), [step("prompts", torch.bfloat16)] * 2
    tables = given[0]["block_tables"]
    tables[8, 1] = tables[0, 1]  # its second block is that of the first one, who writes it now
    assert not is_apart(layers, given, 2, set_num_threads)


@needs_parts
def test_sequences_in_parts_may_read_what_was_written_before(set_num_threads):
    layers, given = layers_with_windows("plain", torch.bfloat16, None), [step("even decodes", torch.bfloat16)]
    tables, lens = given[0]["block_tables"], given[0]["context_lens"]
    source = next(i for i in range(90) if lens[i] > 32)
    tables[lens > 32, 0] = tables[source, 0].item()
    assert is_apart(layers, given, 2, set_num_threads)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("slot_mapping", lambda x: x - 10**6, "slot_mapping holds"),
        ("block_tables", lambda x: x + 10**6, "block_tables holds"),
        ("block_tables", lambda x: x[:, :1], "sequence .* within the 16 of its block table"),
        ("cu_query_lens", lambda x: x * 2, "cu_query_lens goes from 0 to 180; it must go from 0 to 90"),
        ("cu_query_lens", lambda x: torch.cat((x[:40], x[40:50].flip(0), x[50:])), "sequence 40 has -1 query tokens"),
        (
            "context_lens",
            lambda x: torch.cat((x[:70], x[70:] * 0)),
            "sequence 70 has 1 query tokens and a context of 0",
        ),
    ],
)
def test_inputs_of_even_steps_are_checked(name, change, message, set_num_threads):
    layers, given = layers_with_windows("plain", torch.bfloat16, None), step("even decodes", torch.bfloat16)
    given[name] = change(given[name]).contiguous()
    set_num_threads(2)
    with pytest.raises(IndexError, match=message):
        run(layers, given)


def test_wanted_tokens_of_even_steps_are_checked(set_num_threads):
    layers, given = layers_with_windows("plain", torch.bfloat16, None), step("even decodes", torch.bfloat16)
    indices, lens = last_tokens(given, [1] * 90)
    set_num_threads(2)
    for wrong in (lens * 2, lens.flip(0), lens - 1):
        with pytest.raises(IndexError, match="cu_query_lens goes from"):
            run(layers, given, wanted=(indices, wrong))


VOCAB = 133


def ends_of(kind: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return an embedding and a head. Behind token 7, logits are NaN."""
    table = torch.randn(VOCAB, 96).to(dtype)
    table[7] = torch.nan
    linear = KINDS[kind](torch.randn(VOCAB, 96).to(dtype), backend=CPP)
    return {"embedding": table, "head": DecoderHead(norm=torch.randn(96).to(dtype), linear=linear, eps=1e-5)}


def to_decode(batch: str, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Return sequences that are to get NUM_STEPS tokens, each with a token; where these will be, caches hold NaN."""
    given = step(batch, dtype, kv_dtype=kv_dtype)
    num = len(given["context_lens"])
    ids = torch.randint(8, VOCAB, (num,))
    return given | {"x": ids, "context_lens": given["context_lens"] - NUM_STEPS + 1}


def one_token_a_step(
    stack: DecoderStack, given: list[dict[str, Any]], stops: list[list[int]], sampling: DecodeSampling
) -> Tensor:
    """Return what ``stack.decode`` is to return, by the op and ``sample``."""
    ids, lens = given[0]["x"].clone(), given[0]["context_lens"].clone()
    chosen = torch.full((NUM_STEPS, len(ids)), NO_TOKEN)
    left = torch.arange(len(ids))
    for of_step in chosen:
        if not len(left):
            break
        positions, tables = lens[left].long() - 1, [one["block_tables"][left] for one in given]
        slots = [table[torch.arange(len(left)), positions // 16].long() * 16 + positions % 16 for table in tables]
        cu_lens = torch.arange(len(left) + 1, dtype=torch.int32)
        logits, _ = stack(ids[left], None, positions, slots, tables, cu_lens, lens[left])
        settings = (None if one is None else one[left] for one in sampling)
        ids[left] = of_step[left] = sample(logits, *settings, positions=lens[left].long(), backend=CPP)
        lens += 1
        left = torch.tensor([i for i in left.tolist() if ids[i] not in (*stops[i], NO_TOKEN)], dtype=torch.int64)
    return chosen


def decode(
    stack: DecoderStack, given: list[dict[str, Any]], stops: list[list[int]], sampling: DecodeSampling | None = None
) -> Tensor:
    return stack.decode(
        given[0]["x"],
        [one["block_tables"] for one in given],
        given[0]["context_lens"],
        NUM_STEPS,
        torch.tensor([stop for each in stops for stop in each], dtype=torch.int64),
        torch.tensor([0, *(len(each) for each in stops)]).cumsum(0).int(),
        sampling,
    )


@pytest.mark.parametrize(
    ("kind", "kv_dtype", "num_threads", "draws"),
    [
        ("plain", None, 1, False),
        ("plain", None, 2, True),
        ("plain", torch.int8, 3, False),
        ("int8", None, 2, True),
        ("int4", torch.int8, 2, False),
    ],
)
@pytest.mark.parametrize("has_mixture", [False, True])
@pytest.mark.parametrize("batch", DECODES)
def test_decodes_have_the_tokens_of_single_steps(
    batch, has_mixture, kind, kv_dtype, num_threads, draws, dtype, set_num_threads
):
    layers = layers_with_windows(kind, dtype, None, 20)
    if has_mixture:
        weights = instead_of_mlp(with_linears(layer_weights(dtype), kind, CPP), mixture_of(kind, dtype))
        settings = {"cos_sin_cache": angles(), "eps": 1e-5, "scale": 0.2}
        layers = [DecoderLayer(**with_mixture(weights | settings | {"sliding_window": one})) for one in (None, 20)]
    given = [to_decode(batch, dtype, kv_dtype) for _ in range(2)]
    num, ends = len(given[0]["x"]), ends_of(kind, dtype)
    stops = [torch.randint(VOCAB, (i % 4 * 5,)).tolist() for i in range(num)]
    sampling = DecodeSampling()
    if draws:
        temperature, top_p = torch.arange(num) % 3 * 0.7, 1.0 - torch.arange(num) % 2 * 0.2
        sampling = DecodeSampling(temperature, torch.arange(num) % 5 * 9, top_p, None, torch.arange(num) + 100)
    set_num_threads(1)
    expected_in = [copied(one) for one in given]
    expected = one_token_a_step(stack_of(layers, expected_in, **ends), expected_in, stops, sampling)
    set_num_threads(num_threads)
    stack = stack_of(layers, given, **ends)
    assert torch.equal(decode(stack, given, stops, sampling), expected)
    for one, other in zip(given, expected_in, strict=True):
        for name in ("k_cache", "v_cache"):
            torch.testing.assert_close(one[name], other[name], rtol=0, atol=0, equal_nan=True)
    assert (expected != NO_TOKEN).any(0).all()
    if num > 1:
        assert (expected[-1] == NO_TOKEN).any() and (expected[-1] != NO_TOKEN).any()
    if torch.ops.flyball.linear_bf16_arithmetic() != "AMX":
        assert stack.num_apart == (batch == "many" and num_threads > 1 and not has_mixture)


@needs_parts
@pytest.mark.parametrize("shared", ["written", "read"])
def test_threads_share_decodes_that_come_to_what_another_one_writes(shared, set_num_threads):
    layers, given = layers_with_windows("plain", torch.bfloat16, None), [to_decode("many", torch.bfloat16)]
    tables, first = given[0]["block_tables"], given[0]["context_lens"].long() - 1
    # a sequence of the second thread comes to a block, or has one, that is the last one of a sequence of the first thread
    other = next(i for i in range(60, 90) if (first[i] + NUM_STEPS - 1) // 16 > first[i] // 16)
    block = (first[other] + NUM_STEPS - 1) // 16 if shared == "written" else 0
    tables[other, block] = tables[0, (first[0] + NUM_STEPS - 1) // 16].item()
    stack = stack_of(layers, given, **ends_of("plain", torch.bfloat16))
    set_num_threads(2)
    decode(stack, given, [[]] * 90)
    assert stack.num_apart == 0


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        ("x", lambda x: x - VOCAB, IndexError, "token ids holds"),
        ("x", lambda x: x[1:], ValueError, "token ids is"),
        ("block_tables", lambda x: x + 10**6, IndexError, "slot_mapping holds"),
        ("block_tables", lambda x: x[:, :3], IndexError, "goes past the 48 tokens of its block table in 7 steps"),
        ("context_lens", lambda x: x * 0, IndexError, "context_lens has 0"),
        ("context_lens", lambda x: x + 2000, IndexError, "goes past the"),
    ],
)
def test_decodes_are_checked(name, change, error, message, num_threads, set_num_threads):
    layers, given = layers_with_windows("plain", torch.bfloat16, None), [to_decode("many", torch.bfloat16)]
    stack = stack_of(layers, given, **ends_of("plain", torch.bfloat16))
    set_num_threads(num_threads)
    num = len(given[0]["x"])
    given[0][name] = change(given[0][name]).contiguous()
    with pytest.raises(error, match=message):
        decode(stack, given, [[]] * num)


def test_what_decodes_has_ends_and_steps():
    layers, given = layers_with_windows("plain", torch.bfloat16, None), [to_decode("one", torch.bfloat16)]
    no_stops = torch.empty(0, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    arguments = given[0]["x"], [given[0]["block_tables"]], given[0]["context_lens"]
    with pytest.raises(ValueError, match="layers need an embedding in front of them and a head behind"):
        stack_of(layers, given).decode(*arguments, 3, *no_stops)
    stack = stack_of(layers, given, **ends_of("plain", torch.bfloat16))
    with pytest.raises(ValueError, match="there are 1 sequences and 0 steps"):
        stack.decode(*arguments, 0, *no_stops)
    with pytest.raises(ValueError, match="cu_stops must go up from 0 to 0"):
        stack.decode(*arguments, 1, no_stops[0], torch.tensor([0, 3], dtype=torch.int32))
    with pytest.raises(ValueError, match="rows with a temperature need seeds"):
        stack.decode(*arguments, 1, *no_stops, DecodeSampling(temperature=torch.ones(1)))
    with pytest.raises(ValueError, match="layer 0 is of group 0; there are slots and block tables of 0"):
        stack.decode(given[0]["x"], [], given[0]["context_lens"], 1, *no_stops)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
@pytest.mark.parametrize("lens", [[1, 3000], [3000, 0], [2000, 2000], [1, 2, 3000, 1, 1000]])
def test_each_run_is_done_once_whoever_does_it(lens, num_threads, set_num_threads):
    set_num_threads(num_threads)
    for _ in range(5):
        num_wrong, num_helped = torch.ops.flyball.help(lens, 30)
        assert num_wrong == 0
        assert num_threads > 1 or num_helped == 0


def test_a_thread_that_is_done_helps_the_others(set_num_threads):
    set_num_threads(2)
    # a core may be taken for a while, so the calling thread is the one with much to do
    assert any(torch.ops.flyball.help([50_000, 1], 30)[1] > 0 for _ in range(100))


def test_a_layer_takes_slots_and_block_tables_of_its_group():
    settings: dict[str, Any] = {"cos_sin_cache": angles(), "eps": 1e-5, "scale": 0.2}
    layers = [DecoderLayer(**with_linears(layer_weights(torch.bfloat16), "plain", CPP), **settings) for _ in range(3)]
    groups = [step("decodes", torch.bfloat16) for _ in range(2)]
    given = [groups[0], groups[0], groups[1]]
    expected = run(layers, *[copied(one) for one in given])
    caches = [(one["k_cache"].clone(), one["v_cache"].clone()) for one in given]

    def run_with(group_of: list[int], num_groups: int = 2) -> tuple[Tensor, Tensor]:
        return DecoderStack(layers, caches, group_of)(
            given[0]["x"],
            given[0]["residual"],
            given[0]["positions"],
            [one["slot_mapping"] for one in groups[:num_groups]],
            [one["block_tables"] for one in groups[:num_groups]],
            given[0]["cu_query_lens"],
            given[0]["context_lens"],
        )

    for one, other in zip(run_with([0, 0, 1]), expected, strict=True):
        assert torch.equal(one, other)
    with pytest.raises(ValueError, match="layer 2 is of group 1; there are slots and block tables of 1"):
        run_with([0, 0, 1], 1)
    with pytest.raises(ValueError, match="layer 1 is of group -1; a group is at least 0"):
        run_with([0, -1, 1])


@pytest.mark.parametrize("batch", BATCHES)
def test_equals_torch(batch):
    weights = layer_weights(torch.float32, bias=True, qk_norm=True)
    settings = {"cos_sin_cache": angles(), "eps": 1e-5, "scale": 0.2}
    given = step(batch, torch.float32)
    expected = reference.decoder_layer(
        **ordered_for(TORCH, given, before=CPP), **with_linears(weights, "plain", TORCH), **settings, backend=TORCH
    )
    actual = run([DecoderLayer(**with_linears(weights, "plain", CPP), **settings)], copied(given))
    for one, other in zip(actual, expected, strict=True):
        # five sums follow one another, each of up to 192 products: more than the tolerance of one op
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("has_mixture", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_its_neighbours(kind, has_mixture):
    layer = with_linears(layer_weights(torch.bfloat16), kind, CPP)
    if has_mixture:
        layer = instead_of_mlp(layer, mixture_of(kind, torch.bfloat16))
    op = DecoderLayer(**with_mixture(layer), cos_sin_cache=angles(), eps=1e-5, scale=0.2)
    given = step("decodes", torch.bfloat16)
    together, _ = run([op], copied(given))
    for row in range(9):
        one = copied(given)
        for name in ("x", "residual", "positions", "slot_mapping", "block_tables", "context_lens"):
            one[name] = one[name][row : row + 1].contiguous()
        one["cu_query_lens"] = torch.tensor([0, 1], dtype=torch.int32)
        alone, _ = run([op], one)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("has_mixture", [False, True])
def test_no_tokens(has_mixture):
    layer = with_linears(layer_weights(torch.bfloat16), "plain", CPP)
    if has_mixture:
        layer = instead_of_mlp(layer, mixture_of("plain", torch.bfloat16, shared=32))
    given = step("decodes", torch.bfloat16)
    for name in ("x", "residual", "positions", "slot_mapping", "block_tables", "context_lens"):
        given[name] = given[name][:0]
    given["cu_query_lens"] = torch.tensor([0], dtype=torch.int32)
    out, total = run([DecoderLayer(**with_mixture(layer), cos_sin_cache=angles(), eps=1e-5, scale=0.2)], given)
    assert out.shape == total.shape == (0, 96)


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        ("x", lambda x: x.float(), ValueError, r"x is Float of shape \[9, 96\].*must be BFloat16"),
        ("x", lambda x: x.t().contiguous().t(), ValueError, r"x is .* strides \[1, 9\].*contiguous"),
        ("residual", lambda x: x[1:], ValueError, r"residual is .*\[8, 96\].*must be BFloat16 of shape \[9, 96\]"),
        ("positions", lambda x: x.int(), ValueError, r"positions is Int.*must be Long"),
        ("positions", lambda x: x + 2000, IndexError, r"positions holds 2599.*below 2000"),
        ("slot_mapping", lambda x: x[1:], ValueError, r"slot_mapping is .*\[8\].*\[9\]"),
        ("slot_mapping", lambda x: x - 10**6, IndexError, r"slot_mapping holds"),
        ("v_cache", lambda x: x[1:], ValueError, r"v_cache is "),
        ("k_cache", lambda x: x[:, :, :, :16], ValueError, r"k_cache is .*contiguous"),
        ("block_tables", lambda x: x.long(), ValueError, r"block_tables is Long.*must be Int"),
        ("block_tables", lambda x: x + 10**6, IndexError, r"block_tables holds"),
        ("cu_query_lens", lambda x: x[1:], ValueError, r"cu_query_lens is .*\[9\].*\[10\]"),
        ("context_lens", lambda x: x * 0, IndexError, r"sequence 0 has 1 query tokens and a context of 0"),
    ],
)
def test_inputs_are_checked(name, change, error, message):
    layer = with_linears(layer_weights(torch.bfloat16), "plain", CPP)
    op = DecoderLayer(**layer, cos_sin_cache=angles(), eps=1e-5, scale=0.2)
    given = step("decodes", torch.bfloat16)
    given[name] = change(given[name])
    with pytest.raises(error, match=message):
        run([op], given)


def test_the_cache_must_fit():
    layer = with_linears(layer_weights(torch.bfloat16), "plain", CPP)
    op = DecoderLayer(**layer, cos_sin_cache=angles(), eps=1e-5, scale=0.2)
    with pytest.raises(ValueError, match=r"k_cache has 4 heads of 32; they do not fit a layer with 320 outputs of qkv"):
        run([op], step("decodes", torch.bfloat16, num_kv_heads=4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_norm": torch.ones(95)}, r"attention_norm has shape \[95\]; it must be \[96\]"),
        ({"q_norm": torch.ones(32, dtype=torch.float16)}, r"q_norm is torch\.float16; it must be torch\.float32"),
        ({"down": (PackedLinear, (96, 80), CPP)}, r"gate_up\.out_features is 288; .* must be 160"),
        ({"output": (PackedLinear, (95, 192), CPP)}, r"output\.out_features is 95; .* must be 96"),
        ({"qkv": (PackedLinear, (320, 96), TORCH)}, r"qkv has no C\+\+ weights"),
        ({"qkv": (Int8Linear, (320, 96), TORCH)}, r"qkv has no C\+\+ weights"),
    ],
)
def test_weights_must_fit_each_other(change, message):
    made = {
        name: (one[0](torch.ones(one[1]), backend=one[2]) if isinstance(one, tuple) else one)
        for name, one in change.items()
    }
    layer = with_linears(layer_weights(torch.float32), "plain", CPP) | made
    with pytest.raises(ValueError, match=message):
        DecoderLayer(**layer, cos_sin_cache=angles(), eps=1e-5, scale=0.2)


def test_equals_torch_in_bf16():
    """torch's parts round to bf16 where ours do; a sum that is rounded the other way moves what follows by some units."""
    weights = layer_weights(torch.bfloat16)
    given = step("decodes", torch.bfloat16)
    settings = {"cos_sin_cache": angles(), "eps": 1e-5, "scale": 0.2}
    out, _ = run([DecoderLayer(**with_linears(weights, "plain", CPP), **settings)], copied(given))
    expected, _ = reference.decoder_layer(
        **ordered_for(TORCH, given, before=CPP), **with_linears(weights, "plain", TORCH), **settings, backend=TORCH
    )
    torch.testing.assert_close(out, expected, rtol=2**-5, atol=2**-5)
