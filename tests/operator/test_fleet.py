"""Rolling updates, step by step and to the end."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flyball_operator.local.fleet import Seen, StartReplica, StopReplica, next_actions


def old(number: int, ready: bool = True) -> Seen:
    return Seen(number, current=False, ready=ready)


def new(number: int, ready: bool = True) -> Seen:
    return Seen(number, current=True, ready=ready)


CASES: dict[str, tuple[int, list[Seen], int | None, int, list[int]]] = {
    # wanted, seen, room -> number of starts, numbers to stop
    "first start": (2, [], None, 2, []),
    "nothing to do": (2, [new(1), new(2)], None, 0, []),
    "still starting": (2, [new(1), new(2, ready=False)], None, 0, []),
    "scale up": (3, [new(1)], None, 2, []),
    "scale down ends the youngest": (1, [new(1), new(2), new(3)], None, 0, [2, 3]),
    "scale down ends those that are not ready first": (1, [new(1, ready=False), new(2)], None, 0, [1]),
    "scale to zero": (0, [new(1), old(2)], None, 0, [1, 2]),
    "update starts one more": (2, [old(1), old(2)], None, 1, []),
    "update waits for it": (2, [old(1), old(2), new(3, ready=False)], None, 0, []),
    "update ends one old for one new": (2, [old(1), old(2), new(3)], None, 1, [1]),
    "update is done": (2, [old(2), new(3), new(4)], None, 0, [2]),
    "old ones that are not ready go at once": (2, [old(1, ready=False), old(2, ready=False)], None, 2, [1, 2]),
    "update and scale down": (1, [old(1), old(2)], None, 1, [1]),
    "room for one of two": (2, [], 1, 1, []),
    "no room for a surge": (1, [old(1)], 0, 0, [1]),
    "no room, and one is already on its way out": (2, [old(2)], 0, 0, []),
    "no room, and the last new one is not ready": (2, [old(2), new(3, ready=False)], 0, 0, []),
}


@pytest.mark.parametrize(("wanted", "seen", "room", "num_starts", "stops"), CASES.values(), ids=CASES.keys())
def test_next_actions(wanted: int, seen: list[Seen], room: int | None, num_starts: int, stops: list[int]) -> None:
    actions = next_actions(wanted, seen, room=room)
    assert sum(isinstance(action, StartReplica) for action in actions) == num_starts
    assert sorted(action.number for action in actions if isinstance(action, StopReplica)) == stops


@given(st.integers(0, 5), st.integers(0, 5), st.integers(0, 2**32), st.booleans())
def test_an_update_converges_and_never_serves_with_fewer(wanted: int, before: int, seed: int, limited: bool) -> None:
    """Replicas get ready in random order; room is one more than needed, or exactly what is needed."""
    order = random.Random(seed)
    seen = [old(number) for number in range(before)]
    number, capacity = before, max(wanted, before) + (0 if limited else 1)
    for _ in range(100):
        actions = next_actions(wanted, seen, room=capacity - len(seen))
        for action in actions:
            if isinstance(action, StopReplica):
                seen = [one for one in seen if one.number != action.number]
            else:
                seen.append(new(number, ready=False))
                number += 1
        assert len(seen) <= capacity
        if not limited:
            assert sum(one.ready for one in seen) >= min(wanted, before)
        starting = [one for one in seen if not one.ready]
        if starting:
            chosen = order.choice(starting)
            seen = [new(one.number) if one is chosen else one for one in seen]
        elif not actions:
            break
    assert len(seen) == wanted
    assert all(one.current and one.ready for one in seen)
