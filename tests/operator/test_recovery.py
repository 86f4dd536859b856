"""recover(): what a restarted slow loop finds again."""

from collections.abc import Sequence
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from flyball_operator.cluster.tuner import remembered
from flyball_operator.observed import Key, Resource
from flyball_operator.status.tuning import MadeDecision, ShownMove, TuningStatus
from flyball_operator.tuning import Knob, TunerState
from flyball_operator.tuning.recovery import Memory, recover
from flyball_operator.tuning.state import Direction
from flyball_protocol import BootPrior, Limits
from operator_kit.evidence import LIMITS, make_evidence, pods

NOW_S = 1000.0
RAISED = structs.replace(LIMITS, max_num_seqs=80)
OTHER = structs.replace(LIMITS, max_num_seqs=20)
Fleet = Sequence[tuple[int, Limits] | None]


def recovered(fleet: Fleet, memory: Memory | None = None) -> TunerState | None:
    evidence = [None if one is None else make_evidence(revision=one[0], limits=one[1]) for one in fleet]
    return recover(memory or Memory(), pods(*evidence), now_s=NOW_S)


@pytest.mark.parametrize("fleet", [(), (None, None), ((3, LIMITS), None, None)], ids=["none", "silent", "too few"])
def test_too_few_answers_are_waited_for(fleet: Fleet) -> None:
    assert recovered(fleet) is None


IN_FORCE = {
    "nothing was ever set": (((0, LIMITS), (0, LIMITS)), Memory(), (0, None)),
    "all agree": (((3, LIMITS), (3, LIMITS)), Memory(revision=3), (3, LIMITS)),
    "one has missed a change": (((3, RAISED), (2, LIMITS)), Memory(revision=3), (3, RAISED)),
    "most have missed a change": (((3, RAISED), (0, LIMITS), (0, LIMITS)), Memory(revision=3), (3, RAISED)),
    "all restarted with the boot prior": (
        ((7, RAISED), (7, RAISED)),
        Memory(revision=8, trying=True, prior=BootPrior(revision=7, limits=RAISED)),
        (8, RAISED),
    ),
    "all restarted without it": (
        ((0, LIMITS), (0, LIMITS)),
        Memory(revision=7, prior=BootPrior(revision=7, limits=RAISED)),
        (7, RAISED),
    ),
    "nothing but a revision is left": (((0, LIMITS),), Memory(revision=7), (7, LIMITS)),
    "a replica that has the prior's revision knows best": (
        ((7, LIMITS),),
        Memory(revision=7, prior=BootPrior(revision=7, limits=RAISED)),
        (7, LIMITS),
    ),
    "the same limits under two revisions": (((4, LIMITS), (3, LIMITS)), Memory(revision=3), (4, LIMITS)),
}


@pytest.mark.parametrize("name", IN_FORCE)
def test_what_is_in_force(name: str) -> None:
    fleet, memory, expected = IN_FORCE[name]
    state = recovered(fleet, memory)
    assert state is not None
    assert ((state.revision, state.limits), state.trial) == (expected, None)


TRIALS = {
    "the status says so": (((3, LIMITS), (4, RAISED), (3, LIMITS)), Memory(revision=4, trying=True), "replica 2"),
    "the status was not written any more": (((3, LIMITS), (4, RAISED)), Memory(revision=3), "replica 2"),
    "of the very first change": (((1, RAISED), (0, LIMITS)), Memory(), "replica 1"),
    "with one that never got on": (
        ((4, RAISED), (3, LIMITS), (1, OTHER), (3, LIMITS)),
        Memory(revision=4, trying=True),
        "replica 1",
    ),
}


@pytest.mark.parametrize("name", TRIALS)
def test_a_trial_goes_on(name: str) -> None:
    fleet, memory, canary = TRIALS[name]
    state = recovered(fleet, memory)
    assert state is not None and state.trial is not None
    trial = state.trial
    assert (trial.canary, trial.limits, trial.before) == (canary, RAISED, LIMITS)
    assert trial.before_revision < trial.revision
    assert (state.revision, state.limits) == (trial.before_revision, LIMITS)
    assert (trial.move.knob, trial.move.direction) == (Knob.MAX_NUM_SEQS, Direction.RAISE)
    assert (trial.started_s, trial.taken_s) == (NOW_S, None)  # a whole window again


def test_of_limits_that_as_many_have_the_newest_are_what_was_before() -> None:
    state = recovered([(1, OTHER), (4, RAISED), (3, LIMITS)], Memory(revision=3))
    assert state is not None and state.trial is not None
    assert (state.trial.before, state.trial.before_revision) == (LIMITS, 3)


def test_a_trial_of_a_cut_is_one_and_its_move_is_whole() -> None:
    state = recovered([(3, LIMITS), (4, OTHER)], Memory(revision=3))
    assert state is not None and state.trial is not None
    move = state.trial.move
    assert (move.direction, move.before, move.after, move.at_s) == (Direction.CUT, 64, 20, NOW_S)


def test_a_revision_that_the_prior_explains_is_no_trial() -> None:
    memory = Memory(revision=3, prior=BootPrior(revision=4, limits=RAISED))
    state = recovered([(3, LIMITS), (4, RAISED)], memory)
    assert state is not None
    assert (state.trial, state.revision, state.limits) == (None, 4, RAISED)


def test_half_of_the_replicas_are_enough() -> None:
    state = recovered([(3, LIMITS), None])
    assert state is not None and state.limits == LIMITS


def test_the_last_change_is_stood_in_for_by_one_that_turns_nothing_round() -> None:
    state = recovered([(3, LIMITS)], Memory(revision=3, change_age_s=20.0))
    assert state is not None and state.last_move is not None
    move = state.last_move
    assert (move.knob, move.direction) == (Knob.MAX_NUM_SEQS, Direction.CLAMP)
    assert (move.before, move.after) == (64, 64)


def test_the_cool_down_of_the_last_change_goes_on() -> None:
    state = recovered([(3, LIMITS)], Memory(revision=3, change_age_s=20.0))
    assert state is not None
    assert state.cooldown_left_s(Knob.MAX_NUM_SEQS, Direction.RAISE, now_s=NOW_S, cooldown_s=60) == 40
    assert (state.last_move is not None) and state.last_move.at_s == NOW_S - 20


def test_the_cool_down_of_the_kv_share_goes_on() -> None:
    """It is longer than that of other limits: whether a cut gave enough memory back is known late."""
    whole, cut = (structs.replace(LIMITS, kv_cache_fraction=share) for share in (1.0, 0.8))
    made = MadeDecision(
        time="2026-11-23T03:00:00Z",
        action="change",
        reason="MemoryPressure",
        message="",
        moves=(
            ShownMove(limit="kvCachePercent", before=100, after=80),
            ShownMove(limit="maxNumSeqs", before=8, after=6),
        ),
    )
    status = TuningStatus(state="Adjusting", revision=4, decisions=(made,))
    resource = Resource(
        key=Key("default", "demo"),
        uid="1",
        generation=1,
        resource_version="1",
        spec={},
        status={"tuning": status.as_object()},
        deleting=False,
    )
    memory = remembered(resource, None, datetime(2026, 11, 23, 3, 0, 45, tzinfo=UTC))
    state = recovered([(4, cut), (4, cut)], memory)
    assert state is not None
    (move,) = (one for one in state.moves if one.knob is Knob.KV_CACHE_FRACTION)
    assert (move.direction, move.before, move.after, move.at_s) == (Direction.CUT, 1.0, 0.8, NOW_S - 45)
    assert state.last_move is not None and state.last_move.direction is Direction.CLAMP
    trying = recovered([(4, cut), (5, whole)], memory)
    assert trying is not None and trying.trial is not None and trying.moves == (move,)


FLEETS = st.lists(st.none() | st.tuples(st.integers(0, 9), st.sampled_from([LIMITS, RAISED, OTHER])), max_size=5)
PRIORS = st.none() | st.builds(BootPrior, revision=st.integers(1, 9), limits=st.just(OTHER))


@given(fleet=FLEETS, memory=st.builds(Memory, revision=st.integers(0, 9), trying=st.booleans(), prior=PRIORS))
def test_revisions_never_go_back(fleet: Fleet, memory: Memory) -> None:
    state = recovered(fleet, memory)
    if state is not None:
        known = [one[0] for one in fleet if one is not None]
        newest = state.trial.revision if state.trial else state.revision
        assert newest >= max([memory.revision * (state.trial is None), *known])
        assert state.limits is not None or newest == 0
