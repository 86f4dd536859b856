"""The memory behind the KV blocks, addressed by block id, which can be given back and taken again while serving."""

import contextlib
import math
import mmap
import sys
from typing import Protocol

import torch
from torch import Tensor

from flyball_runtime.core.checkpoint import KV_SCALE_BYTES, ServedModel
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.model.transformer import KVTensors


class PhysicalPool(Protocol):
    """Pairs of K and V, ``[num_blocks, block_size, num_kv_heads, head_dim]`` each, of zeros at first (see ``KVLayout``).

    FlashAttention multiplies values that it masks by 0, so what no token has written must be no NaN.

    In 8 bits a block also holds the scales of its vectors, for which the last dimension is larger (see ``KVTensors``).

    Attributes:
        tensors: addresses for as many blocks as there may ever be; those past the last ``resize`` hold nothing.
    """

    tensors: KVTensors

    def resize(self, num_blocks: int) -> None:
        """Give back the memory of the blocks from ``num_blocks`` on; what is below may be used."""
        ...


class SoftPool:
    """Allocated once. A smaller size is a cap on the ids, and frees nothing."""

    def __init__(
        self,
        config: ServedModel,
        num_tensors: int,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        shape = _shape(config, num_blocks, block_size, dtype)

        def zeros() -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.tensors: KVTensors = [(zeros(), zeros()) for _ in range(num_tensors)]

    def resize(self, num_blocks: int) -> None:
        """Do nothing."""


class MmapPool:
    """For CPUs under Linux: a mapping per tensor, whose pages the kernel gives on first touch and takes back on ``resize``.

    Blocks that were never used cost no memory, so neither does the room to grow. Below the size, pages may be huge ones: the
    blocks of a sequence lie anywhere, and with small pages a decode waits for their addresses too.

    Raises:
        ConfigError: the system has no room for the addresses.
    """

    def __init__(self, config: ServedModel, num_tensors: int, num_blocks: int, block_size: int, dtype: torch.dtype):
        shape = _shape(config, num_blocks, block_size, dtype)
        self._bytes_per_block = math.prod(shape[1:]) * dtype.itemsize
        self._maps: list[mmap.mmap] = []

        def empty() -> Tensor:
            num_bytes = num_blocks * self._bytes_per_block
            try:
                memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            except OSError as error:
                raise ConfigError(
                    f"the system refuses {num_bytes} bytes, one of {2 * num_tensors} parts of a KV cache of "
                    f"{num_blocks} blocks: {error}. Lower --kv-cache-memory-bytes or --kv-cache-memory-max."
                ) from error
            self._maps.append(memory)
            return torch.frombuffer(memory, dtype=dtype).view(shape)

        self.tensors: KVTensors = [(empty(), empty()) for _ in range(num_tensors)]

    def resize(self, num_blocks: int) -> None:
        end = -(-num_blocks * self._bytes_per_block // mmap.PAGESIZE) * mmap.PAGESIZE
        for memory in self._maps:
            _advise(memory, mmap.MADV_HUGEPAGE, 0, min(end, len(memory)))
            if end < len(memory):
                memory.madvise(mmap.MADV_DONTNEED, end, len(memory) - end)
                _advise(memory, mmap.MADV_NOHUGEPAGE, end, len(memory) - end)  # else one could reach beyond the size


def _advise(memory: mmap.mmap, advice: int, start: int, length: int) -> None:
    with contextlib.suppress(OSError):  # a hint, which kernels without huge pages refuse
        memory.madvise(advice, start, length)


def _shape(config: ServedModel, num_blocks: int, block_size: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    vector_size = config.head_dim + (KV_SCALE_BYTES if dtype.itemsize == 1 else 0)
    return num_blocks, block_size, config.num_key_value_heads, vector_size


def can_return_memory(device: torch.device) -> bool:
    """Whether the pool of a device can give memory back, and take it again."""
    return device.type == "cpu" and sys.platform == "linux"


def make_pool(
    config: ServedModel, num_tensors: int, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> PhysicalPool:
    """Return the pool for a device."""
    if can_return_memory(device):
        return MmapPool(config, num_tensors, num_blocks, block_size, dtype)
    return SoftPool(config, num_tensors, num_blocks, block_size, dtype, device)
