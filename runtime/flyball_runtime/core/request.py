"""One request: what is checked before it may run, its state in the engine, and its events."""

import math
from array import array
from enum import Enum
from typing import Literal, NamedTuple

from msgspec import Struct

from flyball_protocol.quoting import quoted
from flyball_runtime.core.errors import EmptyPrompt, InvalidRequest, PromptTooLong, TokenOutOfVocabulary
from flyball_runtime.core.pooling import Pooling
from flyball_runtime.core.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort"]


class Prompt(NamedTuple):
    """Token ids that were checked, and the names of their full KV blocks (none without a prefix cache)."""

    token_ids: list[int]
    block_hashes: list[bytes]


class Request(Struct, frozen=True, kw_only=True):
    """A tokenized request.

    Attributes:
        priority: lower runs first; used by the policies ``priority`` and ``edf``.
        ttft_deadline_ms: milliseconds from its arrival in which its first token is wanted; used by ``edf``. None: those of
            the objective, if there is one.
        e2e_deadline_ms: the same for its last token.
        block_hashes: names of the prompt's first full KV blocks (``kv_cache/kv_cache.py``), as many as somebody had the
            time for; the KV cache adds those that it needs. The API process does, so that no step waits for it. They come
            with a Prompt, so the ids of a request that has them were checked.
        client: opaque name of the sender, among whose requests and other senders' the scheduler shares.
        cache_salt: prompts share KV blocks only when their salts are equal; None is a salt of its own. A secret.
        pooling: nothing is sampled; the ending brings the pooled hidden states of the prompt instead.
        fork_group: requests of one group have one prompt, salt and adapter. It is computed once, and they share its KV blocks.
        adapter: number of the LoRA adapter that it is for; None for the base model.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    priority: int = 0
    ttft_deadline_ms: float | None = None
    e2e_deadline_ms: float | None = None
    client: str = ""
    block_hashes: list[bytes] = []
    cache_salt: str | None = None
    pooling: Pooling | None = None
    fork_group: str | None = None
    adapter: int | None = None


class TokenLogprobs(Struct, frozen=True, array_like=True):
    """The log probability of a token, and the likeliest tokens in its place with theirs, best first.

    ``logprob``: None for the first token of a prompt. ``rank``: of a prompt token among all, from 1 on.
    """

    token_id: int
    logprob: float | None
    top_ids: list[int]
    top_logprobs: list[float]
    rank: int = 0


class Hypothesis(Struct, frozen=True, array_like=True):
    """An output that a beam search has found.

    Attributes:
        token_ids: of the output, with the token that ended it.
        score: the sum of their log probabilities over their number to the power of ``length_penalty``.
        cum_logprob: that sum.
        reason: why it ended.
        logprobs: of each token, if the request asks for them.
    """

    token_ids: list[int]
    score: float
    cum_logprob: float
    reason: Literal["stop", "length"]
    logprobs: list[TokenLogprobs] = []


class Hypotheses(Struct, frozen=True, tag=True):
    """All that the beam search of a request has found, the best first; it comes right before the ending, and no Tokens do."""

    request_id: str
    hypotheses: list[Hypothesis]
    num_cached_tokens: int = 0


class Tokens(Struct, frozen=True, tag=True):
    """New output tokens of one request, in order.

    ``num_cached_tokens``: prompt tokens found in the prefix cache. ``logprobs``: of each token, if the request asks for them.
    ``prompt_logprobs``: likewise, of the prompt's tokens from the second on; they come with the first output token.
    """

    request_id: str
    token_ids: list[int]
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []


class Finished(Struct, frozen=True, tag=True):
    """The ending of a request that ran.

    ``pooled``: of a request with ``pooling`` the vector, 32-bit floats in the machine's order; else empty.
    ``num_cached_tokens``: of such a request, which has no Tokens that say it.
    """

    request_id: str
    reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    pooled: bytes = b""
    num_cached_tokens: int = 0


class Failed(Struct, frozen=True, tag=True):
    """The ending of a request that did not; mirrors RequestError."""

    request_id: str
    status: int
    code: str
    message: str
    retry_after_s: int | None = None


RequestEvent = Tokens | Hypotheses | Finished | Failed


MAX_CACHE_SALT_CHARS = 1024
MAX_DEADLINE_MS = 86_400_000


def validate_request(request: Request, *, max_model_len: int, vocab_size: int) -> None:
    """Check prompt ids, lengths, sampling values and salt. Raises a RequestError that names the first fault."""
    validate_prompt(request.prompt_token_ids, max_model_len=max_model_len, vocab_size=vocab_size)
    validate_settings(request, max_model_len=max_model_len, vocab_size=vocab_size)


def validate_prompt(token_ids: list[int], *, max_model_len: int, vocab_size: int) -> None:
    """Check length and ids, in about 25 ns a token. Raises a RequestError that names the first fault."""
    if not token_ids:
        raise EmptyPrompt
    if len(token_ids) >= max_model_len:
        raise PromptTooLong(len(token_ids), None, max_model_len)
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        raise TokenOutOfVocabulary(next(i for i in token_ids if not 0 <= i < vocab_size), vocab_size)


def validate_settings(request: Request, *, max_model_len: int, vocab_size: int) -> None:
    """Check everything but the prompt's ids. Raises a RequestError that names the first fault."""
    request.sampling.validate(vocab_size)
    validate_cache_salt(request.cache_salt)
    validate_deadlines(request.ttft_deadline_ms, request.e2e_deadline_ms)
    num_prompt_tokens, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
    if max_tokens is not None and num_prompt_tokens + max_tokens > max_model_len:
        raise PromptTooLong(num_prompt_tokens, max_tokens, max_model_len)


def validate_deadlines(ttft_deadline_ms: float | None, e2e_deadline_ms: float | None) -> None:
    """Raise InvalidRequest for a deadline that has passed when the request comes, that is no number, or before the other."""
    for name, value in (("ttft_deadline_ms", ttft_deadline_ms), ("e2e_deadline_ms", e2e_deadline_ms)):
        if value is not None and not 0 < value <= MAX_DEADLINE_MS:
            raise InvalidRequest(
                f"{name} is {quoted(value)}; it counts from the request's arrival and must be above 0, at most "
                f"{MAX_DEADLINE_MS} (a day). Leave it out for no deadline.",
                param=name,
            )
    if ttft_deadline_ms is not None and e2e_deadline_ms is not None and e2e_deadline_ms < ttft_deadline_ms:
        raise InvalidRequest(
            f"e2e_deadline_ms is {e2e_deadline_ms:g}, before ttft_deadline_ms {ttft_deadline_ms:g}: the last token cannot "
            "come before the first. Raise it or leave one out.",
            param="e2e_deadline_ms",
        )


def validate_cache_salt(salt: str | None) -> None:
    """Raise InvalidRequest unless ``salt`` is None or a text of allowed length. The message does not repeat it."""
    if salt is not None and not 1 <= len(salt) <= MAX_CACHE_SALT_CHARS:
        raise InvalidRequest(
            f"cache_salt has {len(salt)} characters; it may have 1 to {MAX_CACHE_SALT_CHARS}. "
            "Send a random text that only its tenant knows, or leave it out.",
            param="cache_salt",
        )


class SequenceStatus(Enum):
    WAITING = "waiting"
    HELD = "held"
    """Waits for a sequence of its fork group to compute their prompt, or for a slot for its adapter."""
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """One request's tokens and progress; changed by the scheduler and the KV cache only.

    A sequence has no phase: it wants all its tokens computed, the pending ones included, and has ``num_computed_tokens``.
    The gap is a prompt, a prompt's rest, a recompute after preemption, or the one token of a decode.

    Attributes:
        token_ids: prompt and output so far; an array, since the garbage collector would walk a list time and again.
        max_total_tokens: prompt and output may not grow past this.
        stop_token_ids: ids that end the sequence (end-of-sequence ids included unless ignored).
        num_computed_tokens: tokens whose K and V are in the cache, or will be once the planned steps have run.
        num_uncomputed_tokens: the others among ``token_ids`` and the tokens that planned steps sample, which are not known yet.
        block_tables: for each group of layers (``core/kv_layout.py``), KV block ids in order of position. Entries
            before ``num_freed_blocks`` of the group are behind its window, and no longer this sequence's.
        block_hashes: chained hash of each full block that has been hashed so far.
        cache_salt: what the first of those hashes starts from, with the adapter.
        adapter: number of the LoRA adapter that computes it; None for the base model alone.
        row: index into the engine's persistent batch tensors while running, else None.
        epoch: counts the starts of all rows: of two running sequences, the one admitted first has the smaller one.
        pooling: the request's; such a sequence ends when its prompt is computed.
        num_cached_tokens: tokens found in the prefix cache, or computed by its fork group, at the first admission.
        fork_group: whose sequences share the blocks of their prompt; None for one of its own.
        num_scored_tokens: tokens behind which the next one's log probability is known, or will be; see ``PromptSpan``.
        ttft_deadline_s, e2e_deadline_s: the request's, from ``arrived_s`` on.
        arrived_s: when it was submitted, by the engine's clock.
        arrival_index: how many sequences were submitted before this one; unique within an engine.
        num_charged_tokens: tokens that its client has been charged for; see WaitingQueue.
        num_lost_tokens: computed tokens that the last preemption threw away; 0 while running.
        num_predicted_tokens: how many output tokens it is expected to get.
        due_s: when its first token has to be there for its deadlines to be met, by the engine's clock; infinity without one.
        level, rank: its place among others; see ``scheduler/policies.py``.
        is_late: whether it was found unable to meet its deadline; see WaitingQueue.
        draft_acceptance: mean share of its drafted tokens that were accepted; None before it is asked for drafts.
        min_tokens_to_draft: nothing is drafted while it has fewer tokens; see ``scheduler/drafts.py``.
    """

    __slots__ = (
        "adapter",
        "arrival_index",
        "arrived_s",
        "block_hashes",
        "block_tables",
        "cache_salt",
        "client",
        "draft_acceptance",
        "due_s",
        "e2e_deadline_s",
        "epoch",
        "fork_group",
        "is_late",
        "level",
        "max_total_tokens",
        "min_tokens_to_draft",
        "num_cached_tokens",
        "num_charged_tokens",
        "num_computed_tokens",
        "num_freed_blocks",
        "num_lost_tokens",
        "num_predicted_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_scored_tokens",
        "num_uncomputed_tokens",
        "pooling",
        "priority",
        "rank",
        "request_id",
        "row",
        "sampling",
        "status",
        "stop_token_ids",
        "token_ids",
        "ttft_deadline_s",
    )

    def __init__(self, request: Request, *, max_model_len: int, eos_token_ids: frozenset[int]) -> None:
        self.request_id = request.request_id
        self.sampling = request.sampling
        self.pooling = request.pooling
        self.priority = request.priority
        self.ttft_deadline_s = _seconds(request.ttft_deadline_ms)
        self.e2e_deadline_s = _seconds(request.e2e_deadline_ms)
        self.client = request.client
        self.token_ids = array("I", request.prompt_token_ids)
        self.num_prompt_tokens = self.num_uncomputed_tokens = len(self.token_ids)
        max_tokens = request.sampling.max_tokens
        room = 0 if self.pooling is not None else max_model_len - self.num_prompt_tokens
        self.max_total_tokens = self.num_prompt_tokens + (room if max_tokens is None else min(max_tokens, room))
        self.stop_token_ids = request.sampling.stops(eos_token_ids)
        self.status = SequenceStatus.WAITING
        self.num_computed_tokens = 0
        self.block_tables: list[list[int]] = []
        self.num_freed_blocks: list[int] = []
        self.block_hashes = list(request.block_hashes)
        self.cache_salt = request.cache_salt
        self.adapter = request.adapter
        self.fork_group = request.fork_group
        self.row: int | None = None
        self.epoch = 0
        self.num_cached_tokens = 0
        self.num_scored_tokens = 0
        self.num_charged_tokens = 0
        self.num_preemptions = 0
        self.num_lost_tokens = 0
        self.arrival_index = 0
        self.arrived_s = 0.0
        self.num_predicted_tokens = 0.0
        self.due_s = math.inf
        self.level: tuple[float | bytes, ...] = ()
        self.rank: tuple[float | bytes, ...] = ()
        self.is_late = False
        self.draft_acceptance: float | None = None
        self.min_tokens_to_draft = 0

    @property
    def block_table(self) -> list[int]:
        """That of the first group; empty while waiting."""
        return self.block_tables[0] if self.block_tables else []

    @property
    def num_seats(self) -> int:
        """How many sequences run for it at once."""
        return 1 if self.sampling.beam_search is None else self.sampling.beam_search.width

    @property
    def num_unscored_tokens(self) -> int:
        """How many prompt tokens have to be computed for the log probability of the next one."""
        asks = self.sampling.prompt_logprobs is not None
        return self.num_prompt_tokens - 1 - self.num_scored_tokens if asks else 0

    @property
    def num_reusable_tokens(self) -> int:
        """How many of its first tokens need not be computed if they are cached: not those that more than K and V are
        wanted of."""
        if self.pooling == "mean":
            return 0
        return self.num_scored_tokens if self.num_unscored_tokens else len(self.token_ids) - 1

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id}, {self.status.value}, {self.num_computed_tokens}/{len(self.token_ids)} computed, "
            f"{len(self.block_table)} blocks)"
        )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
