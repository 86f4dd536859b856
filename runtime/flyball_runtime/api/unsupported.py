"""Fields that clients know and this server does not serve.

Three kinds. Values that ask for nothing are let through, so that clients which always send a field work. Hints about who
asks and how to cache cannot change an answer and are ignored. Everything else is refused by name: an answer that silently
lacks what was asked for is worse than an error.
"""

from collections.abc import Collection, Mapping
from typing import Any

from flyball_protocol.quoting import MAX_QUOTED_CHARS, one_line, quoted_list
from flyball_runtime.core.errors import InvalidRequest

IGNORED_HINTS = frozenset(
    {
        "user",
        "safety_identifier",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
    }
)

_COMMON_NOOPS: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "length_penalty": (None, 1),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "prompt_logprobs": (None,),
    "min_tokens": (None, 0),
    "use_beam_search": (None, False),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "include_stop_str_in_output": (None, False),
    "return_token_ids": (None, False),
    "return_tokens_as_token_ids": (None, False),
    "truncate_prompt_tokens": (None,),
    "echo": (None, False),
    "response_format": (None, {"type": "text"}),
}

CHAT_NOOPS: dict[str, tuple[Any, ...]] = _COMMON_NOOPS | {
    "top_logprobs": (None, 0),
    "tools": (None, []),
    "tool_choice": (None, "auto", "none"),
    "parallel_tool_calls": (None, False, True),
    "functions": (None, []),
    "function_call": (None, "auto", "none"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "moderation": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None, "medium"),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "web_search_options": (None,),
}

COMPLETION_NOOPS: dict[str, tuple[Any, ...]] = _COMMON_NOOPS | {"suffix": (None, "")}


def without_noops(
    body: Mapping[str, Any], known: Collection[str], noops: Mapping[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """The fields of ``body`` that are ``known``. Raises InvalidRequest naming every other one that asks for something."""
    others = [name for name in body if name not in known and name not in IGNORED_HINTS]
    unknown = [name for name in others if name not in noops]
    if unknown:
        raise InvalidRequest(
            f"unknown field {quoted_list(unknown)}. Check the spelling or leave it out.",
            param=one_line(unknown[0], MAX_QUOTED_CHARS),
        )
    asking = [name for name in others if not any(_same(body[name], value) for value in noops[name])]
    if asking:
        raise InvalidRequest(
            f"{quoted_list(asking)} is not supported by this server. Leave it out or send its default.", param=asking[0]
        )
    return {name: value for name, value in body.items() if name in known}


def _same(value: object, noop: object) -> bool:
    """Whether a value is this one and not another that is equal: ``logprobs`` 0 asks for the chosen token's, false for none."""
    return isinstance(value, bool) == isinstance(noop, bool) and value == noop
