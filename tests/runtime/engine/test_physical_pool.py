"""What happens to whole blocks."""

from pathlib import Path

import pytest
import torch

from checkpoints import make_checkpoint
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.model_config import ModelConfig
from flyball_runtime.engine.physical_pool import MmapPool
from mappings import flags, needs_huge_pages


def test_more_addresses_than_there_are_is_a_config_error(tmp_path: Path) -> None:
    config = ModelConfig.from_dir(make_checkpoint(tmp_path, "qwen3"))
    with pytest.raises(
        ConfigError, match=r"one of 4 parts of a KV cache of \d+ blocks: .*Lower --kv-cache-memory-bytes"
    ):
        MmapPool(config, 2, 2**40, 16, torch.float32)


def test_what_is_below_the_size_stays_and_what_is_above_is_gone(tmp_path: Path) -> None:
    """Blocks of 3 KiB: pages lie across their edges."""
    config = ModelConfig.from_dir(make_checkpoint(tmp_path, "qwen3"))
    pool = MmapPool(config, 2, 64, 16, torch.float32)
    tensors = [tensor for pair in pool.tensors for tensor in pair]
    for tensor in tensors:
        tensor.fill_(7.0)
    pool.resize(21)
    for tensor in tensors:
        assert bool((tensor[:21] == 7).all())
        assert bool((tensor[23:] == 0).all())
    pool.resize(64)
    for tensor in tensors:
        tensor.fill_(8.0)
        assert bool((tensor == 8).all())


@needs_huge_pages
def test_huge_pages_are_asked_for_below_the_size_alone(tmp_path: Path) -> None:
    config = ModelConfig.from_dir(make_checkpoint(tmp_path, "qwen3"))
    pool = MmapPool(config, 1, 6000, 16, torch.float32)
    for size in (2000, 4000, 1000):
        pool.resize(size)
        for tensor in pool.tensors[0]:
            block_bytes = tensor[0].numel() * 4
            last, behind = (tensor.data_ptr() + block_bytes * block for block in (size - 1, size + 2))
            assert "hg" in flags(last)
            assert "hg" not in flags(behind)
    pool.resize(6000)
    assert all("hg" in flags(tensor[-1].data_ptr()) for tensor in pool.tensors[0])
