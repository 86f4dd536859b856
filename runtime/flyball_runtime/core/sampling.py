"""How the next token is chosen and when a sequence ends."""

import math
import random

from msgspec import Struct, structs

from flyball_protocol.quoting import quoted
from flyball_runtime.core.errors import InvalidRequest

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
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

    def validate(self, vocab_size: int) -> None:
        """Raise InvalidRequest naming the first field that is out of range."""
        _check_int("max_tokens", self.max_tokens, 1, None, optional=True)
        _check_float("temperature", self.temperature, 0.0, 2.0)
        _check_float("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_int("top_k", self.top_k, 0, MAX_INT64)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_int("seed", self.seed, -MAX_SEED - 1, MAX_SEED, optional=True)
        _check_count("stop", len(self.stop), MAX_STOP_STRINGS)
        for text in self.stop:
            if not text:
                raise InvalidRequest(
                    "stop has an empty string; every stop string needs 1 character or more.", param="stop"
                )
            _check_count("a stop string", len(text), MAX_STOP_STRING_CHARS, unit="characters", param="stop")
        _check_count("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS)
        for token_id in self.stop_token_ids:
            _check_int("stop_token_ids", token_id, 0, vocab_size - 1)


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


def _check_count(name: str, count: int, high: int, *, unit: str = "entries", param: str | None = None) -> None:
    if count > high:
        raise InvalidRequest(f"{name} has {count} {unit}; at most {high} are allowed.", param=param or name)
