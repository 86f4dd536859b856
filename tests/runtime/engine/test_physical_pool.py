"""What happens to whole blocks."""

import re
from pathlib import Path

import pytest
import torch

from checkpoints import make_checkpoint
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.model_config import ModelConfig
from flyball_runtime.engine.physical_pool import MmapPool


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


def flags(address: int) -> set[str]:
    """Return what the kernel knows of the mapping there: proc_pid_smaps(5), VmFlags."""
    smaps = Path("/proc/self/smaps").read_text()
    for mapping in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", smaps):
        start, end = (int(one, 16) for one in mapping.split(maxsplit=1)[0].split("-"))
        if start <= address < end:
            return set(mapping.rpartition("VmFlags:")[2].split())
    raise AssertionError(f"nothing is mapped at {address:x}")


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without huge pages")
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
