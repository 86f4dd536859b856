"""The state of one request inside the engine."""

from enum import Enum

from flyball_runtime.core.request import Request


class SequenceStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """One request's tokens and progress; changed by the scheduler and the KV cache only.

    A sequence has no phase: it wants all its tokens computed, the pending ones included, and has ``num_computed_tokens``.
    The gap is a prompt, a prompt's rest, a recompute after preemption, or the one token of a decode.

    Attributes:
        token_ids: prompt and output so far.
        max_total_tokens: prompt and output may not grow past this.
        stop_token_ids: ids that end the sequence (end-of-sequence ids included unless ignored).
        num_computed_tokens: tokens whose K and V are in the cache, or will be once the planned steps have run.
        num_pending_tokens: tokens that planned steps sample and that are not known yet; they come after ``token_ids``.
        block_tables: for each group of layers (``core/kv_layout.py``), KV block ids in order of position. Entries
            before ``num_freed_blocks`` of the group are behind its window, and no longer this sequence's.
        block_hashes: chained hash of each full block that has been hashed so far.
        cache_salt: what the first of those hashes starts from.
        row: index into the engine's persistent batch tensors while running, else None.
        num_cached_tokens: tokens found in the prefix cache at the first admission.
        arrived_s: when it was submitted, by the engine's clock.
        arrival_index: how many sequences were submitted before this one; unique within an engine.
        num_charged_tokens: tokens that its client has been charged for; see WaitingQueue.
        num_lost_tokens: computed tokens that the last preemption threw away; 0 while running.
    """

    __slots__ = (
        "arrival_index",
        "arrived_s",
        "block_hashes",
        "block_tables",
        "cache_salt",
        "client",
        "max_total_tokens",
        "num_cached_tokens",
        "num_charged_tokens",
        "num_computed_tokens",
        "num_freed_blocks",
        "num_lost_tokens",
        "num_pending_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "priority",
        "request_id",
        "row",
        "sampling",
        "status",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(self, request: Request, *, max_model_len: int, eos_token_ids: frozenset[int]) -> None:
        self.request_id = request.request_id
        self.sampling = request.sampling
        self.priority = request.priority
        self.client = request.client
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        max_tokens = request.sampling.max_tokens
        room = max_model_len - self.num_prompt_tokens
        self.max_total_tokens = self.num_prompt_tokens + (room if max_tokens is None else min(max_tokens, room))
        own_stops = frozenset(request.sampling.stop_token_ids)
        self.stop_token_ids = own_stops if request.sampling.ignore_eos else own_stops | eos_token_ids
        self.status = SequenceStatus.WAITING
        self.num_computed_tokens = 0
        self.num_pending_tokens = 0
        self.block_tables: list[list[int]] = []
        self.num_freed_blocks: list[int] = []
        self.block_hashes = list(request.block_hashes)
        self.cache_salt = request.cache_salt
        self.row: int | None = None
        self.num_cached_tokens = 0
        self.num_charged_tokens = 0
        self.num_preemptions = 0
        self.num_lost_tokens = 0
        self.arrival_index = 0
        self.arrived_s = 0.0

    @property
    def block_table(self) -> list[int]:
        """That of the first group; empty while waiting."""
        return self.block_tables[0] if self.block_tables else []

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id}, {self.status.value}, {self.num_computed_tokens}/{len(self.token_ids)} computed, "
            f"{len(self.block_table)} blocks)"
        )
