"""Compiles grammars with llguidance, for one model's vocabulary."""

import json
import logging
import os
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from flyball_protocol.quoting import one_line
from flyball_runtime.core.checkpoint import Checkpoint
from flyball_runtime.core.errors import InvalidRequest
from flyball_runtime.core.grammar import WHITESPACE, Grammar
from flyball_runtime.core.memory import resident_bytes
from flyball_runtime.grammar.endings import lark_ends, schema_ends

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

logger = logging.getLogger(__name__)

MAX_REASON_CHARS = 300

MIN_BYTES = 256 * 1024
"""Of a compiled grammar: what a small one takes."""

TRIAL_STEPS = 16
"""Tokens that a new grammar is tried with."""

MAX_MASK_S = 0.25
"""CPU time that the mask of one trial token may take. The usual one takes 50 us."""

_LIMITS = LLParserLimits(step_lexer_fuel=100_000, max_lexer_states=20_000, verbose_errors=False)
"""A step's mask takes some 10 ms at most, and the states of a grammar 40 MB."""


class CompiledGrammar:
    """A grammar at its beginning; every sequence follows a copy, which takes microseconds.

    Attributes:
        num_words: int32 words of a mask, one bit for each token of the vocabulary.
        num_bytes: estimate of its memory: what the process grew by.
    """

    def __init__(self, matcher: LLMatcher, num_words: int, num_bytes: int) -> None:
        self._matcher = matcher
        self.num_words = num_words
        self.num_bytes = num_bytes

    def matcher(self) -> LLMatcher:
        return self._matcher.deep_copy()


class GrammarCompiler:
    """Compiles for the vocabulary of a checkpoint. Any thread may call it; Python's lock is free meanwhile.

    A hostile grammar can take minutes, or end the process (recursion in native code). So what clients send is tried in
    another process first (``checker.py``).
    """

    def __init__(self, tokenizer_json: Path, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        """Load the vocabulary: with 150,000 tokens that takes most of a second and some 60 MB.

        Raises:
            ValueError: llguidance cannot read the tokenizer, or that has more tokens than the model.
        """
        self._tokenizer = LLTokenizer(str(tokenizer_json), n_vocab=vocab_size, eos_token=sorted(eos_token_ids) or None)
        self._num_words = -(-self._tokenizer.vocab_size // 32)

    @classmethod
    def of_checkpoint(cls, path: Path) -> "GrammarCompiler | None":
        """Return the compiler of a checkpoint, or None, and a warning in the log, if its tokenizer is of no use here.

        Raises:
            ConfigError: config.json cannot be read.
        """
        tokenizer_json = path / "tokenizer.json"
        if not tokenizer_json.is_file():
            logger.warning("there is no structured output: %s has no tokenizer.json", path)
            return None
        config = Checkpoint.from_dir(path)
        try:
            return cls(tokenizer_json, config.vocab_size, config.eos_token_ids)
        except ValueError as error:
            reason = one_line(str(error), MAX_REASON_CHARS)
            logger.warning("there is no structured output: %s cannot be used (%s)", tokenizer_json, reason)
            return None

    def tokenize(self, text: str) -> list[int]:
        return self._tokenizer.tokenize_str(text)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Raise InvalidRequest if it is no grammar, is not supported, or nothing fits it."""
        before = resident_bytes(os.getpid())
        matcher = LLMatcher(self._tokenizer, lowered(grammar).text, limits=_LIMITS, log_level=0)
        _check(matcher)
        grown = resident_bytes(os.getpid()) - before
        return CompiledGrammar(matcher, self._num_words, max(MIN_BYTES, grown))

    def try_out(self, grammar: Grammar) -> Grammar:
        """Compile a grammar, follow it for a few tokens, and return it in the form that is quickest to compile again.

        Raises:
            InvalidRequest: like ``compile``; or its masks take too long, or everything that fits it is endless.
        """
        if grammar.kind == "json" and not schema_ends(grammar.text):
            raise _endless()
        is_lark = grammar.kind == "grammar"
        grammar = lowered(grammar)
        if is_lark and not lark_ends(grammar.text):
            raise _endless()
        matcher = self.compile(grammar).matcher()
        rng = random.Random(0)
        for _ in range(TRIAL_STEPS):
            started_s = time.thread_time()
            mask = matcher.compute_bitmask()
            if time.thread_time() - started_s > MAX_MASK_S:
                raise _refused("it is too complex to be followed token by token")
            _check(matcher)
            allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))
            if matcher.is_stopped():
                break
            matcher.consume_token(int(rng.choice(allowed)))
            _check(matcher)
        return grammar


def lowered(grammar: Grammar) -> Grammar:
    """Return the grammar in llguidance's own form. Raises InvalidRequest if it has none."""
    try:
        return Grammar("compiled", _source(grammar))
    except (ValueError, RecursionError) as error:
        raise _refused(str(error)) from None


def _source(grammar: Grammar) -> str:
    match grammar.kind:
        case "compiled":
            return grammar.text
        case "json":
            space: JsonCompileOptions = {
                "whitespace_pattern": WHITESPACE if grammar.whitespace is None else grammar.whitespace
            }
            if grammar.whitespace == "":
                space = {"whitespace_flexible": False}
            return LLMatcher.grammar_from_json_schema(grammar.text, defaults=space)
        case "choice":
            # A terminal: the parser's rows hold 2,000 alternatives, a lexer's automaton any number.
            return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(choice) for choice in json.loads(grammar.text))
    return grammar_from(grammar.kind, grammar.text)


def _check(matcher: LLMatcher) -> None:
    if not matcher.is_error():
        return
    reason = matcher.get_error()
    if reason.startswith("NoExtension"):
        raise _refused("no output can satisfy it")
    raise _refused("it is too large" if reason.startswith("panic") else reason)


def _endless() -> InvalidRequest:
    return _refused("every output that fits it goes on for ever")


def no_vocabulary() -> InvalidRequest:
    """Return the refusal of every grammar where the checkpoint has no usable tokenizer.json."""
    return InvalidRequest(
        "this checkpoint has no tokenizer.json that structured output can use; the log of this server says why. Leave "
        "structured output out, or export the tokenizer again with transformers' save_pretrained.",
        param="structured_outputs",
    )


def _refused(reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"the schema, regex, choice or grammar cannot be used: {one_line(reason, MAX_REASON_CHARS)}. Correct or simplify it.",
        param="structured_outputs",
    )
