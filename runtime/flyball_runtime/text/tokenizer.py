"""A model's tokenizer: loading it, and how many characters one of its tokens can stand for."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast


def load_tokenizer(path: Path) -> Any:
    """Return the checkpoint's tokenizer with its chat template.

    A ``tokenizer.json`` is complete by itself, so it is read without AutoTokenizer, which loads torch: hundreds of MiB
    that the API process has no use for. Older formats need AutoTokenizer to convert them.
    """
    if (path / "tokenizer.json").is_file():
        return PreTrainedTokenizerFast.from_pretrained(path)
    from transformers import AutoTokenizer  # loads torch

    return AutoTokenizer.from_pretrained(path)


_LONGEST_COMPOSITION = 4
"""Unicode composes at most so many characters into one (NFC); by its stability policy this stays so."""

_SPLITTERS = {"ByteLevel", "Digits", "Metaspace", "Split", "Punctuation", "UnicodeScripts"}
"""Pre-tokenizers that drop no character, as long as their behaviour is not ``Removed``."""


def max_chars_per_token(tokenizer: Tokenizer) -> int | None:
    """Return an upper bound of the characters of a text per token of it, or None when there is none.

    A BPE vocabulary that has every byte loses nothing: its tokens spell the text, and none spells more than the longest
    entry. What may drop or merge characters beyond that has no bound: normalizers that strip or replace, pre-tokenizers
    that remove, models that write unknown text as one token, added tokens that take the spaces around them.
    """
    shrinking = _shrinking(_state(tokenizer.normalizer))
    if shrinking is None or not _keeps_all(_state(tokenizer.pre_tokenizer)) or not _spells_all(tokenizer):
        return None
    if any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values()):
        return None
    return shrinking * max(map(len, tokenizer.get_vocab(with_added_tokens=True)))


def _state(component: Any) -> Mapping[str, Any] | None:
    """A normalizer or pre-tokenizer as tokenizer.json has it."""
    return None if component is None else json.loads(component.__getstate__())


def _shrinking(normalizer: Mapping[str, Any] | None) -> int | None:
    """Most characters of a text that the normalizer makes one of, or None for a normalizer that is not known here."""
    match normalizer:
        case None | {"type": "Prepend" | "NFD" | "ByteLevel"}:
            return 1
        case {"type": "NFC"}:
            return _LONGEST_COMPOSITION
        case {"type": "Replace", "pattern": {"String": pattern}, "content": content} if len(content) >= len(pattern):
            return 1
        case {"type": "Sequence", "normalizers": list(parts)}:
            return _product([_shrinking(part) for part in parts])
    return None


def _product(factors: list[int | None]) -> int | None:
    product = 1
    for factor in factors:
        if factor is None:
            return None
        product *= factor
    return product


def _keeps_all(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    match pre_tokenizer:
        case None:
            return True
        case {"type": "Sequence", "pretokenizers": list(parts)}:
            return all(map(_keeps_all, parts))
        case _:
            return pre_tokenizer["type"] in _SPLITTERS and pre_tokenizer.get("behavior") != "Removed"


def _spells_all(tokenizer: Tokenizer) -> bool:
    """Whether the model writes every byte of its input into some token."""
    model, vocab = tokenizer.model, tokenizer.get_vocab(with_added_tokens=False)
    if not isinstance(model, BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    has_bytes = all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    return (model.byte_fallback and has_bytes) or (
        _is_byte_level(tokenizer) and vocab.keys() >= {*ByteLevel.alphabet()}
    )


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    return '"ByteLevel"' in json.dumps([_state(tokenizer.normalizer), _state(tokenizer.pre_tokenizer)])
