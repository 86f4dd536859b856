"""Attention by FlashAttention 3: what it is asked for, with its documented behaviour in its place; on a Hopper GPU, itself."""

from importlib.util import find_spec

import pytest
import torch

import flash_attention as documented
from attention_inputs import attention_inputs
from flyball_kernels import Backend, choose_backend, flash_attention, kv_cache, paged_attention
from flyball_kernels.paged_attention import reference

FLASH = Backend("triton", attention="flash_attn")
RAGGED = ([1, 7, 1, 33, 130, 0, 1], [1, 7, 65, 200, 130, 40, 17])
CASES = {
    "chunks and decodes": {},
    "one KV head": {"num_q_heads": 3, "num_kv_heads": 1},
    "as many KV heads": {"num_q_heads": 4, "num_kv_heads": 4},
    "heads of 128": {"head_dim": 128},
    "blocks of 32": {"block_size": 32},
    "a window": {"sliding_window": 30},
    "a window of one": {"sliding_window": 1},
    "a window beyond all contexts": {"sliding_window": 1000},
    "soft cap": {"softcap": 2.0},
    "soft cap and window": {"softcap": 50.0, "sliding_window": 64, "scale": 0.5},
}


def check(device, dtype, sliding_window=None, softcap=None, scale=0.125, **shape):
    inputs = attention_inputs(*RAGGED, dtype=dtype, **shape)
    settings = {"scale": scale, "sliding_window": sliding_window, "softcap": softcap}
    expected = reference.paged_attention(**inputs, **settings, out=torch.empty_like(inputs["query"]))
    inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
    if device == "cuda":  # it may multiply what it masks by 0
        inputs |= {name: inputs[name].nan_to_num() for name in ("k_cache", "v_cache")}
        inputs["block_tables"].clamp_(max=len(inputs["k_cache"]) - 1)
    out = paged_attention(**inputs, **settings, max_query_len=130, backend=FLASH)
    tolerance = 2**-6 if dtype == torch.bfloat16 else 2**-9  # as for Triton: weights are rounded too
    torch.testing.assert_close(out.cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.fixture
def installed(monkeypatch):
    documented.install(monkeypatch)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_equals_the_reference(installed, case, dtype):
    check("cpu", dtype, **case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_equals_the_reference_on_a_gpu(case, dtype):
    if find_spec(flash_attention.MODULE) is None or torch.cuda.get_device_capability()[0] != flash_attention.OF_HOPPER:
        pytest.skip("FlashAttention 3 is not installed, or this is no Hopper GPU")
    assert choose_backend("cuda", attention="flash_attn") == FLASH
    check("cuda", dtype, **case)


def test_writes_where_it_is_told(installed):
    inputs = attention_inputs([1, 5], [40, 5], dtype=torch.float16)
    out = torch.empty_like(inputs["query"])
    attended = paged_attention(**inputs, scale=0.125, max_query_len=5, backend=FLASH, out=out)
    assert attended is out
    torch.testing.assert_close(out, paged_attention(**inputs, scale=0.125, max_query_len=5, backend=FLASH))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"dtype": torch.float32}, "this model computes in torch.float32"),
        ({"head_dim": 20}, "has heads of 20"),
        ({"head_dim": 320}, "has heads of 320"),
        ({"kv_dtype": torch.int8}, "keeps keys and values in torch.int8"),
    ],
)
def test_what_it_has_no_code_for(installed, settings, says):
    inputs = attention_inputs([1], [5], **{"dtype": torch.bfloat16} | settings)
    with pytest.raises(ValueError, match=rf"takes float16 and bfloat16.*{says}.*Use 'flyball'"):
        paged_attention(**inputs, scale=1.0, max_query_len=1, backend=FLASH)


def test_sinks_are_refused(installed):
    inputs = attention_inputs([1], [5], dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="this model has attention sinks"):
        paged_attention(**inputs, scale=1.0, max_query_len=1, backend=FLASH, sinks=torch.zeros(6))


def test_it_is_chosen_only_when_asked_for(installed, monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    assert choose_backend("cuda") == choose_backend("cuda", attention="flyball") == Backend("triton")
    assert choose_backend("cuda", attention="flash_attn") == FLASH
    assert kv_cache.orders(FLASH) == ("plain", "plain")


def test_where_it_cannot_run(monkeypatch):
    with pytest.raises(ValueError, match="attention backend is 'magic'; it must be one of auto, flyball, flash_attn"):
        choose_backend("cpu", attention="magic")
    with pytest.raises(ValueError, match="'flash_attn' runs on cuda, not on cpu"):
        choose_backend("cpu", attention="flash_attn")
    monkeypatch.setattr(flash_attention, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs the module flash_attn_interface, which is not installed"):
        choose_backend("cuda", attention="flash_attn")
    monkeypatch.setattr(flash_attention, "find_spec", lambda name: object())
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match=r"of compute capability 9\.0 \(Hopper\); this one has 8\.0"):
        choose_backend("cuda", attention="flash_attn")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    with pytest.raises(ValueError, match="goes with kernel backend 'triton', not with 'torch'"):
        choose_backend("cuda", "torch", "flash_attn")
