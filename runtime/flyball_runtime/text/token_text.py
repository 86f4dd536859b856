"""What each token of a vocabulary stands for, by itself."""

import re

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


class TokenText:
    """The bytes of single tokens; a character may span several of them.

    Unlike decoding a token alone, it keeps a leading space and the bytes of half a character. Special tokens stand for
    their names, and ids that the tokenizer does not know for nothing.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = frozenset(tokenizer.get_added_tokens_decoder())
        decoder = "" if tokenizer.decoder is None else tokenizer.decoder.__getstate__().decode()
        self._byte_of = _byte_level_alphabet() if '"ByteLevel"' in decoder else None
        self._has_byte_tokens = '"ByteFallback"' in decoder
        self._marks_spaces = "▁" in decoder or "\\u2581" in decoder
        self._known: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        if (known := self._known.get(token_id)) is None:
            known = self._known[token_id] = self._spell(token_id)
        return known

    def text_of(self, token_id: int) -> str:
        """The bytes as text; what is no UTF-8 alone is U+FFFD."""
        return self.bytes_of(token_id).decode(errors="replace")

    def _spell(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if token_id not in self._added:
            if self._byte_of is not None and all(char in self._byte_of for char in token):
                return bytes(self._byte_of[char] for char in token)
            if self._has_byte_tokens and (byte := _BYTE_TOKEN.fullmatch(token)):
                return bytes([int(byte[1], 16)])
            if self._marks_spaces:
                token = token.replace("▁", " ")
        return token.encode()


def _byte_level_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for: printable ones for themselves, others moved up."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
    if alphabet.keys() != set(ByteLevel.alphabet()):
        raise RuntimeError("this version of tokenizers has another byte-level alphabet; update Flyball.")
    return alphabet
