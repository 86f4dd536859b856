import pytest

from flyball_protocol import Envelope, Limits
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.scheduler import SchedulerConfig


def test_without_chunks_the_longest_prompt_must_fit_into_a_step():
    with pytest.raises(ConfigError, match="2048, below the model length 4096"):
        SchedulerConfig(max_model_len=4096, enable_chunked_prefill=False)


@pytest.mark.parametrize(("num_start_blocks", "fraction"), [(None, 1.0), (640, 1.0), (160, 0.25)])
def test_start_limits_are_what_there_is_at_the_start(num_start_blocks: int | None, fraction: float):
    limits = SchedulerConfig(max_model_len=1024, num_start_blocks=num_start_blocks).start_limits(640)
    assert limits == Limits(max_num_seqs=256, kv_cache_fraction=fraction, max_num_batched_tokens=2048)


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


def test_the_envelope_says_what_was_allocated():
    config = SchedulerConfig(max_model_len=1000, max_num_seqs=8, max_num_batched_tokens=512)
    assert config.envelope(126, 16) == Envelope(
        max_num_seqs=8,
        max_num_batched_tokens=512,
        min_num_batched_tokens=1,
        num_kv_blocks=126,
        min_kv_cache_fraction=0.5,  # 63 blocks: 62.5 are not enough
        block_size=16,
        max_model_len=1000,
    )
