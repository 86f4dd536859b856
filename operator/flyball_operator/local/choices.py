"""How much a request asks for: the runtime computes each choice of each prompt by itself."""

from typing import Any

import msgspec

MAX_CHOICES = 256
"""What a runtime refuses beyond (its ``max_choices``)."""

MAX_LIST_BYTES = 64 * 1024
"""A longer list of prompts counts as one: taking apart a hostile one would hold up every other request."""


class _Asked(msgspec.Struct):
    """The two fields that multiply a request; whether they are valid is the runtime's to say."""

    n: Any = None
    prompt: msgspec.Raw = msgspec.Raw(b"null")


_asked = msgspec.json.Decoder(_Asked)
_prompts = msgspec.json.Decoder(list[msgspec.Raw])


def num_choices(body: bytes) -> int:
    """Return how many choices a request's body asks for: prompts times ``n``. 1 for whatever is no such request."""
    try:
        asked = _asked.decode(body)
        wanted = _num_prompts(bytes(asked.prompt)) * (asked.n if isinstance(asked.n, int) else 1)
    except (ValueError, RecursionError):  # no JSON, or not of this shape
        return 1
    return max(1, min(wanted, MAX_CHOICES))


def _num_prompts(prompt: bytes) -> int:
    """Return how many prompts there are: a list of texts or of lists has several, a text or a list of ids is one."""
    if len(prompt) > MAX_LIST_BYTES:
        return 1
    several = prompt[:1] == b"[" and prompt[1:].lstrip()[:1] in (b'"', b"[")
    return len(_prompts.decode(prompt)) if several else 1
