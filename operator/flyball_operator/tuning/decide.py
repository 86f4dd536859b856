"""decide(): from evidence to one move, or none. Pure, so any recorded decision can be replayed.

The order of the rules is the order of urgency; the first that applies is the decision. The plan (``plan.py``) says how far a
limit moves, and why the head of the queue waits (``blocked_by``) says which one. Every move is a trial (``trial.py``), apart
from what the spec says and the share of the KV pool.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from flyball_operator.spec import Tuning
from flyball_operator.tuning import kv_share
from flyball_operator.tuning.decision import Action, Decision, Reason
from flyball_operator.tuning.evidence import PodEvidence
from flyball_operator.tuning.knobs import CUT_FACTOR, DEAD_BAND, Knob, rounded, same, towards
from flyball_operator.tuning.modes import restore
from flyball_operator.tuning.plan import Plan, decode_step_s, least_target_s, most_decodes_alone
from flyball_operator.tuning.signals import Signal, Standing
from flyball_operator.tuning.situation import Situation, look
from flyball_operator.tuning.state import Direction, Forecast, TunerState
from flyball_operator.tuning.trial import forecast_of, judge, try_first
from flyball_operator.tuning.words import duration, short

START_SHARE = 0.85
"""Of the inter-token objective: the step-time target before there is a plan."""

STEP_DEAD_BAND = 0.04
"""Of a step-time target that is too long, or that an objective is missed for; latency follows it closely."""

TRIM_LOW, TRIM_HIGH = 0.7, 1.2
TRIM_RAISE = 1.1
"""With room to spare, a trim below 1 is raised by this factor at a time: what was observed then need not be so now."""

RECOMPUTED_SHARE = 0.01
"""More computed tokens than this share thrown away by preemption: the KV cache holds too many sequences."""

OVERLOAD = 1.1

AT_ONCE = frozenset(
    {
        Reason.OUT_OF_BOUNDS,
        Reason.OUT_OF_STEP,
        Reason.OBJECTIVES_SET,
        Reason.STEP_TARGET_PLANNED,
        Reason.STEP_TARGET_TOO_SHORT,
        Reason.ROOM_TO_SPARE,
        Reason.MEMORY_PRESSURE,
        Reason.KV_BLOCKED,
        Reason.KV_UNUSED,
    }
)
"""Changes that go to every replica at once: what the spec says, limits that were in force before, and KV memory.

The plan's first step-time target is what the spec's objective comes to. A raise while the objectives are met has nothing to
gain against them; if it does harm, it is taken back (WORSE_THAN_BEFORE).
"""


def decide(tuning: Tuning, state: TunerState, evidence: Sequence[PodEvidence], *, now_s: float) -> Decision:
    """Decide on the limits of one deployment.

    Args:
        tuning: objectives, bounds and pace.
        state: from the last decision that was carried out.
        evidence: one entry for each replica that is expected to serve, whether it answered or not.
        now_s: seconds on any clock that only goes forward.
    """
    if tuning.mode == "Disabled" or (tuning.mode == "Recommend" and state.tuned):
        return restore(tuning, state, evidence)
    now = look(tuning, state, evidence, now_s)
    if isinstance(now, Decision):
        return now
    decision = _decided(now)
    since_s = (now.state.roomy_since_s or now.now_s) if kv_share.is_roomy(now) else None
    noted = structs.replace(decision.state, roomy_since_s=since_s)
    return structs.replace(decision, state=noted, left_alone=now.strangers)


def _decided(now: Situation) -> Decision:
    if now.state.trial is not None:
        return judge(now, now.state.trial)
    decision = next((one for rule in _RULES if (one := rule(now)) is not None), None)
    if decision is None:
        return now.hold(Reason.STEADY, f"nothing to do: {_objectives(now)}")
    if decision.action is not Action.CHANGE or decision.reason in AT_ONCE or now.tuning.mode != "Auto":
        return decision
    return try_first(now, decision)


def _impossible_spec(now: Situation) -> Decision | None:
    if now.contradictions:
        return now.hold(
            Reason.OUT_OF_BOUNDS, f"{'; '.join(now.contradictions)}. Correct the bounds or restart with other limits"
        )
    if any(one is not None and not one > 0 for one in (now.objectives.ttft_s, now.objectives.itl_s)):
        return now.hold(Reason.SLO_INFEASIBLE, now.infeasible)
    return None


def _into_bounds(now: Situation) -> Decision | None:
    values = {knob: (knob.of(now.limits), span) for knob, span in now.spans.items()}
    values.pop(Knob.STEP_TIME)
    outside = {knob: span.clamp(value) for knob, (value, span) in values.items() if span.clamp(value) != value}
    if not outside:
        return None
    return now.change(Reason.OUT_OF_BOUNDS, "the spec's bounds and the envelope say so", outside, Direction.CLAMP)


def _set_objectives(now: Situation) -> Decision | None:
    """Post the objectives, so that they are counted exactly, with the step-time target that they ask for."""
    if now.state.objectives == now.objectives:
        return None
    itl_s, target_ms = now.objectives.itl_s, _first_target_ms(now)
    values = {} if target_ms == Knob.STEP_TIME.of(now.limits) else {Knob.STEP_TIME: target_ms}
    guessed = now.plan is None and itl_s is not None and not _is_tuned(now)
    state = structs.replace(
        now.remembered, objectives=now.objectives, trim=1.0, bans=(), fallback=None, guessed=guessed
    )
    why = "latency is counted against the objectives from now on"
    if itl_s is not None and not _is_tuned(now):
        why += f". {_why_aimed_at(target_ms / 1000, itl_s, now.plan)}"
    return now.change(Reason.OBJECTIVES_SET, why, values, Direction.CLAMP, state=state)


def _first_target_ms(now: Situation) -> float:
    """Return the step-time target to start with: the one in force, where it may well come from earlier tuning."""
    itl_s, span, target_ms = now.objectives.itl_s, now.spans[Knob.STEP_TIME], Knob.STEP_TIME.of(now.limits)
    if itl_s is None:
        return math.inf
    if _is_tuned(now):
        return span.clamp(target_ms)
    aim_s = _start_s(now, itl_s) if now.plan is None else now.plan.aim_s / now.state.trim
    return span.clamp(round(1000 * aim_s, 2))


def _is_tuned(now: Situation) -> bool:
    """Return whether the step-time target in force may well come from earlier tuning."""
    return now.state.objectives is None and _is_paced(now)


def _start_s(now: Situation, itl_s: float) -> float:
    """Return the step-time target before there is a plan, with room for a few sequences by what little is known."""
    known = [one.step_model for one in now.usable.values() if one.step_model is not None]
    few_s = [] if now.lengths is None else [least_target_s(one, now.lengths, itl_s) for one in known]
    return min(itl_s, max([START_SHARE * itl_s, *few_s]))


def _set_planned_target(now: Situation) -> Decision | None:
    """Replace a first step-time target that was a guess, as soon as there is a plan."""
    plan, itl_s = now.plan, now.objectives.itl_s
    if not now.state.guessed or plan is None or itl_s is None:
        return None
    state = structs.replace(now.remembered, guessed=False)
    aim_ms = rounded(Knob.STEP_TIME, now.spans[Knob.STEP_TIME].clamp(1000 * plan.aim_s))
    longer_ms = aim_ms - Knob.STEP_TIME.of(now.limits)
    if -STEP_DEAD_BAND * aim_ms < longer_ms < DEAD_BAND * aim_ms:
        return None
    why = f"the step model has settled. {_why_aimed_at(aim_ms / 1000, itl_s, plan)}"
    return now.change(Reason.STEP_TARGET_PLANNED, why, {Knob.STEP_TIME: aim_ms}, Direction.CLAMP, state=state)


def _why_aimed_at(aim_s: float, itl_s: float, plan: Plan | None) -> str:
    """Return a sentence on a step-time target for an inter-token objective."""
    aim = f"Steps aim at {aim_s / itl_s:.0%} of {duration(itl_s)}"
    if plan is None:
        return f"{aim} until the step model has settled"
    if plan.step_s > itl_s:
        return f"No limits can keep {duration(itl_s)}, so steps are as short as costs little throughput"
    if plan.aim_s < plan.step_s:
        return f"{aim}: with longer ones, the KV pool is full before"
    return f"{aim}, because some take longer than predicted"


def _into_step(now: Situation) -> Decision | None:
    at_revision = {pod: one for pod, one in now.usable.items() if one.revision == now.revision}
    out = [pod for pod, one in at_revision.items() if not same(one.target, now.state.own(pod, now.limits))]
    if not out:
        return None
    why = f"{', '.join(sorted(out))} at revision {now.revision} without its limits (a lease ran out?), so they are set again"
    return now.change(Reason.OUT_OF_STEP, why, {}, Direction.CLAMP)


def _wait_for_agreement(now: Situation) -> Decision | None:
    """Hold while some replicas serve under older limits: their evidence says nothing about the ones in force."""
    if not now.behind:
        return None
    why = f"replicas disagree: {', '.join(now.behind)} behind revision {now.revision}, which is in force"
    return now.hold(Reason.DISAGREEMENT, why)


def _step_target_too_short(now: Situation) -> Decision | None:
    """Lift a step-time target under which hardly any sequence can run: it costs throughput, and steps miss it all the same.

    Requests show it: they wait for the target, or an objective is missed. The step model alone does not: beside a busy
    neighbour it is of longer steps for a while.
    """
    plan, target_ms = now.plan, Knob.STEP_TIME.of(now.limits)
    is_missed = Standing.OVER in now.standings
    dead_band = STEP_DEAD_BAND if is_missed else DEAD_BAND
    if plan is None or target_ms >= (1 - dead_band) * 1000 * plan.least_step_s:
        return None
    if Knob.STEP_TIME not in now.binding and not is_missed:
        return None
    is_possible = now.objectives.itl_s is None or plan.step_s <= now.objectives.itl_s
    why = now.infeasible if not is_possible else f"a few sequences take {duration(plan.least_step_s)} a step"
    aim_ms = rounded(Knob.STEP_TIME, now.spans[Knob.STEP_TIME].clamp(1000 * plan.step_s))
    return now.change(Reason.STEP_TARGET_TOO_SHORT, why, {Knob.STEP_TIME: aim_ms}, Direction.CLAMP)


def _let_it_settle(now: Situation) -> Decision | None:
    """Hold while the counts still cover time before the last move, or hardly any time after it."""
    last = now.state.last_move
    if last is None or (now.is_fresh and now.now_s - last.at_s >= now.pooled.window_s / 2):
        return None
    return now.hold(Reason.SETTLING, "the evidence still covers time before the last change")


def _worse_than_before(now: Situation) -> Decision | None:
    """Take a raise back that every replica got, and that a missed objective followed before it settled."""
    last, fallback = now.state.last_move, now.state.fallback
    if (
        last is None
        or fallback is None
        or last.direction is not Direction.RAISE
        or now.itl.standing is not Standing.OVER
    ):
        return None
    revision = now.next_revision
    state = now.remembered.after([last.undone(now.now_s)], fallback, revision).banned(last, now.now_s)
    return Decision(
        action=Action.ROLL_BACK,
        reason=Reason.WORSE_THAN_BEFORE,
        why=f"{last.knob} is taken back: {now.itl}",
        limits=fallback,
        revision=revision,
        state=structs.replace(state, fallback=None),
        findings=now.findings,
    )


def _commit(now: Situation) -> Decision | None:
    """Keep limits that have served well for a window without a lease: they are what a replica falls back to."""
    last = now.state.last_move
    is_new = last is not None and now.now_s - last.at_s < now.pooled.window_s
    is_bad = now.standings & {Standing.OVER, Standing.UNKNOWN}
    is_due = now.tuning.mode == "Auto" and now.revision > 0 and now.state.objectives is not None
    if now.state.settled or not is_due or is_new or is_bad:
        return None
    state = structs.replace(now.remembered, settled=True, fallback=None)
    held = now.hold(
        Reason.SETTLED, f"revision {now.revision} has served well and stays: {_objectives(now)}", state=state
    )
    return structs.replace(held, action=Action.COMMIT)


def _infeasible(now: Situation) -> Decision | None:
    if not now.infeasible or Standing.OVER not in now.standings:
        return None
    return now.hold(Reason.SLO_INFEASIBLE, now.infeasible)


@dataclass(frozen=True)
class _Idea:
    """A move that may help. ``aim`` is cut to what the bounds allow."""

    knob: Knob
    aim: float
    why: str
    dead_band: float = DEAD_BAND
    trim: float | None = None


def _itl_over(now: Situation) -> Decision | None:
    if now.itl.standing is not Standing.OVER:
        return None
    made = _first_possible(now, _itl_ideas(now), Reason.INTER_TOKEN_LATENCY_OVER, now.itl, forecast_of(now.itl, "itl"))
    return made or now.hold(
        Reason.AT_LIMIT, f"{now.itl}, and no limit can go lower; add replicas or relax the objective"
    )


def _itl_ideas(now: Situation) -> Iterator[_Idea]:
    """Yield what shortens the gaps, what most likely is guilty first."""
    plan, target_ms = now.plan, Knob.STEP_TIME.of(now.limits)
    running = max(one.num_running for one in now.usable.values())
    if plan is not None and now.lengths is not None:
        model = sorted(now.models.values(), key=lambda one: one.base_s)[len(now.models) // 2]
        alone_s = decode_step_s(model, now.lengths, running)
        if alone_s > plan.step_s:
            aim = most_decodes_alone(model, now.lengths, plan.step_s)
            why = f"{running} sequences take {duration(alone_s)} a step to decode, without any prefill"
            yield _Idea(Knob.MAX_NUM_SEQS, min(aim, now.limits.max_num_seqs), why)
        aim_ms = 1000 * plan.step_s
        if target_ms > aim_ms:
            why = f"the step model allows {duration(plan.step_s)} a step"
            yield _Idea(Knob.STEP_TIME, aim_ms, why, STEP_DEAD_BAND)
    if math.isfinite(target_ms):
        for factor in (_shortfall(now), CUT_FACTOR):
            trim = min(TRIM_HIGH, max(TRIM_LOW, now.state.trim * factor))
            yield _Idea(
                Knob.STEP_TIME, factor * target_ms, "steps are longer than predicted, so they aim lower", 0.02, trim
            )
    if plan is None:
        tokens = CUT_FACTOR * now.limits.max_num_batched_tokens
        yield _Idea(Knob.MAX_NUM_BATCHED_TOKENS, tokens, "shorter prefill chunks hold decodes up less")
    if plan is None or running > plan.num_decoding:
        yield _Idea(Knob.MAX_NUM_SEQS, CUT_FACTOR * now.limits.max_num_seqs, "fewer sequences share a step")


def _shortfall(now: Situation) -> float:
    """Return by what factor steps are too long, from the 95th percentile of the gaps and from how many are over."""
    itl_s = now.objectives.itl_s
    observed = max((one.itl.p95_s or 0.0 for one in now.usable.values()), default=0.0)
    ratio = 1.0 if itl_s is None or observed == 0 else itl_s / observed
    return min(0.95, max(CUT_FACTOR, min(ratio, 1.0 - now.itl.share)))


def _preempting(now: Situation) -> Decision | None:
    """Hold fewer sequences, or let them leave sooner, when preemption costs an objective."""
    share = now.pooled.recomputed_share
    is_well = now.standings and now.standings <= {Standing.MET, Standing.CLEAR}
    if share <= RECOMPUTED_SHARE or is_well:
        return None
    why = f"{share:.1%} of computed tokens were thrown away by preemption"
    signal = now.itl if now.itl.standing is Standing.OVER else now.ttft
    if signal.standing is not Standing.OVER:
        return None
    forecast = forecast_of(signal, "itl" if signal is now.itl else "ttft")
    return _first_possible(now, _preempting_ideas(now), Reason.PREEMPTING, why, forecast)


def _preempting_ideas(now: Situation) -> Iterator[_Idea]:
    if now.plan is None:
        yield _Idea(Knob.MAX_NUM_SEQS, CUT_FACTOR * now.limits.max_num_seqs, "fewer sequences fit the KV pool better")
        return
    yield from _kv_ideas(now)
    fitting = now.plan.num_fitting
    if now.limits.max_num_seqs > fitting:
        yield _Idea(Knob.MAX_NUM_SEQS, fitting, f"the KV pool holds {fitting:.0f} sequences of the usual length")


def _kv_ideas(now: Situation) -> Iterator[_Idea]:
    plan = now.plan
    if plan is not None and 1000 * plan.kv_step_s < Knob.STEP_TIME.of(now.limits):
        why = (
            f"shorter steps let sequences end sooner and free KV blocks; {plan.num_fitting:.0f} sequences fit the pool"
        )
        yield _Idea(Knob.STEP_TIME, 1000 * plan.kv_step_s, why)


def _ttft_over(now: Situation) -> Decision | None:
    if now.ttft.standing is not Standing.OVER:
        return None
    forecast = forecast_of(now.ttft, "ttft")
    made = _first_possible(now, _ttft_ideas(now), Reason.TTFT_OVER, now.ttft, forecast)
    if made is not None:
        return made
    return now.hold(*_why_not(now))


def _ttft_ideas(now: Situation) -> Iterator[_Idea]:
    """Yield what lets requests in sooner: the limit that they waited for most often first."""
    for knob in now.binding:
        waited = f"{knob.waited_for(now.blocked_by):.0%} of steps waited for {knob}"
        for idea in _relief(now, knob):
            yield replace(idea, why=f"{waited}; {idea.why}" if idea.why else waited)


def _relief(now: Situation, knob: Knob) -> Iterator[_Idea]:
    plan, value = now.plan, knob.of(now.limits)
    if knob is Knob.KV_CACHE_FRACTION:
        yield from _kv_ideas(now)
    elif knob is Knob.STEP_TIME:
        if plan is not None and _may_raise(now):
            yield from _longer_steps(now, plan)
    elif _may_raise(now) or (_is_paced(now) and now.itl.standing is Standing.NEAR):
        if plan is None:
            yield _Idea(knob, value * (1 + now.tuning.max_step_percent / 100), "")
        else:
            aim = plan.max_num_seqs if knob is Knob.MAX_NUM_SEQS else plan.max_num_batched_tokens
            if aim > value:
                # At once, as a part of the way may gain nothing: with 4 sequences where 60 are needed, so do 8.
                yield _Idea(knob, aim, f"the step model allows {aim}")


def _longer_steps(now: Situation, plan: Plan) -> Iterator[_Idea]:
    planned_ms = 1000 * plan.aim_s
    why = "the inter-token objective allows longer steps"
    if plan.aim_s < plan.step_s:
        why = f"with steps longer than {duration(plan.aim_s)}, the KV pool is full before"
    yield _Idea(Knob.STEP_TIME, planned_ms, why)
    if now.state.trim < 1.0 and now.itl.standing is Standing.CLEAR:
        trim = min(1.0, TRIM_RAISE * now.state.trim)
        aim_ms = planned_ms * trim / now.state.trim
        yield _Idea(Knob.STEP_TIME, aim_ms, "steps have room to be longer again", STEP_DEAD_BAND, trim)


def _room_to_spare(now: Situation) -> Decision | None:
    """Raise a limit up to the plan again while the queue waits for it and no objective says that this is fast enough."""
    if now.ttft.standing is not Standing.UNSET or now.itl.standing is not Standing.CLEAR or now.plan is None:
        return None
    ideas = (idea for idea in _ttft_ideas(now) if idea.aim > idea.knob.of(now.limits))
    made = _first_possible(now, ideas, Reason.ROOM_TO_SPARE, now.itl, None)
    if made is None or made.action is Action.HOLD:
        return None  # nothing is missed, so there is nothing to wait for
    return structs.replace(made, state=structs.replace(made.state, fallback=now.limits))


def _may_raise(now: Situation) -> bool:
    return now.itl.standing in (Standing.UNSET, Standing.MET, Standing.CLEAR)


def _is_paced(now: Situation) -> bool:
    return math.isfinite(Knob.STEP_TIME.of(now.limits))


def _why_not(now: Situation) -> tuple[Reason, str]:
    """Return why no limit is moved although first tokens are late."""
    if not _may_raise(now) and not _is_paced(now):
        reason = Reason.FEW_SAMPLES if now.itl.standing is Standing.UNKNOWN else Reason.NEAR_OBJECTIVE
        return reason, f"{now.ttft}, but a raise could push inter-token latency over: {now.itl}"
    if waits := kv_share.waits(now):
        return Reason.COOLING_DOWN, f"{now.ttft}; {waits}"
    findings = now.findings
    if (
        findings.capacity_per_s
        and findings.arrivals_per_s
        and findings.arrivals_per_s > OVERLOAD * findings.capacity_per_s
    ):
        why = (
            f"{now.ttft}: a replica gets {short(findings.arrivals_per_s)} requests a second and serves "
            f"{short(findings.capacity_per_s)} within the objectives; add replicas"
        )
        return Reason.NOT_THE_LIMITS, why
    if not now.binding:
        blocked = ", ".join(f"{reason} {share:.0%}" for reason, share in sorted(now.blocked_by.items())) or "nothing"
        return Reason.NOT_THE_LIMITS, f"{now.ttft}, but no limit holds the queue back ({blocked}); add replicas"
    return Reason.AT_LIMIT, f"{now.ttft}, and {', '.join(now.binding)} cannot help any more; add replicas"


def _first_possible(
    now: Situation, ideas: Iterator[_Idea], reason: Reason, symptom: Signal | str, forecast: Forecast | None
) -> Decision | None:
    """Return the first idea as a move, or why it has to wait; None when there is none."""
    banned = ""
    for idea in ideas:
        value = towards(idea.knob, idea.knob.of(now.limits), idea.aim, now.spans[idea.knob], dead_band=idea.dead_band)
        if value is None:
            continue
        direction = Direction.RAISE if value > idea.knob.of(now.limits) else Direction.CUT
        if (ban := now.state.ban(idea.knob, direction, value, now.now_s)) is not None:
            how = "could not be judged" if ban.unjudged_at else "gained nothing"
            left_s = ban.until_s - now.now_s
            banned = (
                banned or f"{symptom}; a {direction} of {idea.knob} {how} lately and is not tried for {left_s:.0f} s"
            )
            continue
        wait_s = now.state.cooldown_left_s(
            idea.knob, direction, now_s=now.now_s, cooldown_s=now.tuning.cooldown_seconds
        )
        if wait_s > 0:
            return now.hold(
                Reason.COOLING_DOWN, f"{symptom}; the next {direction} of {idea.knob} may come in {wait_s:.0f} s"
            )
        return _made(now, idea, value, direction, reason, f"{symptom}; {idea.why}", forecast)
    return now.hold(Reason.BANNED, banned) if banned else None


def _made(
    now: Situation, idea: _Idea, value: float, direction: Direction, reason: Reason, why: str, forecast: Forecast | None
) -> Decision:
    state = now.remembered if idea.trim is None else structs.replace(now.remembered, trim=idea.trim)
    if idea.knob is Knob.STEP_TIME:
        state = structs.replace(state, guessed=False)
    if idea.knob is Knob.MAX_NUM_SEQS:
        state = structs.replace(state, seqs=_own_seqs(now, value))
    return now.change(reason, why, {idea.knob: value}, direction, forecast=forecast, state=state)


SLOWER = 0.8
"""A replica gets fewer sequences when its plan holds less than this share of the others'."""


def _own_seqs(now: Situation, value: float) -> dict[str, int]:
    """Return which replicas get fewer sequences, because their device is slower than the others'."""
    plans = {pod: now.plan_of(pod) for pod in sorted(now.models) if pod not in now.slow}
    if now.plan is None:
        return {}
    usual = now.plan.num_decoding
    shares = {pod: plan.num_decoding / usual for pod, plan in plans.items() if plan is not None}
    return {pod: max(1, int(share * value)) for pod, share in shares.items() if share < SLOWER}


def _slow_replicas(now: Situation) -> Decision | None:
    if not now.slow:
        return None
    listed = "; ".join(f"{pod}: {why}" for pod, why in sorted(now.slow.items()))
    why = f"{listed}. Something else takes its time (another process, heat?); its limits are left alone"
    return now.hold(Reason.SLOW_REPLICA, why)


def _not_yet_settled(now: Situation) -> Decision | None:
    last = now.state.last_move
    if now.state.settled or last is None or now.now_s - last.at_s >= now.pooled.window_s:
        return None
    return now.hold(Reason.SETTLING, f"the last change is on probation: {_objectives(now)}")


def _too_few_samples(now: Situation) -> Decision | None:
    few = [one for one in (now.ttft, now.itl) if one.standing is Standing.UNKNOWN]
    if not few:
        return None
    counts = ", ".join(f"{one.counted.num} of {one.min_samples} {one.what}" for one in few)
    return now.hold(Reason.FEW_SAMPLES, f"too few samples: {counts}")


_RULES: tuple[Callable[[Situation], Decision | None], ...] = (
    _impossible_spec,
    _into_bounds,
    _set_objectives,
    _set_planned_target,
    _into_step,
    _wait_for_agreement,
    kv_share.under_pressure,
    _step_target_too_short,
    _let_it_settle,
    _worse_than_before,
    _commit,
    _infeasible,
    _preempting,
    _itl_over,
    kv_share.blocked,
    _ttft_over,
    _room_to_spare,
    kv_share.unused,
    _not_yet_settled,
    _slow_replicas,
    _too_few_samples,
)


def _objectives(now: Situation) -> str:
    return "; ".join(str(one) for one in (now.ttft, now.itl) if one.objective_s is not None)
