import logging
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from flyball_protocol import BootPrior, Envelope, Limits, LimitsChange, LimitsStatus, LimitsUpdate, Objectives
from flyball_runtime.core.clock import FakeClock
from flyball_runtime.scheduler import LimitsLedger
from flyball_runtime.scheduler.limits import inside, lower_of, violations

ENVELOPE = Envelope(
    max_num_seqs=64,
    max_num_batched_tokens=2048,
    min_num_batched_tokens=1,
    num_kv_blocks=1000,
    min_kv_cache_fraction=0.25,
    block_size=16,
    max_model_len=4000,
)
START = Limits(max_num_seqs=64, kv_cache_fraction=1.0, max_num_batched_tokens=2048)


class FakeScheduler:
    """Obeys at once, except that ``num_running`` sequences keep running and ``used`` of the KV cache stays in use."""

    def __init__(self) -> None:
        self.envelope = ENVELOPE
        self.limits = START
        self.num_running = 0
        self.used = 0.0
        self.kv_deadline_s = math.inf

    @property
    def effective(self) -> Limits:
        return limits(
            self.limits,
            max_num_seqs=max(self.limits.max_num_seqs, self.num_running),
            kv_cache_fraction=max(self.limits.kv_cache_fraction, self.used),
            max_num_batched_tokens=max(self.limits.max_num_batched_tokens, self.num_running),
        )

    @property
    def kv_drains(self) -> bool:
        return self.used > self.limits.kv_cache_fraction

    def set_limits(self, limits: Limits, kv_deadline_s: float = math.inf) -> None:
        self.limits, self.kv_deadline_s = limits, kv_deadline_s


def limits(base: Limits = START, **changes: float) -> Limits:
    return Limits(**({name: getattr(base, name) for name in Limits.__struct_fields__} | changes))


def update(revision: int, ttl_s: float | None = None, **changes: float) -> LimitsUpdate:
    return LimitsUpdate(revision=revision, limits=LimitsChange(**changes), ttl_s=ttl_s)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(100.0)


@pytest.fixture
def scheduler() -> FakeScheduler:
    return FakeScheduler()


@pytest.fixture
def ledger(scheduler: FakeScheduler, clock: FakeClock) -> LimitsLedger:
    return LimitsLedger(scheduler, clock)


def test_at_first_the_start_up_limits_hold(ledger: LimitsLedger):
    report = ledger.report()
    assert (report.revision, report.target, report.effective, report.last_known_good) == (0, START, START, START)
    assert (report.envelope, report.lease_expires_in_s) == (ENVELOPE, None)


def test_an_update_moves_only_what_it_names(ledger: LimitsLedger, scheduler: FakeScheduler):
    ack = ledger.post(update(1, max_num_seqs=8))
    assert (ack.status, ack.revision, ack.reason) == (LimitsStatus.APPLIED, 1, "")
    assert ack.target == ack.effective == scheduler.limits == limits(max_num_seqs=8)
    assert ledger.post(update(2, kv_cache_fraction=0.5)).target == limits(max_num_seqs=8, kv_cache_fraction=0.5)


def test_a_limit_that_drains_is_deferred(ledger: LimitsLedger, scheduler: FakeScheduler):
    scheduler.num_running = 20
    ack = ledger.post(update(1, max_num_seqs=8))
    assert (ack.status, ack.target.max_num_seqs, ack.effective.max_num_seqs) == (LimitsStatus.DEFERRED, 8, 20)
    assert ack.reason == "max_num_seqs drains from 20 to 8 as running sequences end"


def test_every_limit_that_drains_is_named(ledger: LimitsLedger, scheduler: FakeScheduler):
    scheduler.num_running, scheduler.used = 20, 2 / 3
    ack = ledger.post(update(1, max_num_seqs=8, kv_cache_fraction=0.5, max_num_batched_tokens=16))
    assert (ack.status, ack.reason) == (
        LimitsStatus.DEFERRED,
        "max_num_seqs drains from 20 to 8 as running sequences end; "
        "kv_cache_fraction drains from 0.666667 to 0.5 as running sequences end; "
        "max_num_batched_tokens drains from 20 to 16 as running sequences end",
    )


def test_an_older_revision_is_stale_which_the_log_says_too(
    ledger: LimitsLedger, scheduler: FakeScheduler, caplog: pytest.LogCaptureFixture
):
    ledger.post(update(5, max_num_seqs=8))
    ack = ledger.post(update(4, max_num_seqs=9))
    assert (ack.status, ack.revision, scheduler.limits.max_num_seqs) == (LimitsStatus.STALE, 5, 8)
    assert ack.reason == "revision 4 is older than 5, in force here; post one above it."
    assert caplog.messages == [f"limits update stale: {ack.reason}"]


def test_an_equal_revision_is_idempotent(ledger: LimitsLedger):
    first = ledger.post(update(5, max_num_seqs=8))
    assert ledger.post(update(5, max_num_seqs=8)) == first


@pytest.mark.parametrize("other", [update(5, max_num_seqs=9), update(5, ttl_s=9.0, max_num_batched_tokens=512)])
def test_an_equal_revision_with_other_limits_is_rejected(ledger: LimitsLedger, other: LimitsUpdate):
    ledger.post(update(5, max_num_seqs=8))
    ack = ledger.post(other)
    assert (ack.status, ack.target) == (LimitsStatus.REJECTED, limits(max_num_seqs=8))
    assert "revision 5 is in force with other limits" in ack.reason
    assert ledger.report().lease_expires_in_s is None


@pytest.mark.parametrize("changes", [{"max_num_seqs": 8}, {}, {"max_num_seqs": 8, "kv_cache_fraction": 1.0}])
def test_an_equal_revision_that_asks_for_the_same_in_other_words_is_the_same(
    ledger: LimitsLedger, changes: dict[str, float]
):
    ledger.post(update(5, max_num_seqs=8))
    ack = ledger.post(update(5, ttl_s=30, **changes))
    assert (ack.status, ack.target) == (LimitsStatus.APPLIED, limits(max_num_seqs=8))
    assert ledger.report().lease_expires_in_s == 30.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_seqs": 65}, "max_num_seqs is 65; this runtime takes 1 to 64. Stay inside, or start with a higher"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"kv_cache_fraction": 0.2}, "kv_cache_fraction is 0.2; this runtime takes 0.25 to 1. Stay inside, or one seq"),
        ({"kv_cache_fraction": 1.5}, "kv_cache_fraction is 1.5"),
        ({"kv_cache_fraction": math.nan}, "kv_cache_fraction is nan"),
        ({"max_num_batched_tokens": 4096}, "max_num_batched_tokens is 4096; this runtime takes 1 to 2048"),
        ({"step_time_target_ms": 1e6}, "step_time_target_ms is 1000000.0; this runtime takes 0 to 600000"),
        ({"step_time_target_ms": math.nan}, "step_time_target_ms is nan"),
    ],
)
def test_limits_outside_the_envelope_are_rejected_whole(
    ledger: LimitsLedger, scheduler: FakeScheduler, changes: dict[str, float], message: str
):
    ack = ledger.post(update(1, **({"max_num_seqs": 8} | changes)))
    assert (ack.status, ack.revision, scheduler.limits) == (LimitsStatus.REJECTED, 0, START)
    assert message in ack.reason


def test_every_reason_is_given(ledger: LimitsLedger):
    reason = ledger.post(update(1, max_num_seqs=65, kv_cache_fraction=0.1, step_time_target_ms=1e6)).reason
    assert reason == (
        "max_num_seqs is 65; this runtime takes 1 to 64. Stay inside, or start with a higher --max-num-seqs. "
        "kv_cache_fraction is 0.1; this runtime takes 0.25 to 1. "
        "Stay inside, or one sequence of 4000 tokens must fit; start with a lower --max-model-len. "
        "step_time_target_ms is 1000000.0; this runtime takes 0 to 600000. Stay inside, or lift it with 0."
    )
    reason = ledger.post(update(1, max_num_batched_tokens=2049)).reason
    assert reason == (
        "max_num_batched_tokens is 2049; this runtime takes 1 to 2048. "
        "Stay inside, or start with a higher --max-num-batched-tokens, or with chunked prefill to go lower."
    )


def test_a_rejected_update_does_not_use_up_its_revision(ledger: LimitsLedger):
    ledger.post(update(1, max_num_seqs=65))
    assert ledger.post(update(1, max_num_seqs=64)).status is LimitsStatus.APPLIED


def test_a_lease_holds_until_it_runs_out_then_the_last_known_good_returns(
    ledger: LimitsLedger, scheduler: FakeScheduler, clock: FakeClock, caplog: pytest.LogCaptureFixture
):
    ledger.post(update(1, max_num_seqs=8))
    ledger.post(update(2, ttl_s=30, max_num_seqs=32))
    assert ledger.report().last_known_good == limits(max_num_seqs=8)
    clock.advance(29)
    assert (ledger.tick(), ledger.report().lease_expires_in_s, scheduler.limits.max_num_seqs) == (False, 1.0, 32)
    clock.advance(1)
    with caplog.at_level(logging.WARNING):
        assert ledger.tick() is True
    assert caplog.messages == [
        "the lease of limits revision 2 was not renewed and has run out; "
        f"target changes from {limits(max_num_seqs=32)} to {limits(max_num_seqs=8)}"
    ]
    assert scheduler.limits == limits(max_num_seqs=8)
    assert (ledger.tick(), ledger.report().revision, ledger.report().lease_expires_in_s) == (False, 2, None)


def test_the_fallback_never_raises_a_limit(ledger: LimitsLedger, scheduler: FakeScheduler, clock: FakeClock):
    ledger.post(update(1, max_num_seqs=32, kv_cache_fraction=0.5))
    ledger.post(update(2, ttl_s=30, max_num_seqs=8, kv_cache_fraction=0.75, max_num_batched_tokens=512))
    clock.advance(30)
    assert ledger.report().target == limits(max_num_seqs=8, kv_cache_fraction=0.5, max_num_batched_tokens=512)
    assert scheduler.limits == ledger.report().target


def test_the_same_revision_again_renews_the_lease(ledger: LimitsLedger, clock: FakeClock):
    ledger.post(update(1, ttl_s=30, max_num_seqs=8))
    clock.advance(20)
    ledger.post(update(1, ttl_s=30, max_num_seqs=8))
    clock.advance(20)
    assert (ledger.tick(), ledger.report().lease_expires_in_s) == (False, 10.0)


def test_a_renewal_that_comes_late_restores_what_the_revision_asked_for(
    ledger: LimitsLedger, scheduler: FakeScheduler, clock: FakeClock
):
    ledger.post(update(1, max_num_seqs=8))
    leased = update(2, ttl_s=30, max_num_seqs=32)
    before = ledger.post(leased)
    clock.advance(31)
    ledger.tick()
    assert scheduler.limits.max_num_seqs == 8
    assert ledger.post(leased) == before
    assert ledger.report().lease_expires_in_s == 30.0


def test_a_renewal_may_bring_another_lease_or_end_it(ledger: LimitsLedger, clock: FakeClock):
    ledger.post(update(1, ttl_s=30, max_num_seqs=8))
    ledger.post(update(1, ttl_s=90, max_num_seqs=8))
    assert (ledger.report().lease_expires_in_s, ledger.report().last_known_good) == (90.0, START)
    ledger.post(update(1, max_num_seqs=8))
    assert (ledger.report().lease_expires_in_s, ledger.report().last_known_good) == (None, limits(max_num_seqs=8))


def test_an_update_after_expiry_starts_from_the_fallback(ledger: LimitsLedger, clock: FakeClock):
    ledger.post(update(1, max_num_seqs=8))
    ledger.post(update(2, ttl_s=30, max_num_seqs=32))
    clock.advance(31)
    assert ledger.post(update(3, max_num_batched_tokens=512)).target == limits(
        max_num_seqs=8, max_num_batched_tokens=512
    )


def test_an_update_without_ttl_ends_the_lease_and_becomes_the_last_known_good(ledger: LimitsLedger, clock: FakeClock):
    ledger.post(update(1, ttl_s=30, max_num_seqs=8))
    ledger.post(update(2, kv_cache_fraction=0.5))
    clock.advance(100)
    report = ledger.report()
    assert report.target == report.last_known_good == limits(max_num_seqs=8, kv_cache_fraction=0.5)


def test_a_refused_update_leaves_the_lease_alone(ledger: LimitsLedger, clock: FakeClock):
    ledger.post(update(3, ttl_s=30, max_num_seqs=8))
    clock.advance(10)
    ledger.post(update(2, ttl_s=30, max_num_seqs=8))
    ledger.post(update(4, ttl_s=30, max_num_seqs=800))
    assert ledger.report().lease_expires_in_s == 20.0


def test_a_step_time_target_is_taken_kept_and_lifted(ledger: LimitsLedger):
    assert ledger.post(update(1, step_time_target_ms=20.0)).target == limits(step_time_target_ms=20.0)
    assert ledger.post(update(2, max_num_seqs=8)).target == limits(max_num_seqs=8, step_time_target_ms=20.0)
    assert ledger.post(update(3, step_time_target_ms=0.0)).target == limits(max_num_seqs=8)
    assert ledger.post(update(3, ttl_s=30, step_time_target_ms=0.0)).status is LimitsStatus.APPLIED


def test_objectives_stay_until_an_accepted_update_names_others(ledger: LimitsLedger, clock: FakeClock):
    asked = Objectives(ttft_s=1.0, itl_s=0.05)
    assert ledger.report().objectives is None
    ledger.post(LimitsUpdate(revision=2, limits=LimitsChange(), ttl_s=30, objectives=asked))
    ledger.post(LimitsUpdate(revision=1, limits=LimitsChange(), objectives=Objectives(ttft_s=9.0)))
    ledger.post(LimitsUpdate(revision=3, limits=LimitsChange(max_num_seqs=800), objectives=Objectives(ttft_s=9.0)))
    ledger.post(update(2, ttl_s=30))
    clock.advance(31)
    ledger.tick()
    assert ledger.objectives == ledger.report().objectives == asked
    ledger.post(LimitsUpdate(revision=2, limits=LimitsChange(), objectives=Objectives()))
    assert ledger.objectives == Objectives()


PRIOR = BootPrior(revision=7, limits=limits(max_num_seqs=16, max_num_batched_tokens=512))


def test_a_boot_prior_is_in_force_from_the_start(
    scheduler: FakeScheduler, clock: FakeClock, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.INFO):
        report = LimitsLedger(scheduler, clock, PRIOR).report()
    assert caplog.messages == [f"starting with the boot prior's revision 7: {PRIOR.limits}"]
    assert (report.revision, report.target, report.effective) == (7, PRIOR.limits, PRIOR.limits)
    assert report.lease_expires_in_s is None
    assert scheduler.limits == PRIOR.limits


def test_a_boot_prior_is_the_last_known_good(scheduler: FakeScheduler, clock: FakeClock):
    ledger = LimitsLedger(scheduler, clock, PRIOR)
    ledger.post(update(8, ttl_s=30, max_num_seqs=64))
    clock.advance(30)
    assert ledger.report().target == ledger.report().last_known_good == PRIOR.limits


def test_who_tends_a_replica_takes_over_its_boot_prior_under_the_same_revision(
    scheduler: FakeScheduler, clock: FakeClock
):
    ledger = LimitsLedger(scheduler, clock, PRIOR)
    assert ledger.post(update(6, max_num_seqs=64)).status is LimitsStatus.STALE
    assert ledger.post(update(7, max_num_seqs=64)).status is LimitsStatus.REJECTED
    whole = {name: getattr(PRIOR.limits, name) for name in ("max_num_seqs", "kv_cache_fraction")}
    assert ledger.post(update(7, ttl_s=90, **whole)).status is LimitsStatus.APPLIED
    assert ledger.report().lease_expires_in_s == 90.0


def test_a_boot_prior_outside_the_envelope_starts_at_the_nearest_inside(
    scheduler: FakeScheduler, clock: FakeClock, caplog: pytest.LogCaptureFixture
):
    outside = Limits(max_num_seqs=100, kv_cache_fraction=0.1, max_num_batched_tokens=512, step_time_target_ms=20.0)
    report = LimitsLedger(scheduler, clock, BootPrior(revision=7, limits=outside)).report()
    assert report.target == limits(kv_cache_fraction=0.25, max_num_batched_tokens=512, step_time_target_ms=20.0)
    assert (report.revision, report.last_known_good) == (7, report.target)
    (error,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert error == (
        "the boot prior's limits (revision 7) do not fit this runtime: "
        f"{' '.join(violations(outside, ENVELOPE))} Starting with the nearest values that fit."
    )


@given(
    max_num_seqs=st.integers(1, 10_000),
    kv_cache_fraction=st.floats(0, 1, exclude_min=True),
    max_num_batched_tokens=st.integers(1, 10_000),
    step_time_target_ms=st.none() | st.floats(0.1, 1000),
)
def test_inside_ends_inside_and_leaves_alone_what_is(**values: float):
    wanted = Limits(**values)
    found = inside(wanted, ENVELOPE)
    assert violations(found, ENVELOPE) == []
    assert (found == wanted) == (violations(wanted, ENVELOPE) == [])


@pytest.mark.parametrize(
    ("a", "b", "lower"), [(None, None, None), (20.0, None, 20.0), (None, 30.0, 30.0), (20.0, 30.0, 20.0)]
)
def test_no_step_time_target_is_the_higher_one(a: float | None, b: float | None, lower: float | None):
    assert lower_of(limits(step_time_target_ms=a), limits(step_time_target_ms=b)).step_time_target_ms == lower


def test_a_late_renewal_in_other_words_restores_what_the_revision_asked_for(
    ledger: LimitsLedger, scheduler: FakeScheduler, clock: FakeClock
):
    ledger.post(update(1, max_num_seqs=8))
    ledger.post(update(2, ttl_s=30, max_num_seqs=32))
    clock.advance(31)
    assert ledger.post(update(2, ttl_s=30)).status is LimitsStatus.APPLIED
    assert scheduler.limits.max_num_seqs == 32


def test_the_lowest_and_the_highest_limits_are_inside():
    lowest = limits(max_num_seqs=1, kv_cache_fraction=0.25, max_num_batched_tokens=1)
    for edge in (lowest, START):
        assert violations(edge, ENVELOPE) == []
        assert inside(edge, ENVELOPE) == edge


def test_what_is_below_or_above_the_envelope_ends_at_its_edge():
    envelope = structs.replace(ENVELOPE, min_num_batched_tokens=100)
    below = limits(max_num_seqs=0, kv_cache_fraction=0.1, max_num_batched_tokens=99)
    assert inside(below, envelope) == limits(max_num_seqs=1, kv_cache_fraction=0.25, max_num_batched_tokens=100)
    above = limits(max_num_seqs=65, kv_cache_fraction=1.5, max_num_batched_tokens=2049)
    assert inside(above, envelope) == START


# how long a lowered KV limit may drain


@pytest.fixture
def draining(scheduler: FakeScheduler, clock: FakeClock) -> LimitsLedger:
    """At 100 s, 0.9 of the KV cache is in use and revision 1 lowers the limit to 0.5."""
    ledger = LimitsLedger(scheduler, clock, kv_drain_timeout_s=30.0)
    scheduler.used = 0.9
    ledger.post(lowered(1))
    return ledger


def lowered(
    revision: int, fraction: float = 0.5, ttl_s: float | None = None, timeout_s: float | None = None
) -> LimitsUpdate:
    limits = LimitsChange(kv_cache_fraction=fraction)
    return LimitsUpdate(revision=revision, limits=limits, ttl_s=ttl_s, kv_drain_timeout_s=timeout_s)


def test_a_kv_limit_drains_for_as_long_as_its_update_says(draining: LimitsLedger, scheduler: FakeScheduler):
    assert scheduler.kv_deadline_s == 130.0, "the runtime's default"
    draining.post(lowered(2, timeout_s=5.0))
    assert scheduler.kv_deadline_s == 105.0
    draining.post(lowered(3))
    assert scheduler.kv_deadline_s == 130.0
    draining.post(lowered(2, timeout_s=1.0))
    assert scheduler.kv_deadline_s == 130.0, "stale"


def test_updates_during_a_drain_do_not_put_its_deadline_off(
    draining: LimitsLedger, scheduler: FakeScheduler, clock: FakeClock
):
    clock.advance(20.0)
    draining.post(lowered(2, fraction=0.4))
    assert scheduler.kv_deadline_s == 130.0
    scheduler.used = 0.3
    draining.post(lowered(3, fraction=0.35))
    clock.advance(20.0)
    draining.post(lowered(4, fraction=0.25))
    assert scheduler.kv_deadline_s == 170.0, "the first drain is over, so this one begins now"


def test_a_renewed_lease_keeps_the_deadline_and_a_lease_that_runs_out_has_one(
    draining: LimitsLedger, scheduler: FakeScheduler, clock: FakeClock
):
    draining.post(lowered(2, fraction=0.4, ttl_s=10.0, timeout_s=3.0))
    clock.advance(5.0)
    draining.post(lowered(2, fraction=0.4, ttl_s=10.0))
    assert scheduler.kv_deadline_s == 103.0
    scheduler.used = 0.0
    draining.post(LimitsUpdate(revision=3, limits=LimitsChange(max_num_seqs=60), ttl_s=10.0))
    clock.advance(10.0)
    assert draining.tick()
    assert scheduler.kv_deadline_s == 145.0
