"""Where an observed object differs from what is wanted of it. Pure.

The API server fills in defaults, so an observed object always has more than was applied: wanted has to be a part of observed.
"""

from collections.abc import Iterator
from typing import Any

from flyball_operator.spec import number_of

QUANTITIES = frozenset({"limits", "requests", "sizeLimit", "averageValue"})
"""Fields that hold quantities, themselves or in a map: the API server spells 1024Mi as 1Gi."""

TRUE_WHEN_ABSENT = frozenset({"automountServiceAccountToken", "allowPrivilegeEscalation"})
"""Fields without a default of their own that allow something unless they are False."""


def differences(wanted: Any, observed: Any, path: str = "", *, is_quantity: bool = False) -> Iterator[str]:
    """Yield one line for each place where ``observed`` lacks ``wanted``: ``spec.replicas is 5, wanted 3``.

    Maps may have more keys than wanted, lists may not have more items. Empty, zero and absent are the same, because
    the API server drops what is empty, but for ``TRUE_WHEN_ABSENT``.
    """
    if not wanted and not observed:
        return
    if isinstance(wanted, dict) and isinstance(observed, dict):
        for key, value in wanted.items():
            below = is_quantity or key in QUANTITIES
            seen = observed.get(key, True if key in TRUE_WHEN_ABSENT else None)
            yield from differences(value, seen, f"{path}.{key}".lstrip("."), is_quantity=below)
    elif isinstance(wanted, list) and isinstance(observed, list):
        yield from _list_differences(wanted, observed, path, is_quantity)
    elif wanted != observed and not (is_quantity and _same_quantity(wanted, observed)):
        yield f"{path} is {_short(observed)}, wanted {_short(wanted)}"


def _list_differences(wanted: list[Any], observed: list[Any], path: str, is_quantity: bool) -> Iterator[str]:
    if len(wanted) != len(observed):
        yield f"{path} has {len(observed)} items, wanted {len(wanted)}"
    # Also then: what somebody added may stay, and must not hide what changes beside it.
    for index, (one, other) in enumerate(zip(wanted, observed, strict=False)):
        yield from differences(one, other, f"{path}[{index}]", is_quantity=is_quantity)


def _same_quantity(one: Any, other: Any) -> bool:
    try:
        return number_of(one) == number_of(other)
    except ValueError:
        return False


def _short(value: Any) -> str:
    text = "absent" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
