"""Move whole blocks of a KV cache, in all its tensors at once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flyball_kernels.backend import Backend
from flyball_kernels.cache_blocks import reference
from flyball_kernels.checks import check_contiguous, check_dtype, check_shape


class CacheBlocks:
    """The blocks of a paged KV cache. A block id names the same block in every tensor.

    Ids are checked by torch where torch moves the blocks. The Triton kernels do not check them.

    Args:
        tensors: ``[num_blocks, ...]``, contiguous, at least one; what a block holds in each may differ in size. They have to
            keep their memory. Those in e4m3 are taken as int8.
    Raises:
        ValueError: there is no tensor, or one is not contiguous or has another number of blocks.
    """

    def __init__(self, tensors: Sequence[Tensor], *, backend: Backend) -> None:
        if not tensors:
            raise ValueError("tensors is empty; a cache has at least one.")
        # torch cannot index numbers in e4m3
        tensors = [one.view(torch.int8) if one.dtype == torch.float8_e4m3fn else one for one in tensors]
        self.num_blocks, self.device, self.dtype = tensors[0].shape[0], tensors[0].device, tensors[0].dtype
        for tensor in tensors:
            check_shape("a tensor", tensor, self.num_blocks, *tensor.shape[1:])
            check_contiguous("a tensor", tensor)
        self._tensors = [tensor.view(self.num_blocks, -1) for tensor in tensors]
        self.numel = sum(tensor.shape[1] for tensor in self._tensors)
        self._table = None
        if backend.name == "triton":
            from flyball_kernels.cache_blocks import kernel  # triton is there on Linux only

            self._table = kernel.Table(self._tensors)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks as if all at once: each source is read before any target is written.

        Args:
            pairs: ids of a source and a target; no target twice.
        """
        if not pairs:
            return
        sources, targets = (list(ids) for ids in zip(*pairs, strict=True))
        if self._table is None:
            reference.copy(self._tensors, self._ids(sources), self._ids(targets))
        elif set(sources).isdisjoint(targets):
            self._table.copy(self._ids(sources), self._ids(targets))
        else:
            self.scatter(targets, self.gather(sources))

    def gather(self, blocks: Sequence[int]) -> Tensor:
        """Return ``[len(blocks), numel]``: for each block what it holds, one tensor after the other, which have one dtype."""
        for tensor in self._tensors:
            check_dtype("a tensor", tensor, self.dtype)
        if self._table is None:
            return reference.gather(self._tensors, self._ids(blocks))
        content = torch.empty(len(blocks), self.numel, dtype=self.dtype, device=self.device)
        self._table.gather(self._ids(blocks), content)
        return content

    def scatter(self, blocks: Sequence[int], content: Tensor) -> None:
        """Write what ``gather`` returned into blocks, none of which is named twice."""
        check_shape("content", content, len(blocks), self.numel)
        check_dtype("content", content, self.dtype)
        if self._table is None:
            reference.scatter(self._tensors, self._ids(blocks), content)
        else:
            self._table.scatter(self._ids(blocks), content.contiguous())

    def _ids(self, blocks: Sequence[int]) -> Tensor:
        return torch.tensor(blocks, dtype=torch.int64).to(self.device, non_blocking=True)
