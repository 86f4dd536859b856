"""What crosses between the API process and the engine: a request in, tokens and exactly one ending out."""

from typing import Literal, NamedTuple

from msgspec import Struct

from flyball_runtime.core.sampling import SamplingParams

FinishReason = Literal["stop", "length", "abort"]


class Prompt(NamedTuple):
    """Token ids that were checked, and the names of their full KV blocks (none without a prefix cache)."""

    token_ids: list[int]
    block_hashes: list[bytes]


class Request(Struct, frozen=True, kw_only=True):
    """A tokenized request.

    Attributes:
        priority: lower runs first; used by the ``priority`` policy only.
        block_hashes: names of the prompt's first full KV blocks (``kv_cache/block_hash.py``), as many as somebody had the
            time for; the KV cache adds those that it needs. The API process does, so that no step waits for it. They come
            with a Prompt, so the ids of a request that has them were checked.
        client: opaque name of the sender, among whose requests and other senders' the scheduler shares.
        cache_salt: prompts share KV blocks only when their salts are equal; None is a salt of its own. A secret.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    priority: int = 0
    client: str = ""
    block_hashes: list[bytes] = []
    cache_salt: str | None = None


class Tokens(Struct, frozen=True, tag=True):
    """New output tokens of one request, in order. ``num_cached_tokens``: prompt tokens found in the prefix cache."""

    request_id: str
    token_ids: list[int]
    num_cached_tokens: int = 0


class Finished(Struct, frozen=True, tag=True):
    """The ending of a request that ran."""

    request_id: str
    reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int


class Failed(Struct, frozen=True, tag=True):
    """The ending of a request that did not; mirrors RequestError."""

    request_id: str
    status: int
    code: str
    message: str
    retry_after_s: int | None = None


RequestEvent = Tokens | Finished | Failed
