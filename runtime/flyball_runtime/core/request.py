"""One request: its sampling settings, what is checked before it may run, its state in the engine, and its events."""

import math
import random
from array import array
from collections.abc import Collection
from enum import Enum
from typing import Literal, NamedTuple

from msgspec import Struct, structs

from flyball_protocol.quoting import quoted
from flyball_runtime.core.errors import EmptyPrompt, InvalidRequest, PromptTooLong, TokenOutOfVocabulary

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_PENALTY = 2.0
MAX_LOGPROBS = 20
MIN_LOGPROB = -9999.0
"""What lower ones are given as, since JSON has no infinity; vLLM's."""
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-3, 1e3
MAX_INT64 = 2**63 - 1
MAX_SEED = MAX_INT64


class SamplingParams(Struct, frozen=True, kw_only=True):
    """Sampling settings of one request; crosses from the API process to the engine process.

    Attributes:
        max_tokens: most output tokens; None means as many as the context length leaves.
        temperature: at most 2; 0, and anything below 1e-5, is greedy.
        top_p: nucleus in (0, 1]; 1 is off (Holtzman et al. 2020).
        top_k: keep the k likeliest tokens; 0 is off.
        min_p: drop tokens below min_p times the top probability, in [0, 1]; 0 is off (Nguyen et al. 2024).
        seed: same seed, same output, whatever else is in the batch; None draws one.
        stop: strings that end the output; they are not part of it.
        stop_token_ids: token ids that end the output, beside the model's end-of-sequence ids.
        ignore_eos: go on after an end-of-sequence id (benchmarks).
        min_tokens: output tokens before any that ends the output, and before a stop string counts.
        presence_penalty: taken off the logit of each token that the output has, from -2 to 2.
        frequency_penalty: likewise, as many times as the output has the token.
        repetition_penalty: logits of tokens in prompt and output are divided by it, or multiplied where not above 0
            (Keskar et al. 2019); 1 is off.
        logit_bias: added to the logits of these token ids, from -100 to 100.
        allowed_token_ids: the only ids to choose from; None allows all.
        bad_words: texts that the output shall not have. They work through ``bad_words_token_ids``.
        logprobs: tell the log probability of each output token, and of so many of the likeliest in its place, at most 20;
            None tells none. They are the model's, before all that changes logits.
        bad_words_token_ids: the last id of each is not chosen behind the others of it.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None

    @property
    def changes_logits(self) -> bool:
        """Whether the model's logits are changed before one is chosen by temperature and filters."""
        return bool(
            self.has_penalties
            or self.logit_bias
            or self.min_tokens
            or self.bad_words_token_ids
            or self.allowed_token_ids is not None
        )

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0

    def validate(self, vocab_size: int) -> None:
        """Raise InvalidRequest naming the first field that is out of range."""
        _check_int("max_tokens", self.max_tokens, 1, None, optional=True)
        _check_float("temperature", self.temperature, 0.0, 2.0)
        _check_float("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_int("top_k", self.top_k, 0, MAX_INT64)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_int("seed", self.seed, -MAX_SEED - 1, MAX_SEED, optional=True)
        _check_texts("stop", self.stop, MAX_STOP_STRINGS, MAX_STOP_STRING_CHARS)
        _check_count("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS)
        _check_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        _check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check_float("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        _check_float("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        _check_float("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
        _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS, optional=True)
        self._validate_choice_of_tokens(vocab_size)

    def _validate_choice_of_tokens(self, vocab_size: int) -> None:
        _check_count("logit_bias", len(self.logit_bias), MAX_LOGIT_BIASES)
        _check_ids("logit_bias", self.logit_bias, vocab_size)
        for bias in self.logit_bias.values():
            _check_float("logit_bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise InvalidRequest(
                    "allowed_token_ids is empty, so there is nothing to choose from. Name token ids, or leave it out.",
                    param="allowed_token_ids",
                )
            _check_count("allowed_token_ids", len(self.allowed_token_ids), vocab_size)
            _check_ids("allowed_token_ids", self.allowed_token_ids, vocab_size)
        _check_texts("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS)
        _check_count("bad_words", len(self.bad_words_token_ids), 2 * MAX_BAD_WORDS)
        for word in self.bad_words_token_ids:
            _check_count("a bad word", len(word), MAX_BAD_WORD_CHARS, unit="tokens", param="bad_words")
            _check_ids("bad_words", word, vocab_size)

    def check_choice_is_left(self, stop_token_ids: Collection[int], vocab_size: int) -> None:
        """Raise InvalidRequest where these settings may leave no token to choose.

        Args:
            stop_token_ids: all that would end the output.
        """
        never = {word[-1] for word in self.bad_words_token_ids if word}
        if self.min_tokens:
            never |= set(stop_token_ids)
        allowed = self.allowed_token_ids
        if len(never) == vocab_size if allowed is None else never.issuperset(allowed):
            raise InvalidRequest(
                "allowed_token_ids, bad_words and min_tokens together may leave no token to choose: all that are allowed "
                "end a bad word or the output. Allow more, or leave one of the three out.",
                param="bad_words" if self.allowed_token_ids is None else "allowed_token_ids",
            )


DEFAULT_SAMPLING = SamplingParams()
"""OpenAI's defaults."""


def with_seed(sampling: SamplingParams, rng: random.Random) -> SamplingParams:
    """The same settings with a seed, drawn from ``rng`` if the request named none.

    Called once per request, so that a preempted sequence goes on with the seed that it began with.
    """
    if sampling.seed is not None:
        return sampling
    return structs.replace(sampling, seed=rng.randint(0, MAX_SEED))


def _check_float(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    if math.isfinite(value) and low <= value <= high and not (open_low and value == low):
        return
    bracket = "(" if open_low else "["
    raise InvalidRequest(f"{name} is {value}; it must be a number in {bracket}{low:g}, {high:g}].", param=name)


def _check_int(name: str, value: int | None, low: int, high: int | None, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    if value is not None and low <= value and (high is None or value <= high):
        return
    limit = f"at least {low}" if high is None else f"from {low} to {high}"
    raise InvalidRequest(f"{name} is {quoted(value)}; it must be {limit}.", param=name)


def _check_texts(name: str, texts: Collection[str], most: int, most_chars: int) -> None:
    _check_count(name, len(texts), most)
    for text in texts:
        if not text:
            raise InvalidRequest(f"{name} has an empty string; each needs 1 character or more.", param=name)
        _check_count(f"one of {name}", len(text), most_chars, unit="characters", param=name)


def _check_ids(name: str, token_ids: Collection[int], vocab_size: int) -> None:
    if token_ids:
        _check_int(name, min(token_ids), 0, vocab_size - 1)
        _check_int(name, max(token_ids), 0, vocab_size - 1)


def _check_count(name: str, count: int, high: int, *, unit: str = "entries", param: str | None = None) -> None:
    if count > high:
        raise InvalidRequest(f"{name} has {count} {unit}; at most {high} are allowed.", param=param or name)


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


class TokenLogprobs(Struct, frozen=True, array_like=True):
    """The log probability of a token, and the likeliest tokens in its place with theirs, best first."""

    token_id: int
    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class Tokens(Struct, frozen=True, tag=True):
    """New output tokens of one request, in order.

    ``num_cached_tokens``: prompt tokens found in the prefix cache. ``logprobs``: of each token, if the request asks for them.
    """

    request_id: str
    token_ids: list[int]
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] = []


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
        num_tokens: of ``token_ids``, and those after them that planned steps sample and that are not known yet.
        block_tables: for each group of layers (``core/kv_layout.py``), KV block ids in order of position. Entries
            before ``num_freed_blocks`` of the group are behind its window, and no longer this sequence's.
        block_hashes: chained hash of each full block that has been hashed so far.
        cache_salt: what the first of those hashes starts from.
        row: index into the engine's persistent batch tensors while running, else None.
        num_cached_tokens: tokens found in the prefix cache at the first admission.
        ttft_deadline_s, e2e_deadline_s: the request's, from ``arrived_s`` on.
        arrived_s: when it was submitted, by the engine's clock.
        arrival_index: how many sequences were submitted before this one; unique within an engine.
        num_charged_tokens: tokens that its client has been charged for; see WaitingQueue.
        num_lost_tokens: computed tokens that the last preemption threw away; 0 while running.
        num_predicted_tokens: how many output tokens it is expected to get.
        due_s: when its first token has to be there for its deadlines to be met, by the engine's clock; infinity without one.
        level, rank: its place among others; see ``scheduler/policies.py``.
        is_late: whether it was found unable to meet its deadline; see WaitingQueue.
    """

    __slots__ = (
        "arrival_index",
        "arrived_s",
        "block_hashes",
        "block_tables",
        "cache_salt",
        "client",
        "due_s",
        "e2e_deadline_s",
        "is_late",
        "level",
        "max_total_tokens",
        "num_cached_tokens",
        "num_charged_tokens",
        "num_computed_tokens",
        "num_freed_blocks",
        "num_lost_tokens",
        "num_predicted_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_tokens",
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
        self.priority = request.priority
        self.ttft_deadline_s = _seconds(request.ttft_deadline_ms)
        self.e2e_deadline_s = _seconds(request.e2e_deadline_ms)
        self.client = request.client
        self.token_ids = array("I", request.prompt_token_ids)
        self.num_tokens = self.num_prompt_tokens = len(self.token_ids)
        max_tokens = request.sampling.max_tokens
        room = max_model_len - self.num_prompt_tokens
        self.max_total_tokens = self.num_prompt_tokens + (room if max_tokens is None else min(max_tokens, room))
        own_stops = frozenset(request.sampling.stop_token_ids)
        self.stop_token_ids = own_stops if request.sampling.ignore_eos else own_stops | eos_token_ids
        self.status = SequenceStatus.WAITING
        self.num_computed_tokens = 0
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
        self.num_predicted_tokens = 0.0
        self.due_s = math.inf
        self.level: tuple[float | bytes, ...] = ()
        self.rank: tuple[float | bytes, ...] = ()
        self.is_late = False

    @property
    def block_table(self) -> list[int]:
        """That of the first group; empty while waiting."""
        return self.block_tables[0] if self.block_tables else []

    @property
    def num_pending_tokens(self) -> int:
        """How many tokens planned steps sample that are not known yet."""
        return self.num_tokens - len(self.token_ids)

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
