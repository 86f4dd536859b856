"""Sequences, and steps of them, for tests that need no tokenizer."""

import itertools
from collections.abc import Iterable

from flyball_runtime.core.beam_search import BeamSearch
from flyball_runtime.core.pooling import Pooling
from flyball_runtime.core.request import Request, Sequence
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.kv_cache import hash_prompt
from flyball_runtime.scheduler import Scheduler, Step

TOKEN = 999_999
"""A token of no prompt."""
_ids = itertools.count()


def make_sequence(
    prompt: int | Iterable[int],
    *,
    max_tokens: int | None = None,
    priority: int = 0,
    request_id: str | None = None,
    max_model_len: int = 1024,
    eos_token_ids: Iterable[int] = (),
    hashed_by: int | None = None,
    cache_salt: str | None = None,
    client: str = "",
    ttft_deadline_ms: float | None = None,
    e2e_deadline_ms: float | None = None,
    prompt_logprobs: int | None = None,
    pooling: Pooling | None = None,
    fork_group: str | None = None,
    beam_search: BeamSearch | None = None,
    adapter: int | None = None,
) -> Sequence:
    """Make a waiting sequence; an int as ``prompt`` is a length, and its tokens occur in no other such prompt.

    ``hashed_by``: the block size to hash the prompt with, as the API process does; None leaves it to the KV cache.
    """
    number = next(_ids)
    token_ids = [number * 10_000 + i for i in range(prompt)] if isinstance(prompt, int) else list(prompt)
    request = Request(
        request_id=request_id or f"r{number}",
        prompt_token_ids=token_ids,
        sampling=SamplingParams(max_tokens=max_tokens, prompt_logprobs=prompt_logprobs, beam_search=beam_search),
        priority=priority,
        block_hashes=[] if hashed_by is None else hash_prompt(token_ids, hashed_by, cache_salt, adapter),
        cache_salt=cache_salt,
        client=client,
        ttft_deadline_ms=ttft_deadline_ms,
        e2e_deadline_ms=e2e_deadline_ms,
        pooling=pooling,
        fork_group=fork_group,
        adapter=adapter,
    )
    return Sequence(request, max_model_len=max_model_len, eos_token_ids=frozenset(eos_token_ids))


def step(scheduler: Scheduler, token_id: int = TOKEN) -> Step:
    """Plan a step and commit it: each row that samples gets this token."""
    plan = scheduler.plan()
    assert plan is not None
    scheduler.commit(plan, [token_id] * sum(plan.samples))
    return plan
