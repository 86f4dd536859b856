"""The memory around a replica: what it has, and what others take of it."""

from msgspec import Struct

from flyball_protocol import MemoryState


class Taken(Struct, frozen=True, kw_only=True):
    """Another program has so many bytes for a time."""

    num_bytes: int
    start_s: float
    end_s: float


class Memory(Struct, frozen=True, kw_only=True):
    """The memory that a replica lives in, as a cgroup limits it.

    Attributes:
        limit_bytes: for the replica and its neighbours.
        pool_max_bytes: of the whole KV pool.
        rest_bytes: of the replica's process, its KV pool aside.
    """

    limit_bytes: int
    pool_max_bytes: int
    rest_bytes: int
    neighbours: tuple[Taken, ...] = ()

    def state(self, now_s: float, kv_share: float) -> MemoryState:
        """Return what a replica reports that has memory for this share of its KV pool."""
        pool_bytes = round(kv_share * self.pool_max_bytes)
        used_bytes = self.rest_bytes + pool_bytes
        taken_bytes = sum(one.num_bytes for one in self.neighbours if one.start_s <= now_s < one.end_s)
        return MemoryState(
            pool_bytes=pool_bytes,
            pool_max_bytes=self.pool_max_bytes,
            process_bytes=used_bytes,
            limit_bytes=self.limit_bytes,
            available_bytes=max(0, self.limit_bytes - used_bytes - taken_bytes),
            pressure=0.0,
        )
