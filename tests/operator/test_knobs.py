"""How far one decision moves a limit, at each edge; what cool-downs remember."""

import pytest
from msgspec import structs

from flyball_operator.spec import Bounds, Range
from flyball_operator.tuning.knobs import Knob, Span, as_change, changed, cut, raised, spans
from flyball_operator.tuning.state import MAX_COOLDOWN_S, MAX_MOVES, Direction, Move, TunerState
from operator_kit.evidence import ENVELOPE, LIMITS

SEQS, TOKENS, KV = Knob.MAX_NUM_SEQS, Knob.MAX_NUM_BATCHED_TOKENS, Knob.KV_CACHE_FRACTION


@pytest.mark.parametrize(
    ("knob", "value", "high", "max_step", "expected"),
    [
        (SEQS, 64, 128, 0.25, 80),
        (SEQS, 64, 70, 0.25, None),  # 6 more are less than a tenth
        (SEQS, 60, 66, 0.25, 66),  # exactly a tenth is worth it
        (SEQS, 100, 104, 0.03, 103),  # a step below the dead band is asked for, so 4 more are worth it
        (SEQS, 2, 128, 0.25, 3),  # at least one
        (SEQS, 1, 1, 0.25, None),
        (SEQS, 0, 0, 0.25, None),  # a span without width: nothing to divide, nothing to raise
        (KV, 0.5, 1.0, 0.25, 0.62),  # rounded down to a whole percent
        (KV, 0.03, 1.0, 0.25, 0.04),
        (KV, 0.95, 1.0, 0.25, None),
    ],
)
def test_raised(knob: Knob, value: float, high: float, max_step: float, expected: float | None) -> None:
    found = raised(knob, value, Span(0, high), max_step)
    assert found == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(
    ("knob", "value", "low", "expected"),
    [
        (SEQS, 64, 1, 44),
        (SEQS, 10, 8, 8),
        (SEQS, 10, 9, 9),  # exactly a tenth is worth it
        (SEQS, 100, 91, None),
        (SEQS, 1, 1, None),
        (SEQS, 0, 0, None),
        (TOKENS, 512, 16, 358),
        (KV, 1.0, 0.1, 0.7),  # and not 0.69, which binary floating point would make of it
        (KV, 0.8, 0.1, 0.56),
    ],
)
def test_cut(knob: Knob, value: float, low: float, expected: float | None) -> None:
    found = cut(knob, value, Span(low, 2000))
    assert found == (None if expected is None else pytest.approx(expected))


def test_a_changed_limit_has_its_type_and_no_noise() -> None:
    found = changed(LIMITS, {SEQS: 44.0, KV: 0.7 * 0.8 + 1e-12})
    assert (found.max_num_seqs, type(found.max_num_seqs), found.kv_cache_fraction) == (44, int, 0.56)
    assert changed(LIMITS, {KV: 0.123456}).kv_cache_fraction == 0.1235


def test_a_change_for_a_replica_names_every_limit() -> None:
    limits = structs.replace(LIMITS, step_time_target_ms=25.0)
    change = as_change(limits)
    assert {name: getattr(change, name) for name in change.__struct_fields__} == structs.asdict(limits)


@pytest.mark.parametrize(
    ("bounds", "limits", "expected"),
    [
        ({}, {}, {SEQS: (1, 128), TOKENS: (64, 2048), KV: (0.1, 1.0)}),
        ({}, {"max_num_batched_tokens": 100}, {SEQS: (1, 100)}),  # sequences are not raised above the token budget
        ({}, {"max_num_batched_tokens": 32}, {SEQS: (1, 64)}),  # and not cut for being above it
        ({}, {"max_num_seqs": 4}, {TOKENS: (16, 2048)}),
        ({"max_num_seqs": Range(min=8, max=32)}, {}, {SEQS: (8, 32), TOKENS: (32, 2048)}),
        ({"max_num_batched_tokens": Range(min=100, max=600)}, {}, {TOKENS: (100, 600)}),
        ({"kv_cache_percent": Range(min=20, max=50)}, {}, {KV: (0.2, 0.5)}),
        # the envelope holds where bounds contradict it
        ({"max_num_seqs": Range(min=300)}, {}, {SEQS: (128, 128)}),
        ({"max_num_batched_tokens": Range(max=4)}, {}, {TOKENS: (16, 16)}),
        ({"kv_cache_percent": Range(min=1, max=5)}, {}, {KV: (0.1, 0.1)}),
    ],
)
def test_where_a_limit_may_be(
    bounds: dict[str, Range], limits: dict[str, int], expected: dict[Knob, tuple[float, float]]
) -> None:
    found = spans(Bounds(**bounds), ENVELOPE, structs.replace(LIMITS, **limits))
    assert {knob: (found[knob].low, found[knob].high) for knob in expected} == expected


def test_the_least_share_of_the_kv_cache_is_a_whole_percent() -> None:
    envelope = structs.replace(ENVELOPE, min_kv_cache_fraction=0.123)
    assert spans(Bounds(), envelope, LIMITS)[KV] == Span(0.13, 1.0)


@pytest.mark.parametrize(
    ("direction", "opposite"),
    [(Direction.RAISE, Direction.CUT), (Direction.CUT, Direction.RAISE), (Direction.CLAMP, Direction.CLAMP)],
)
def test_what_takes_a_move_back(direction: Direction, opposite: Direction) -> None:
    undone = Move(knob=SEQS, direction=direction, before=1, after=2, at_s=3.0).undone(4.0)
    assert undone == Move(knob=SEQS, direction=opposite, before=2, after=1, at_s=4.0)


def move(knob: Knob, direction: Direction, at_s: float) -> Move:
    return Move(knob=knob, direction=direction, before=1, after=2, at_s=at_s)


def state(*moves: Move) -> TunerState:
    return TunerState(moves=moves)


def left_s(past: TunerState, knob: Knob, direction: Direction, now_s: float = 1000.0) -> float:
    return past.cooldown_left_s(knob, direction, now_s=now_s, cooldown_s=60.0)


def test_a_cut_waits_a_quarter_and_a_raise_or_a_turn_all_of_it() -> None:
    past = state(move(SEQS, Direction.RAISE, 990.0))
    assert left_s(past, TOKENS, Direction.CUT) == 15 - 10
    assert left_s(past, TOKENS, Direction.RAISE) == 60 - 10
    assert left_s(past, SEQS, Direction.RAISE) == 60 - 10
    assert left_s(past, SEQS, Direction.CUT) == 60 - 10
    assert left_s(state(), SEQS, Direction.RAISE) == 0


def test_each_turn_lately_doubles_the_cool_down() -> None:
    turns = [move(SEQS, direction, 400.0 + 50 * i) for i, direction in enumerate([Direction.RAISE, Direction.CUT] * 3)]
    for num_moves, factor in ((1, 1), (2, 2), (3, 4), (4, 8), (6, 30)):
        expected = min(60.0 * factor, MAX_COOLDOWN_S)
        assert state(*turns[:num_moves]).stretched(60.0, now_s=700.0) == expected, num_moves
    two = state(*turns[:2])
    assert two.stretched(60.0, now_s=450.0 + 600) == 120.0, "as old as counts"
    assert two.stretched(60.0, now_s=450.0 + 601) == 60.0


def test_what_was_done_is_added_and_the_oldest_forgotten() -> None:
    past = state(*(move(SEQS, Direction.RAISE, float(i)) for i in range(MAX_MOVES)))
    after = past.after([move(TOKENS, Direction.CUT, 99.0)], LIMITS, 7)
    assert (after.revision, after.limits, len(after.moves), after.trial) == (7, LIMITS, MAX_MOVES, None)
    assert (after.moves[0].at_s, after.moves[-1].at_s) == (1.0, 99.0)
