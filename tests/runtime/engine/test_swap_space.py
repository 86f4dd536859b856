"""KV blocks that go to host memory and come back while sequences run."""

import random
from pathlib import Path

import pytest
import torch

from checkpoints import make_checkpoint
from engines import FP8_KV, GREEDY, INT8_KV, Reference, generate, kv_block_bytes, make_engine, random_prompts
from flyball_kernels import choose_backend
from flyball_protocol import LimitsChange, LimitsUpdate
from flyball_runtime.core.config import KV_CACHE_DTYPES
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.request import Request
from flyball_runtime.engine.engine import Engine
from flyball_runtime.engine.swap_space import CHUNK, SwapSpace, resolve_num_slots
from flyball_runtime.model.kv_blocks import cache_blocks
from flyball_runtime.scheduler import BlockSwap

MAX_MODEL_LEN = 128


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")


def swapping(path: Path, num_blocks: int, num_slots: int, **settings: object) -> Engine:
    kv_dtype = KV_CACHE_DTYPES[str(settings.get("kv_cache_dtype", "auto"))]
    a_block = kv_block_bytes(path, kv_dtype=kv_dtype or "float32")
    sizes = {"kv_cache_memory_bytes": num_blocks * a_block, "swap_space_bytes": num_slots * a_block}
    return make_engine(path, max_model_len=MAX_MODEL_LEN, **sizes, **settings)


@pytest.mark.parametrize(
    ("ahead", "kv"),
    [(False, None), (True, None), (True, "int8"), pytest.param(False, "fp8", marks=pytest.mark.slow)],
)
def test_tokens_are_those_of_transformers_whatever_goes_to_host_memory(path: Path, ahead: bool, kv: str | None) -> None:
    """Preempted, resized a hundred times, aborted, and found in host memory."""
    rng = random.Random(ahead)
    prompts = random_prompts([rng.randrange(1, 90) for _ in range(16)])
    prompts += [[*prompt, 7] for prompt in prompts]
    expected = Reference(path, kv=kv).generate(prompts)
    settings = {"async_scheduling": ahead, "max_num_batched_tokens": 64, "max_num_seqs": 6}
    settings |= {None: {}, "int8": INT8_KV, "fp8": FP8_KV | {"kernel_backend": "torch"}}[kv]
    engine = swapping(path, 16, 60, kv_drain_timeout_s=0.02, **settings)
    outputs: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    waiting = [Request(request_id=name, prompt_token_ids=prompts[int(name)], sampling=GREEDY) for name in outputs]
    num_resizes = num_in = num_out = num_preemptions = num_aborted = 0
    while engine.has_work() or waiting or num_resizes < 100:
        if waiting and engine.scheduler.num_waiting < 3:
            assert engine.submit(waiting.pop(0)) is None
            if rng.random() < 0.3:
                num_aborted += 1
                copy = Request(request_id=f"x{num_aborted}", prompt_token_ids=rng.choice(prompts), sampling=GREEDY)
                assert engine.submit(copy) is None
        if num_resizes < 100 and rng.random() < 0.7:
            num_resizes += 1
            change = LimitsChange(kv_cache_fraction=rng.uniform(0.5, 1.0))
            engine.post_limits(LimitsUpdate(revision=num_resizes, limits=change))
        engine.tick()
        if engine.has_work():
            output = engine.step()
            num_in += output.stats.num_swapped_in_blocks
            num_out += output.stats.num_swapped_out_blocks
            num_preemptions += output.stats.num_preemptions
            for request_id, token_id in zip(output.request_ids, output.token_ids, strict=True):
                if request_id in outputs:
                    outputs[request_id].append(token_id)
                elif rng.random() < 0.3:
                    engine.abort(request_id)
    assert list(outputs.values()) == expected
    assert min(num_in, num_out, num_preemptions, num_aborted) > 0
    assert engine.kv_cache.counts().used == 0


@pytest.mark.parametrize("name", ["gemma3", "qwen3"])
def test_a_prefix_is_found_in_host_memory(name: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, name)
    prompts = random_prompts([100, 100, 100])
    engine = swapping(path, 10, 60, max_num_seqs=1)
    first = generate(engine, prompts)
    before = engine.kv_cache.host_usage
    assert before > 0.0
    seen = []
    engine.submit(Request(request_id="again", prompt_token_ids=prompts[0], sampling=GREEDY))
    tokens = []
    while engine.has_work():
        output = engine.step()
        tokens += output.token_ids
        seen.append((output.stats.num_host_hit_tokens, dict(output.num_cached_tokens)))
    assert tokens == first[0]
    assert seen[0][0] > 0 and seen[0][1]["again"] >= seen[0][0]


@pytest.mark.parametrize("num", [1, CHUNK, 2 * CHUNK + 3])
def test_content_comes_back_from_the_slot_to_which_it_went(num: int) -> None:
    kv = [(torch.randn(64, 4, 2, 8), torch.randn(64, 4, 2, 8)), (torch.randn(64, 4, 1, 8), torch.randn(64, 4, 1, 8))]
    space = SwapSpace(cache_blocks(kv, choose_backend("cpu")), 40)
    before = [tensor.clone() for pair in kv for tensor in pair]
    blocks = random.Random(num).sample(range(64), num)
    space.swap_out([BlockSwap(block, slot) for slot, block in enumerate(blocks)])
    for pair in kv:
        for tensor in pair:
            tensor.fill_(torch.nan)
    space.swap_in([BlockSwap(63 - block, slot) for slot, block in enumerate(blocks)])
    for tensor, content in zip([one for pair in kv for one in pair], before, strict=True):
        assert all(torch.equal(tensor[63 - block], content[block]) for block in blocks)
        assert int(tensor.isnan().all(dim=(1, 2, 3)).sum()) == 64 - num
    assert space.block_copy_s > 0.0


def test_what_cannot_be_swap_space_ends_the_start(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flyball_runtime.engine.swap_space.available_memory_bytes", lambda: 5000)
    assert resolve_num_slots(0, 2000, 0) == 0
    assert resolve_num_slots(5000, 2000, 0) == 2
    with pytest.raises(ConfigError, match=r"--swap-space is 5000 bytes, and 4000 bytes of host memory are free"):
        resolve_num_slots(5000, 2000, 1000)
    with pytest.raises(ConfigError, match=r"--swap-space is 4 bytes, and one KV block takes 2000. .* such as 4GiB"):
        resolve_num_slots(4, 2000, 0)
    with pytest.raises(ConfigError, match=r"--swap-space is \d+ bytes, and \d+ bytes of host memory are free"):
        swapping(path, 16, 2**30)
