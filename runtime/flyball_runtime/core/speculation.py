"""Settings of speculative decoding, under vLLM's names."""

from typing import Any

import msgspec
from msgspec import Struct

from flyball_protocol.quoting import one_line, quoted
from flyball_runtime.core.errors import ConfigError

NGRAM, DRAFT_MODEL = "ngram", "draft_model"

DEFAULT_LOOKUP = 5
"""Tokens that have to occur earlier, if nothing is said; vLLM's default."""

MAX_SPECULATIVE_TOKENS = 64
MAX_LOOKUP = 64
MAX_BATCH_SIZE = 4096


class SpeculativeConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are drafted, of which the model then verifies several in one step.

    Attributes:
        method: ``ngram``: what followed the sequence's last tokens when they occurred before; ``draft_model``: what a smaller
            model says. None is the second with a model, else the first.
        model: the smaller model: directory of a Hugging Face checkpoint, or a Hugging Face id.
        num_speculative_tokens: most drafts of a sequence in one step.
        prompt_lookup_max: longest run of last tokens that is looked up; None takes ``prompt_lookup_min``, or 5.
        prompt_lookup_min: shortest one; None takes ``prompt_lookup_max``, or 5.
        disable_by_batch_size: nothing is drafted while more sequences run.
    """

    num_speculative_tokens: int
    method: str | None = None
    model: str | None = None
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    disable_by_batch_size: int = 32

    @classmethod
    def parse(cls, text: str) -> "SpeculativeConfig":
        """Read the flag's JSON. Raises ConfigError."""
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, UnicodeEncodeError) as error:
            raise cls._unreadable(text, error) from None

    @classmethod
    def of(cls, fields: dict[str, Any]) -> "SpeculativeConfig":
        """Return the settings that a dictionary names. Raises ConfigError."""
        try:
            return msgspec.convert(fields, cls)
        except msgspec.ValidationError as error:
            raise cls._unreadable(fields, error) from None

    @classmethod
    def _unreadable(cls, value: object, error: Exception) -> ConfigError:
        return ConfigError(
            f"--speculative-config {quoted(value)} cannot be read: {one_line(str(error))}. Write a JSON object like "
            '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}; '
            f"its fields are {', '.join(cls.__struct_fields__)}."
        )

    @property
    def longest_lookup(self) -> int:
        return self.prompt_lookup_max or self.prompt_lookup_min or DEFAULT_LOOKUP

    @property
    def shortest_lookup(self) -> int:
        return self.prompt_lookup_min or self.prompt_lookup_max or DEFAULT_LOOKUP

    def validate(self) -> None:
        """Raise ConfigError naming the first field that is out of range."""
        self._validate_method()
        ranges = (
            ("num_speculative_tokens", self.num_speculative_tokens, MAX_SPECULATIVE_TOKENS),
            ("prompt_lookup_max", self.prompt_lookup_max, MAX_LOOKUP),
            ("prompt_lookup_min", self.prompt_lookup_min, MAX_LOOKUP),
            ("disable_by_batch_size", self.disable_by_batch_size, MAX_BATCH_SIZE),
        )
        for name, value, most in ranges:
            if value is not None and not 1 <= value <= most:
                raise ConfigError(f"{name} in --speculative-config is {quoted(value)}; it must be from 1 to {most}.")
        if self.shortest_lookup > self.longest_lookup:
            raise ConfigError(
                f"prompt_lookup_min in --speculative-config is {self.shortest_lookup}, above prompt_lookup_max "
                f"{self.longest_lookup}. Lower the first or raise the second."
            )

    def _validate_method(self) -> None:
        if self.method not in (None, NGRAM, DRAFT_MODEL):
            raise ConfigError(
                f"method in --speculative-config is {quoted(self.method)}; it must be {NGRAM}, or {DRAFT_MODEL} with a model. "
                "Use one of them, or leave the flag out."
            )
        if self.method == DRAFT_MODEL and not self.model:
            raise ConfigError(
                f"method in --speculative-config is {DRAFT_MODEL}, and no model is given. Give one, or use {NGRAM}."
            )
        if self.method == NGRAM and self.model is not None:
            raise ConfigError(
                f"model in --speculative-config is {quoted(self.model)}, which the method {NGRAM} does not use. Leave one out."
            )
        if self.model is not None and (self.prompt_lookup_max or self.prompt_lookup_min):
            raise ConfigError(
                f"prompt_lookup_max and prompt_lookup_min in --speculative-config are of the method {NGRAM}; "
                "with a draft model nothing is looked up. Leave them out."
            )
