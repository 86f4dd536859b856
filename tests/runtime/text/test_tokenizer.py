"""No text has fewer tokens than its length over the bound; where that cannot be said there is no bound."""

import copy
import sys
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from checkpoints import make_tokenizer
from flyball_runtime.text.tokenizer import max_chars_per_token

BYTE_LEVEL: Tokenizer = make_tokenizer().backend_tokenizer


def sentencepiece_like() -> Tokenizer:
    """As Llama 2 and Mistral have it: spaces become a mark, what is not in the vocabulary becomes bytes."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "aa", "▁a"]
    merges = [("a", "a"), ("▁", "a")]
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def composing() -> Tokenizer:
    """As Qwen has it."""
    tokenizer = copy.deepcopy(BYTE_LEVEL)
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(r"\s+|\w+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return tokenizer


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, composing(), sentencepiece_like()], ids=["byte", "nfc", "fallback"])
@given(text=st.text(max_size=200))
@example(text="a" * 1000)
@example(text=" " * 1000)
@example(text="\u03b1\u0313\u0300\u0345" * 100)
@example(text="<|im_start|>" * 100)
def test_no_text_has_fewer_tokens(tokenizer: Tokenizer, text: str) -> None:
    bound = max_chars_per_token(tokenizer)
    assert bound is not None
    assert len(tokenizer.encode(text, add_special_tokens=False).ids) * bound >= len(text)


def test_unicode_composes_four_characters_at_most() -> None:
    assert max(len(unicodedata.normalize("NFD", chr(code))) for code in range(sys.maxunicode + 1)) == 4


def without_bound() -> list[Tokenizer]:
    def byte_level(**parts: object) -> Tokenizer:
        tokenizer = copy.deepcopy(BYTE_LEVEL)
        for name, part in parts.items():
            setattr(tokenizer, name, part)
        return tokenizer

    takes_spaces = byte_level()
    takes_spaces.add_special_tokens([AddedToken("<|wide|>", rstrip=True)])
    removes = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), BYTE_LEVEL.pre_tokenizer])
    incomplete = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    incomplete.pre_tokenizer = BYTE_LEVEL.pre_tokenizer
    return [
        takes_spaces,
        byte_level(normalizer=normalizers.Strip()),
        byte_level(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])),
        byte_level(normalizer=normalizers.Replace(Regex("a+"), "a")),
        byte_level(normalizer=normalizers.Replace("ab", "")),
        byte_level(pre_tokenizer=removes),
        byte_level(pre_tokenizer=pre_tokenizers.Whitespace()),
        incomplete,
        Tokenizer(models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>", fuse_unk=True)),
        Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")),
        Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0)),
    ]


@pytest.mark.parametrize("number", range(len(without_bound())))
def test_tokenizers_that_may_drop_or_merge_text_have_no_bound(number: int) -> None:
    assert max_chars_per_token(without_bound()[number]) is None
