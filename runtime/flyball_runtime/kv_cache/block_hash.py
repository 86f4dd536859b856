"""Names for the content of full KV blocks."""

from array import array
from hashlib import blake2b

_ROOT = b""
"""Hash before the first block of a prompt without a salt."""

_SALT = b"cache_salt"
"""BLAKE2b's personalization for salts: no block of tokens, whatever its bytes, hashes to what a salt does."""

_TOKEN_BYTES = array("I").itemsize


def hash_prompt(token_ids: list[int], block_size: int, salt: str | None = None) -> list[bytes]:
    """The names of all full blocks of a prompt."""
    hashes: list[bytes] = []
    extend_block_hashes(hashes, token_ids, block_size, len(token_ids) // block_size, salt)
    return hashes


def extend_block_hashes(
    hashes: list[bytes], token_ids: list[int], block_size: int, num_blocks: int, salt: str | None = None
) -> None:
    """Append to ``hashes`` until it names the first ``num_blocks`` full blocks of ``token_ids``.

    A block's K and V depend on every token before it, so its hash covers the previous block's hash and its own tokens:
    equal hashes mean equal whole prefixes. The hash is cryptographic (BLAKE2b, whole) because clients choose the
    tokens: a collision would serve one client's context to another, and a fast hash lets a client construct one. It
    costs well under a microsecond per block. Tokens enter as fixed-width integers, so no two lists read the same.

    Whatever else K and V are kept apart by enters before the first block: here the request's ``cache_salt``, so that
    prompts with different salts, or with one and without, have no name in common.
    """
    done = len(hashes)
    if done >= num_blocks:
        return
    packed = array("I", token_ids[done * block_size : num_blocks * block_size]).tobytes()
    previous = hashes[-1] if hashes else _root(salt)
    stride = block_size * _TOKEN_BYTES
    for offset in range(0, len(packed), stride):
        previous = blake2b(previous + packed[offset : offset + stride]).digest()
        hashes.append(previous)


def _root(salt: str | None) -> bytes:
    return _ROOT if salt is None else blake2b(salt.encode(), person=_SALT).digest()
