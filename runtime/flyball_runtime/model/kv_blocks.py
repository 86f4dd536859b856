"""The KV blocks, as they are moved in all layers at once."""

from flyball_kernels import Backend, CacheBlocks
from flyball_runtime.model.transformer import KVTensors

__all__ = ["CacheBlocks", "cache_blocks"]


def cache_blocks(kv: KVTensors, backend: Backend) -> CacheBlocks:
    """Return the blocks of these tensors."""
    return CacheBlocks([tensor for pair in kv for tensor in pair], backend=backend)
