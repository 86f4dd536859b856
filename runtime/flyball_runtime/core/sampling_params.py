"""How one request wants its tokens chosen, and what is checked of that."""

import math
import random
from collections.abc import Collection

from msgspec import Struct, structs

from flyball_protocol.quoting import quoted
from flyball_runtime.core.beam_search import BeamSearch
from flyball_runtime.core.errors import InvalidRequest
from flyball_runtime.core.grammar import MAX_GRAMMAR_CHARS, Grammar

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
        prompt_logprobs: the same of each prompt token but the first, which nothing comes before. The prompt is then computed
            whole, since the prefix cache has no logits.
        bad_words_token_ids: the last id of each is not chosen behind the others of it.
        grammar: the form that the output must have. It may end only where the grammar may.
        beam_search: look for the likeliest outputs; nothing is sampled. Of the other settings only those of length and stop
            tokens go with it, and ``logprobs``.
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
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    beam_search: BeamSearch | None = None

    @property
    def changes_logits(self) -> bool:
        """Whether the model's logits are changed before one is chosen by temperature and filters."""
        return bool(
            self.has_penalties
            or self.logit_bias
            or self.min_tokens
            or self.bad_words_token_ids
            or self.allowed_token_ids is not None
            or self.grammar is not None
        )

    @property
    def allows_drafts(self) -> bool:
        """Whether several tokens of it may be verified at once: nothing looks at how each comes about."""
        return not self.changes_logits and self.logprobs is None and self.beam_search is None

    def stops(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """Return the tokens that end the output of a model with these end-of-sequence ids."""
        own = frozenset(self.stop_token_ids)
        return own if self.ignore_eos else own | eos_token_ids

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
        _check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS, optional=True)
        self._validate_choice_of_tokens(vocab_size)
        self._validate_grammar()
        self._validate_beam_search(vocab_size)

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

    def _validate_grammar(self) -> None:
        if self.grammar is None:
            return
        if self.grammar.kind != "compiled":
            name, num_chars = "the schema, regex, choice or grammar", len(self.grammar.text)
            _check_count(name, num_chars, MAX_GRAMMAR_CHARS, unit="characters", param="structured_outputs")
        if self.ignore_eos:
            raise InvalidRequest(
                "ignore_eos asks to go on after the end, and structured output has an end. Leave one of them out.",
                param="ignore_eos",
            )

    def _validate_beam_search(self, vocab_size: int) -> None:
        if self.beam_search is None:
            return
        self.beam_search.validate(vocab_size)
        unfit = {
            "temperature": self.temperature not in (0.0, 1.0),
            "top_p": self.top_p != 1.0,
            "top_k": self.top_k != 0,
            "min_p": self.min_p != 0.0,
            "min_tokens": self.min_tokens != 0,
            "presence_penalty": self.presence_penalty != 0.0,
            "frequency_penalty": self.frequency_penalty != 0.0,
            "repetition_penalty": self.repetition_penalty != 1.0,
            "logit_bias": bool(self.logit_bias),
            "allowed_token_ids": self.allowed_token_ids is not None,
            "bad_words": bool(self.bad_words),
            "stop": bool(self.stop),
            "prompt_logprobs": self.prompt_logprobs is not None,
            "structured_outputs": self.grammar is not None,
        }
        if name := next((name for name, is_unfit in unfit.items() if is_unfit), None):
            raise InvalidRequest(
                f"{name} does not go with beam search, which looks for the likeliest outputs as the model gives them and ends "
                "them at stop tokens only. Leave it out, or use_beam_search.",
                param=name,
            )

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
