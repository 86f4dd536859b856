"""Refuse what can never run, before it reaches the scheduler."""

from flyball_runtime.core.errors import EmptyPrompt, InvalidRequest, PromptTooLong, TokenOutOfVocabulary
from flyball_runtime.core.request import Request

MAX_CACHE_SALT_CHARS = 1024


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
    num_prompt_tokens, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
    if max_tokens is not None and num_prompt_tokens + max_tokens > max_model_len:
        raise PromptTooLong(num_prompt_tokens, max_tokens, max_model_len)


def validate_cache_salt(salt: str | None) -> None:
    """Raise InvalidRequest unless ``salt`` is None or a text of allowed length. The message does not repeat it."""
    if salt is not None and not 1 <= len(salt) <= MAX_CACHE_SALT_CHARS:
        raise InvalidRequest(
            f"cache_salt has {len(salt)} characters; it may have 1 to {MAX_CACHE_SALT_CHARS}. "
            "Send a random text that only its tenant knows, or leave it out.",
            param="cache_salt",
        )
