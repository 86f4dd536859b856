from typing import Any

import pytest

from flyball_runtime.core.config import SCHEDULING_POLICIES, EngineConfig, parse_bytes
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.scheduler.policies import POLICIES


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_impl": "vllm"}, "--model-impl is 'vllm'; it must be one of auto, flyball, transformers"),
        ({"dtype": "int8"}, "--dtype is 'int8'; it must be one of auto, bfloat16, float16, float32"),
        ({"device": "tpu"}, "--device is 'tpu'"),
        ({"kernel_backend": "magic"}, "--kernel-backend is 'magic'"),
        ({"attention_backend": "magic"}, "--attention-backend is 'magic'"),
        (
            {"scheduling_policy": "lifo"},
            "--scheduling-policy is 'lifo'; it must be one of fcfs, priority, sjf, srpf, edf, dpr",
        ),
        ({"log_level": "loud"}, "--log-level is 'loud'"),
        ({"block_size": 12}, "--block-size is 12; it must be one of 8, 16, 32, 64, 128"),
        ({"max_model_len": 1}, "--max-model-len is 1; it must be from 2 to"),
        ({"max_num_seqs": 0}, "--max-num-seqs is 0; it must be from 1 to 4096"),
        ({"max_num_seqs": 5000}, "--max-num-seqs is 5000"),
        ({"max_num_batched_tokens": -1}, "--max-num-batched-tokens is -1"),
        ({"max_num_batched_tokens": 100}, "--max-num-batched-tokens is 100, below --max-num-seqs 256"),
        ({"max_queued_requests": 0}, "--max-queued-requests is 0"),
        ({"max_queued_tokens": 0}, "--max-queued-tokens is 0"),
        ({"num_threads": 0}, "--num-threads is 0"),
        ({"numa_node": -1}, "--numa-node is -1"),
        ({"kv_cache_memory_bytes": 0}, "--kv-cache-memory-bytes is 0"),
        ({"swap_space_bytes": -1}, "--swap-space is -1; it must be from 0 to"),
        ({"swap_space_bytes": 8, "enable_prefix_caching": False}, "--swap-space is 8 bytes with --no-enable-prefix"),
        ({"gpu_memory_utilization": 0.0}, "--gpu-memory-utilization is 0.0"),
        ({"gpu_memory_utilization": float("nan")}, "--gpu-memory-utilization is nan"),
    ],
)
def test_a_setting_out_of_range_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model="m", served_model_name="m", **settings)


@pytest.mark.parametrize(
    ("settings", "on_cpu", "on_gpu"),
    [
        ({}, 256, 2048),
        ({"max_num_seqs": 1024}, 1024, 2048),
        ({"max_num_seqs": 4096}, 4096, 4096),
        ({"enable_chunked_prefill": False}, 4000, 4000),
        ({"max_num_batched_tokens": 300}, 300, 300),
        ({"max_num_batched_tokens": 300, "enable_chunked_prefill": False}, 300, 300),  # the scheduler refuses it
    ],
)
def test_tokens_of_a_step_unless_told(settings: dict[str, Any], on_cpu: int, on_gpu: int) -> None:
    config = EngineConfig(model="m", served_model_name="m", **settings)
    assert [config.step_tokens(device, max_model_len=4000) for device in ("cpu", "cuda")] == [on_cpu, on_gpu]


def test_the_policies_that_a_flag_offers_are_those_that_exist() -> None:
    assert tuple(POLICIES) == SCHEDULING_POLICIES


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("4096", 4096), ("2GiB", 2 * 2**30), ("1.5G", 1_500_000_000), (" 512 mi ", 512 * 2**20)]
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2 bananas", "1e9"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        parse_bytes(text)
