"""One round of the slow loop with an admin client that is a list: what is posted, kept, recorded and said."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest
from msgspec import structs

from flyball_operator.tuning import Action, PodEvidence, Reason
from flyball_operator.tuning.admin import AdminClient, Posted, Target
from flyball_operator.tuning.core import LEASE_ROUNDS, MIN_LEASE_S
from flyball_operator.tuning.knobs import as_change
from flyball_operator.tuning.loop import SlowLoop
from flyball_operator.tuning.record import DecisionRecord
from flyball_operator.tuning.recovery import Memory
from flyball_protocol import Evidence, Limits, LimitsAck, LimitsChange, LimitsStatus, LimitsUpdate
from operator_kit.evidence import LIMITS, POSTED, TUNING, make_evidence

TARGETS = [Target("one", "http://127.0.0.1:1"), Target("two", "http://127.0.0.1:2")]
OVER = {"itl_over": 4000}
NOT_POSTED = OVER | {"posted": None}


class Admin:
    """Answers with the evidence that a test sets, and with an ack or a problem."""

    def __init__(self, **sees: Any) -> None:
        self.evidence: Evidence = make_evidence(**sees)
        self.silent: set[str] = set()
        self.updates: list[LimitsUpdate] = []
        self.status: LimitsStatus | None = LimitsStatus.APPLIED

    async def gather(self, targets: Sequence[Target]) -> list[PodEvidence]:
        return [
            PodEvidence(pod=target.name, evidence=None if target.name in self.silent else self.evidence)
            for target in targets
        ]

    async def post_all(self, updates: Mapping[Target, LimitsUpdate]) -> list[Posted]:
        self.updates += updates.values()
        return [self._posted(target, update) for target, update in updates.items()]

    def _posted(self, target: Target, update: LimitsUpdate) -> Posted:
        if self.status is None:
            return Posted(target.name, None, "no answer")
        ack = LimitsAck(
            status=self.status, revision=update.revision, target=LIMITS, effective=LIMITS, reason="so it is"
        )
        return Posted(target.name, ack)


def make_loop(admin: Admin, **options: Any) -> tuple[SlowLoop, list[DecisionRecord]]:
    records: list[DecisionRecord] = []
    loop = SlowLoop("chat", cast(AdminClient, admin), on_record=records.append, clock=lambda: 1000.0, **options)
    return loop, records


@pytest.mark.parametrize(("interval_s", "lease_s"), [(1, MIN_LEASE_S), (600, LEASE_ROUNDS * 600.0)])
def test_every_replica_gets_the_objectives_under_a_lease(interval_s: int, lease_s: float) -> None:
    admin = Admin(**NOT_POSTED)
    loop, records = make_loop(admin)
    tuning = structs.replace(TUNING, interval_seconds=interval_s)
    result = asyncio.run(loop.round(tuning, TARGETS))
    assert result.decision.action is Action.CHANGE
    assert [(update.revision, update.ttl_s) for update in admin.updates] == [(4, lease_s)] * 2
    assert admin.updates[0].limits.step_time_target_ms == 34
    assert admin.updates[0].objectives == POSTED
    assert [(one.pod, one.ack is not None) for one in result.posted] == [("one", True), ("two", True)]
    assert (len(records), result.told) == (1, True)
    assert (records[0].deployment, records[0].evidence) == ("chat", result.evidence)
    assert records[0].replay() == records[0].decision == result.decision
    assert loop.has_work


def test_a_move_goes_to_one_replica_first() -> None:
    admin = Admin(**OVER)
    loop, _ = make_loop(admin)
    asyncio.run(loop.round(TUNING, TARGETS))
    assert [update.revision for update in admin.updates] == [3, 4], "the second is the canary"


def test_a_recommendation_is_neither_posted_nor_remembered() -> None:
    admin = Admin(**OVER)
    loop, records = make_loop(admin)
    tuning = structs.replace(TUNING, mode="Recommend")
    first = asyncio.run(loop.round(tuning, TARGETS))
    second = asyncio.run(loop.round(tuning, TARGETS))
    assert first.decision == second.decision, "no cool-down for what was not done"
    assert (admin.updates, first.posted) == ([], ())
    assert (first.told, second.told) == (True, False)
    assert len(records) == 2, "a change is recorded each time"


def test_a_hold_is_recorded_when_it_is_news() -> None:
    loop, records = make_loop(Admin())
    results = [asyncio.run(loop.round(TUNING, TARGETS)) for _ in range(4)]
    assert [result.decision.reason for result in results] == [Reason.SETTLED, *[Reason.STEADY] * 3]
    assert [result.told for result in results] == [True, True, False, False]
    assert len(records) == 2
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", records[0].time), "UTC, whatever the zone"


def test_what_was_moved_is_taken_back_when_tuning_is_turned_off() -> None:
    admin = Admin(**OVER)
    loop, records = make_loop(admin)
    asyncio.run(loop.round(TUNING, TARGETS))
    admin.updates.clear()
    result = asyncio.run(loop.round(structs.replace(TUNING, mode="Disabled"), TARGETS))
    assert result.decision.action is Action.RESTORE
    whole = Limits(max_num_seqs=128, max_num_batched_tokens=2048, kv_cache_fraction=1.0)
    assert [(one.revision, one.limits, one.ttl_s) for one in admin.updates] == [(4, as_change(whole), None)] * 2
    assert loop.has_work, "until the replicas have it"
    admin.evidence = make_evidence(revision=4, limits=whole)
    asyncio.run(loop.round(structs.replace(TUNING, mode="Disabled"), TARGETS))
    assert not loop.has_work
    assert [record.replay() for record in records] == [record.decision for record in records]


def test_mode_recommend_has_the_objectives_counted_and_changes_no_limit() -> None:
    admin = Admin(**NOT_POSTED)
    loop, _ = make_loop(admin)
    asyncio.run(loop.round(structs.replace(TUNING, mode="Recommend"), TARGETS))
    assert [(one.revision, one.limits, one.objectives) for one in admin.updates] == [(3, LimitsChange(), POSTED)] * 2


def test_after_a_restart_nothing_is_posted_until_the_replicas_answer() -> None:
    admin = Admin(**OVER)
    targets = [*TARGETS, Target("three", "http://127.0.0.1:3")]
    loop, _ = make_loop(admin, memory=Memory(revision=7, change_age_s=100.0))
    admin.silent = {"two", "three"}
    waiting = asyncio.run(loop.round(TUNING, targets))
    assert (waiting.decision.reason, waiting.posted, admin.updates) == (Reason.PARTIAL_EVIDENCE, (), [])
    admin.evidence, admin.silent = make_evidence(revision=7, **OVER), set()
    found = asyncio.run(loop.round(TUNING, targets))
    assert (found.decision.action, found.decision.revision, len(admin.updates)) == (Action.TRY, 8, 3)
    again = asyncio.run(loop.round(TUNING, targets))
    assert (again.decision.action, again.decision.reason) == (Action.HOLD, Reason.CANARY_SILENT), (
        "it remembers the trial"
    )


@pytest.mark.parametrize(
    ("status", "level", "words"),
    [
        (None, "WARNING", "one did not take limits revision 4: no answer"),
        (LimitsStatus.STALE, "WARNING", "one refused limits revision 4 (stale, revision 4 in force): so it is"),
        (LimitsStatus.REJECTED, "WARNING", "one refused limits revision 4 (rejected, revision 4 in force): so it is"),
        (LimitsStatus.APPLIED, "DEBUG", "one has limits revision 4: applied"),
        (LimitsStatus.DEFERRED, "DEBUG", "one has limits revision 4: deferred"),
    ],
)
def test_the_log_says_what_each_replica_made_of_it(
    status: LimitsStatus | None, level: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    admin = Admin(**NOT_POSTED)
    admin.status = status
    loop, _ = make_loop(admin)
    with caplog.at_level("DEBUG", logger="flyball_operator"):
        asyncio.run(loop.round(TUNING, TARGETS))
    assert (level, words) in [(record.levelname, record.getMessage()) for record in caplog.records]


def test_a_replica_that_goes_on_refusing_is_a_warning_once(caplog: pytest.LogCaptureFixture) -> None:
    admin = Admin(**NOT_POSTED)
    loop, _ = make_loop(admin)
    with caplog.at_level("DEBUG", logger="flyball_operator"):
        for admin.status in (LimitsStatus.STALE, LimitsStatus.STALE, LimitsStatus.APPLIED, LimitsStatus.STALE):
            asyncio.run(loop.round(TUNING, TARGETS))
    levels = [one.levelname for one in caplog.records if one.getMessage().startswith("one ")]
    assert levels == ["WARNING", "DEBUG", "DEBUG", "WARNING"]
