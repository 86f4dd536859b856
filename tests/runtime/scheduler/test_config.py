import pytest

from flyball_protocol import Limits
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.scheduler import SchedulerConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 0}, "--max-model-len is 0; it must be at least 1"),
        ({"max_num_seqs": 0}, "--max-num-seqs is 0"),
        ({"max_num_batched_tokens": -1}, "--max-num-batched-tokens is -1"),
        ({"policy": "lifo"}, "--scheduling-policy is 'lifo'; it must be one of fcfs, priority"),
        ({"max_num_batched_tokens": 100}, "--max-num-batched-tokens is 100, below --max-num-seqs 256"),
        ({"max_model_len": 4096, "enable_chunked_prefill": False}, "2048, below the model length 4096"),
    ],
)
def test_bad_settings_stop_start_up(settings: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        SchedulerConfig(**({"max_model_len": 1024} | settings))


def test_start_limits_are_everything():
    config = SchedulerConfig(max_model_len=1024)
    assert config.start_limits() == Limits(max_num_seqs=256, kv_cache_fraction=1.0, max_num_batched_tokens=2048)


@pytest.mark.parametrize(
    ("num_blocks", "fraction"), [(64, 1.0), (128, 0.5), (192, 0.3334), (1000, 0.064), (100_000, 0.0007)]
)
def test_the_smallest_kv_fraction_holds_one_sequence(num_blocks: int, fraction: float):
    envelope = SchedulerConfig(max_model_len=1024).envelope(num_blocks, 16)
    assert envelope.min_kv_cache_fraction == fraction
    assert round(fraction * num_blocks) >= 1024 / 16


@pytest.mark.parametrize(("chunked", "lowest"), [(True, 1), (False, 1024)])
def test_the_smallest_budget_lets_any_prompt_through(chunked: bool, lowest: int):
    config = SchedulerConfig(max_model_len=1024, enable_chunked_prefill=chunked)
    assert config.envelope(64, 16).min_num_batched_tokens == lowest
