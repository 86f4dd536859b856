"""spec.tuning.limits: which replicas get what, under which revision, and what is said of those that refuse."""

import asyncio
from typing import Any, cast

import pytest
from msgspec import structs

from flyball_operator.spec import LiveLimits, Objectives
from flyball_operator.status.tuning import Report, report
from flyball_operator.tuning import Action, PodEvidence, Reason
from flyball_operator.tuning.admin import AdminClient, Posted, Target
from flyball_operator.tuning.loop import Round, SlowLoop
from flyball_operator.tuning.modes import as_change
from flyball_operator.tuning.record import DecisionRecord, from_line, to_line
from flyball_operator.tuning.recovery import Memory
from flyball_operator.tuning.spec_limits import in_force, lacking
from flyball_protocol import Evidence, Limits, LimitsAck, LimitsChange, LimitsStatus, LimitsUpdate
from operator_kit.evidence import LIMITS, TUNING, make_evidence, pods

EIGHT = LiveLimits(max_num_seqs=8)
DISABLED = structs.replace(TUNING, mode="Disabled", objectives=Objectives(), limits=EIGHT)
FROM_EIGHT = structs.replace(TUNING, limits=EIGHT)
WITH_EIGHT = structs.replace(LIMITS, max_num_seqs=8)


class Replicas:
    """Replicas that take limits as a runtime does, or refuse them, or do not answer."""

    def __init__(self, *evidence: Evidence) -> None:
        self.evidence = {f"replica {i}": one for i, one in enumerate(evidence, 1)}
        self.refuses: set[str] = set()
        self.silent: set[str] = set()
        self.updates: list[tuple[str, LimitsUpdate]] = []

    @property
    def targets(self) -> list[Target]:
        return [Target(name, "http://127.0.0.1:1") for name in self.evidence]

    @property
    def in_force(self) -> list[tuple[int, int]]:
        return [(one.revision, one.target.max_num_seqs) for one in self.evidence.values()]

    async def gather(self, targets: list[Target]) -> list[PodEvidence]:
        return [PodEvidence(pod=name, evidence=one) for name, one in self.evidence.items()]

    async def post_all(self, updates: dict[Target, LimitsUpdate]) -> list[Posted]:
        return [self._take(target.name, update) for target, update in updates.items()]

    def _take(self, pod: str, update: LimitsUpdate) -> Posted:
        self.updates.append((pod, update))
        before = self.evidence[pod]
        if pod in self.silent:
            return Posted(pod, None, "no answer in 2.0 s")
        if pod in self.refuses:
            return Posted(pod, ack(LimitsStatus.REJECTED, before, "takes 1 to 4"))
        after = update.limits.applied_to(before.target)
        self.evidence[pod] = structs.replace(before, revision=update.revision, target=after, effective=after)
        return Posted(pod, ack(LimitsStatus.APPLIED, self.evidence[pod]))


def ack(status: LimitsStatus, one: Evidence, reason: str = "") -> LimitsAck:
    return LimitsAck(status=status, revision=one.revision, target=one.target, effective=one.effective, reason=reason)


class Scene:
    """A slow loop over such replicas, and the status that follows."""

    def __init__(self, *evidence: Evidence, **options: Any) -> None:
        self.replicas = Replicas(*evidence)
        self.records: list[object] = []
        self.loop = SlowLoop(
            "chat", cast(AdminClient, self.replicas), on_record=self.records.append, clock=lambda: 1000.0, **options
        )
        self.report: Report | None = None

    def round(self, tuning: Any = DISABLED) -> Round:
        done = asyncio.run(self.loop.round(tuning, self.replicas.targets))
        self.report = report(self.report, tuning, done, "2026-01-01T00:00:00Z")
        return done


def fresh(**changes: Any) -> Evidence:
    return make_evidence(**{"revision": 0, **changes})


def replayed(record: object) -> bool:
    """Return whether a record, written and read again, comes to the same decision."""
    found = from_line(to_line(cast(DecisionRecord, record)))
    return found.replay() == found.decision


def test_units_of_the_spec_become_those_of_the_runtime() -> None:
    limits = LiveLimits(
        max_num_seqs=8, max_num_batched_tokens=64, step_time_target_milliseconds=25, kv_cache_percent=29
    )
    assert as_change(limits) == LimitsChange(
        max_num_seqs=8, max_num_batched_tokens=64, step_time_target_ms=25.0, kv_cache_fraction=0.29
    )
    assert as_change(LiveLimits()) == LimitsChange()


@pytest.mark.parametrize("mode", ["Disabled", "Recommend"])
def test_without_auto_every_replica_gets_the_limits_for_good(mode: str) -> None:
    scene = Scene(fresh(), fresh())
    tuning = structs.replace(TUNING, mode=mode, limits=EIGHT)
    done = scene.round(tuning)
    assert (done.decision.action, done.decision.reason) == (Action.CHANGE, Reason.SPEC_LIMITS)
    assert done.decision.why == "max_num_seqs 64 -> 8: spec.tuning.limits says so"
    assert scene.replicas.in_force == [(1, 8), (1, 8)]
    assert {update.ttl_s for _, update in scene.replicas.updates} == {None}
    assert all(one.target.max_num_batched_tokens == 512 for one in scene.replicas.evidence.values()), "left as it is"
    scene.round(tuning)
    assert len(scene.replicas.updates) == 2, "nothing is posted twice"


@pytest.mark.parametrize("fault", ["", "refuses"])
def test_posts_are_recorded_and_can_be_replayed(fault: str) -> None:
    scene = Scene(fresh(), fresh())
    if fault:
        scene.replicas.refuses.add("replica 2")
    scene.round()
    scene.round()
    (record,) = (from_line(to_line(cast(DecisionRecord, one))) for one in scene.records)
    assert record.decision.reason is (Reason.LIMITS_REFUSED if fault else Reason.SPEC_LIMITS)
    assert record.replay() == record.decision and len(record.problems) == bool(fault)


@pytest.mark.parametrize(
    ("evidence", "found"),
    [
        ([make_evidence(limits=WITH_EIGHT), make_evidence(limits=WITH_EIGHT, revision=2)], (3, WITH_EIGHT)),
        ([make_evidence()], None),
        ([fresh(limits=WITH_EIGHT)], None),
        ([], None),
    ],
)
def test_limits_in_force_are_left_for_new_replicas(evidence: list[Evidence], found: tuple[int, Limits] | None) -> None:
    assert in_force(DISABLED, pods(*evidence)) == found
    assert in_force(structs.replace(DISABLED, limits=LiveLimits()), pods(*evidence)) is None


def test_without_limits_mode_disabled_posts_nothing() -> None:
    scene = Scene(make_evidence())
    done = scene.round(structs.replace(DISABLED, limits=LiveLimits()))
    assert (done.decision.action, scene.replicas.updates, scene.records) == (Action.HOLD, [], [])


def test_a_step_target_of_0_is_lifted_once() -> None:
    scene = Scene(fresh(target=structs.replace(LIMITS, step_time_target_ms=25.0)))
    tuning = structs.replace(DISABLED, limits=LiveLimits(step_time_target_milliseconds=0))
    assert scene.round(tuning).decision.why == "step_time_target_ms 25 ms -> none: spec.tuning.limits says so"
    scene.round(tuning)
    assert len(scene.replicas.updates) == 1


def test_a_replica_that_started_since_gets_the_revision_that_the_others_have() -> None:
    scene = Scene(make_evidence(limits=WITH_EIGHT), fresh())
    scene.round()
    assert [pod for pod, _ in scene.replicas.updates] == ["replica 2"]
    assert scene.replicas.in_force == [(3, 8), (3, 8)]


def test_other_limits_under_the_newest_revision_are_replaced_everywhere() -> None:
    """Otherwise replicas with the same limits would have different revisions."""
    scene = Scene(make_evidence(limits=WITH_EIGHT), make_evidence())
    scene.round()
    assert scene.replicas.in_force == [(4, 8), (4, 8)]


def test_a_changed_spec_moves_what_differs() -> None:
    scene = Scene(make_evidence(limits=WITH_EIGHT))
    scene.round(structs.replace(DISABLED, limits=LiveLimits(max_num_seqs=16, kv_cache_percent=50)))
    (one,) = scene.replicas.evidence.values()
    assert (one.revision, one.target.max_num_seqs, one.target.kv_cache_fraction) == (4, 16, 0.5)


@pytest.mark.parametrize(("fault", "words"), [("refuses", "takes 1 to 4"), ("silent", "no answer in 2.0 s")])
def test_a_replica_that_does_not_take_them_is_named(fault: str, words: str) -> None:
    scene = Scene(fresh(), fresh())
    getattr(scene.replicas, fault).add("replica 2")
    for _ in range(3):
        done = scene.round()
    assert (done.decision.action, done.decision.reason) == (Action.HOLD, Reason.LIMITS_REFUSED)
    assert f"replica 2: {words}" in done.decision.why and "replica 1" not in done.decision.why
    assert scene.replicas.in_force == [(1, 8), (0, 64)], "the others have them, under one revision"
    assert scene.report is not None and scene.report.status.state == "Frozen"
    healthy, *_ = scene.report.conditions
    assert (healthy.status, healthy.reason) == ("False", "LimitsRefused") and words in healthy.message


def test_auto_starts_from_them_once() -> None:
    tuning = structs.replace(TUNING, limits=LiveLimits(max_num_batched_tokens=128))
    scene = Scene(fresh(itl_over=4000))
    assert scene.round(tuning).decision.reason is Reason.SPEC_LIMITS
    done = scene.round(tuning)
    assert done.decision.reason is Reason.INTER_TOKEN_LATENCY_OVER, "tuning goes on from there"
    (one,) = scene.replicas.evidence.values()
    assert one.target.max_num_batched_tokens <= 128
    scene.round(tuning)
    assert one.target.max_num_batched_tokens <= 128


def test_auto_starts_from_them_in_replicas_that_are_ready_one_after_the_other() -> None:
    """What the first has, and the second not yet, is no trial to go on with."""
    tuning = structs.replace(TUNING, limits=EIGHT)
    scene = Scene(fresh(), memory=Memory())
    scene.round(tuning)
    scene.replicas.evidence["replica 2"] = fresh()
    for _ in range(3):
        done = scene.round(tuning)
        assert scene.replicas.in_force == [(done.decision.revision, 8)] * 2
        assert done.decision.state.trial is None


def test_auto_tells_of_a_replica_that_does_not_take_them() -> None:
    scene = Scene(fresh(), fresh(), memory=Memory())
    scene.replicas.refuses.add("replica 2")
    tuning = structs.replace(TUNING, limits=EIGHT)
    scene.round(tuning)
    assert scene.round(tuning).decision.reason is Reason.LIMITS_REFUSED
    scene.replicas.refuses.clear()
    assert scene.round(tuning).decision.reason is Reason.SPEC_LIMITS
    assert scene.replicas.in_force == [(1, 8), (1, 8)]


def test_auto_leaves_replicas_alone_that_were_tuned_before() -> None:
    scene = Scene(make_evidence())
    done = scene.round(structs.replace(TUNING, limits=EIGHT))
    assert done.decision.reason is not Reason.SPEC_LIMITS


def started() -> Scene:
    """Return two replicas of template t1 in mode Auto that started with 8 sequences, and have got objectives since."""
    scene = Scene(fresh(posted=None), fresh(posted=None))
    for _ in range(3):
        scene.round(FROM_EIGHT)
    assert scene.replicas.in_force == [(2, 8), (2, 8)]
    return scene


def test_auto_starts_from_them_in_replicas_of_a_new_template_too() -> None:
    """In a rollout, one by one: first they are too few to decide on, then the others are gone."""
    scene = started()
    scene.replicas.evidence["replica 3"] = fresh(template="t2")
    scene.round(FROM_EIGHT)
    assert scene.replicas.in_force == [(2, 8)] * 3, "at once"
    del scene.replicas.evidence["replica 1"]
    scene.replicas.evidence["replica 4"] = fresh(template="t2")
    scene.round(FROM_EIGHT)
    del scene.replicas.evidence["replica 2"]
    for _ in range(3):
        done = scene.round(FROM_EIGHT)
        assert {seqs for _, seqs in scene.replicas.in_force} == {8}
    assert done.decision.left_alone == () and len({revision for revision, _ in scene.replicas.in_force}) == 1
    assert all(replayed(one) for one in scene.records)


def test_auto_starts_from_them_where_every_replica_is_of_a_new_template() -> None:
    scene = started()
    scene.replicas.evidence = {f"replica {i}": fresh(template="t2") for i in (3, 4)}
    done = scene.round(FROM_EIGHT)
    assert (done.decision.reason, done.decision.revision) == (Reason.SPEC_LIMITS, 2)
    assert scene.replicas.in_force == [(2, 8), (2, 8)]
    for _ in range(3):
        done = scene.round(FROM_EIGHT)
    assert done.decision.limits is not None and done.decision.limits.max_num_seqs == 8
    assert all(replayed(one) for one in scene.records)


def test_a_new_template_that_refuses_them_does_not_keep_the_others_from_being_tuned() -> None:
    scene = started()
    scene.replicas.evidence["replica 3"] = fresh(template="t2")
    scene.replicas.refuses.add("replica 3")
    done = scene.round(FROM_EIGHT)
    assert done.decision.reason is not Reason.LIMITS_REFUSED
    assert {one.pod: one.ack is not None and one.ack.status for one in done.posted} == {
        "replica 1": LimitsStatus.APPLIED,
        "replica 2": LimitsStatus.APPLIED,
        "replica 3": LimitsStatus.REJECTED,
    }


def test_replicas_of_a_new_template_keep_the_limits_of_the_boot_prior() -> None:
    scene = started()
    prior = make_evidence(template="t2", revision=1, limits=structs.replace(LIMITS, max_num_seqs=32))
    scene.replicas.evidence["replica 3"] = prior
    scene.round(FROM_EIGHT)
    assert scene.replicas.in_force[-1] == (1, 32)


def test_nothing_else_is_posted_to_a_template_that_is_not_decided_on() -> None:
    """Not either while too few of the others answer for a decision."""
    scene = started()
    for name in ("replica 1", "replica 2"):
        scene.replicas.evidence[name] = structs.replace(scene.replicas.evidence[name], draining=True)
    scene.replicas.evidence["replica 3"] = make_evidence(template="t2", revision=1)
    done = scene.round(FROM_EIGHT)
    assert done.decision.left_alone == ("replica 3",)
    assert scene.replicas.in_force[-1] == (1, 64)


def test_a_trial_ends_with_them() -> None:
    scene = Scene(make_evidence(itl_over=4000), make_evidence(itl_over=4000))
    assert scene.round(TUNING).decision.action is Action.TRY
    assert scene.round().decision.action is Action.RESTORE
    assert scene.round().decision.reason is Reason.TUNING_OFF
    assert [seqs for _, seqs in scene.replicas.in_force] == [8, 8]


def test_the_status_has_target_and_effective_of_each_replica() -> None:
    scene = Scene(fresh(effective=structs.replace(LIMITS, max_num_seqs=64)), fresh())
    scene.round()
    scene.replicas.evidence["replica 1"] = structs.replace(scene.replicas.evidence["replica 1"], effective=LIMITS)
    scene.round()
    assert scene.report is not None
    status = scene.report.status.as_object()
    first, second = status["replicas"]
    assert (first["name"], first["revision"], first["target"]["maxNumSeqs"], first["effective"]["maxNumSeqs"]) == (
        "replica 1",
        1,
        8,
        64,
    )
    assert second["effective"]["maxNumSeqs"] == 8
    assert (status["state"], status["revision"], status["target"]["maxNumSeqs"]) == ("Disabled", 1, 8)
    assert status["decisions"][0]["reason"] == "SpecLimits"
    assert scene.report.conditions == ()


def test_a_recommendation_stands_beside_them() -> None:
    tuning = structs.replace(TUNING, mode="Recommend", limits=LiveLimits(max_num_seqs=64))
    scene = Scene(make_evidence(itl_over=4000))
    scene.round(tuning)
    assert scene.report is not None
    assert scene.report.status.recommended is not None and scene.replicas.updates == []


def test_nothing_is_asked_of_nobody() -> None:
    assert lacking(DISABLED, pods(None)) is None
    assert Scene().round().decision.reason is Reason.NO_REPLICAS
