"""Host memory for the content of KV blocks (``--swap-space``): allocated once, one slot per block."""

import time
from collections.abc import Sequence as Seq

import torch

from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.memory import available_memory_bytes
from flyball_runtime.model.kv_blocks import CacheBlocks
from flyball_runtime.scheduler import BlockSwap

CHUNK = 16
"""Blocks that are copied at a time; this many are gathered on the device before they cross to the host: some 32 MiB in a
model of 8B parameters."""

TIMED_RUNS = 3


def resolve_num_slots(swap_space_bytes: int, block_bytes: int, reserved_bytes: int) -> int:
    """Return how many blocks host memory is to hold.

    Args:
        block_bytes: of one KV block in all its layers.
        reserved_bytes: of the free memory, what the KV cache is going to take.
    Raises:
        ConfigError: there is less memory, or no room for one block.
    """
    if swap_space_bytes and swap_space_bytes < block_bytes:
        raise ConfigError(
            f"--swap-space is {swap_space_bytes} bytes, and one KV block takes {block_bytes}. Write a size with its unit, "
            "such as 4GiB, or 0 for none."
        )
    available_bytes = max(0, available_memory_bytes() - reserved_bytes)
    if swap_space_bytes > available_bytes:
        raise ConfigError(
            f"--swap-space is {swap_space_bytes} bytes, and {available_bytes} bytes of host memory are free beside the KV "
            "cache. Lower the flag, or leave it out."
        )
    return swap_space_bytes // block_bytes


class SwapSpace:
    """Slots ``[num_slots, elements of a block]``, pinned where the KV tensors are on a GPU.

    Copies are queued on the current stream, so they are in order with the steps around them.

    Args:
        blocks: the KV blocks, whose tensors have one dtype.
    Attributes:
        block_copy_s: seconds that copying one block in one direction takes, as measured when this is made.
    Raises:
        ConfigError: the system refuses the memory.
    """

    def __init__(self, blocks: CacheBlocks, num_slots: int) -> None:
        self._blocks = blocks
        shape, is_pinned = (num_slots, blocks.numel), blocks.device.type == "cuda"
        try:
            self._slots = torch.empty(shape, dtype=blocks.dtype, pin_memory=is_pinned)
        except RuntimeError as error:
            num_bytes = shape[0] * shape[1] * blocks.dtype.itemsize
            raise ConfigError(
                f"the system refuses the {num_bytes} bytes of --swap-space: {error}. Lower the flag, or leave it out."
            ) from error
        self.block_copy_s = self._measure(min(num_slots, blocks.num_blocks, CHUNK))

    def swap_out(self, swaps: Seq[BlockSwap]) -> None:
        """Copy blocks to their slots."""
        for part in _chunks(swaps):
            gathered = self._blocks.gather([one.block for one in part])
            for content, one in zip(gathered, part, strict=True):
                self._slots[one.slot].copy_(content, non_blocking=True)

    def swap_in(self, swaps: Seq[BlockSwap]) -> None:
        """Copy slots to their blocks."""
        for part in _chunks(swaps):
            gathered = self._slots.new_empty(len(part), self._blocks.numel, device=self._blocks.device)
            for content, one in zip(gathered, part, strict=True):
                content.copy_(self._slots[one.slot], non_blocking=True)
            self._blocks.scatter([one.block for one in part], gathered)

    def _measure(self, num_blocks: int) -> float:
        """Return the seconds of one copy in the fastest run: the first one faults pages in."""
        swaps = [BlockSwap(index, index) for index in range(num_blocks)]
        times_s = []
        for _ in range(TIMED_RUNS):
            start_s = self._now_s()
            self.swap_out(swaps)
            self.swap_in(swaps)
            times_s.append(self._now_s() - start_s)
        return min(times_s) / (2 * num_blocks)

    def _now_s(self) -> float:
        """Return the time at which all that was launched is done."""
        if self._blocks.device.type == "cuda":
            torch.cuda.synchronize(self._blocks.device)
        return time.monotonic()


def _chunks(swaps: Seq[BlockSwap]) -> list[Seq[BlockSwap]]:
    return [swaps[at : at + CHUNK] for at in range(0, len(swaps), CHUNK)]
