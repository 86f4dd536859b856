"""Which KV block belongs to whom: block pool, block tables, prefix cache. Hands out ids; the tensors live in engine/."""

from flyball_runtime.kv_cache.block_pool import BlockPool
from flyball_runtime.kv_cache.host_tier import HostTier
from flyball_runtime.kv_cache.kv_cache import Computed, KVCache, PrefixMatch, hash_prompt

__all__ = ["BlockPool", "Computed", "HostTier", "KVCache", "PrefixMatch", "hash_prompt"]
