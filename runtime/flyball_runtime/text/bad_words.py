"""From texts that an output shall not have to the token sequences that would write them."""

from collections.abc import Iterable

from msgspec import structs
from tokenizers import Tokenizer

from flyball_protocol.quoting import quoted
from flyball_runtime.core.errors import InvalidRequest
from flyball_runtime.core.sampling_params import SamplingParams


def with_bad_words(sampling: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """The same checked settings with ``bad_words_token_ids``: each word at the start of a text, and behind a space.

    The second is left out where it has another number of tokens, or begins alike: then it is no single way to write the
    word (vLLM's rule).

    Raises:
        InvalidRequest: a word has no tokens.
    """
    if not sampling.bad_words:
        return sampling
    words = tuple(ids for word in sampling.bad_words for ids in _spellings(word, tokenizer))
    return structs.replace(sampling, bad_words_token_ids=words)


def _spellings(word: str, tokenizer: Tokenizer) -> Iterable[tuple[int, ...]]:
    first, spaced = (
        tuple(tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False).ids) for prefix in ("", " ")
    )
    if not first:
        raise InvalidRequest(f"bad_words has {quoted(word)}, which has no tokens. Leave it out.", param="bad_words")
    yield first
    if len(spaced) == len(first) and spaced[0] != first[0]:
        yield spaced
