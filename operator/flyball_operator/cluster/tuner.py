"""The slow loop on the cluster: one loop over the store, a round for each LLMDeployment whose interval has passed."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Protocol

import aiohttp
import msgspec

from flyball_operator import names
from flyball_operator.cluster.events import REPEAT_AFTER_S
from flyball_operator.cluster.store import Store
from flyball_operator.cluster.tuner_metrics import TunerMetrics
from flyball_operator.observed import Key, Pod, Resource
from flyball_operator.spec import Tuning
from flyball_operator.status import Condition
from flyball_operator.status.tuning import DISABLED, MadeDecision, Report, TuningStatus, report
from flyball_operator.tuning import Action, Decision, Knob, spec_limits
from flyball_operator.tuning.admin import AdminClient, Target
from flyball_operator.tuning.evidence import LONE_DECODE, StepCounts, common_step
from flyball_operator.tuning.loop import Round, SlowLoop
from flyball_operator.tuning.record import DecisionRecord, to_line
from flyball_operator.tuning.recovery import Memory
from flyball_operator.tuning.state import Direction, Move
from flyball_protocol import BootPrior, Evidence, Limits, StepModel
from flyball_protocol.endpoints import ADMIN_PORT

log = logging.getLogger(__name__)
decisions_log = logging.getLogger(f"{__name__}.decisions")
"""A JSON line for each decision that is news, with everything that it was made from, to replay it by. Holds: level debug."""

"""The KV share's name in the spec and the status."""

TICK_S = 0.25
NEW_REPLICA_S = 1.0
"""Seconds between two rounds at least, however many replicas become ready."""
MAX_REQUESTS = 256
"""Requests at the same time, of all rounds together. They have a timeout, so replicas that hang hold others up little."""


class Tell(Protocol):
    """Writes an Event."""

    def __call__(self, resource: Resource, type: Any, reason: str, message: str) -> None: ...


class ClusterTuner:
    """Tunes every LLMDeployment of the store whose spec asks for it. ``run()`` goes on until it is cancelled.

    A round comes each interval, and at once when the spec has changed or a replica is new: until it is told the objectives,
    nothing paces it.

    Args:
        token_of: the token of a deployment's admin ports.
        metrics: where rounds are counted.
        changed: called when what ``status``, ``conditions`` or ``boot_prior`` say has changed.
        event: called with what people should see.
        clock: seconds, only forward.
        now: the time of day.
        timeout_s: how long a replica may take to answer.
    """

    def __init__(
        self,
        store: Store,
        *,
        token_of: Callable[[Resource], str],
        session: aiohttp.ClientSession,
        metrics: TunerMetrics,
        changed: Callable[[Key], None],
        event: Tell,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        timeout_s: float = 2.0,
    ) -> None:
        self._store = store
        self._token_of = token_of
        self._session = session
        self._metrics = metrics
        self._changed = changed
        self._event = event
        self._clock = clock
        self._now = now
        self._timeout_s = timeout_s
        self._requests = asyncio.Semaphore(MAX_REQUESTS)
        self._tuned: dict[Key, _Tuned] = {}

    def status(self, key: Key) -> Mapping[str, Any] | None:
        """Return status.tuning; before the first round, as an earlier process left it."""
        resource = self._store.resources.get(key)
        if resource is None or self._is_at_rest(resource):
            return None if resource is None else DISABLED.as_object()
        known = self._report(resource)
        return None if known is None else known.status.as_object()

    def conditions(self, key: Key) -> Sequence[Condition]:
        """Return TuningHealthy and SLOMet; none where tuning is off or nothing is known yet."""
        resource = self._store.resources.get(key)
        if resource is None or self._is_at_rest(resource):
            return ()
        known = self._report(resource)
        return () if known is None else known.conditions

    def boot_prior(self, key: Key) -> Mapping[str, Any] | None:
        """Return the limits that served well last, or those of the spec; None where neither tuning nor the spec sets any."""
        resource = self._store.resources.get(key)
        if resource is None or not (_mode(resource) == "Auto" or _has_limits(resource)):
            return None
        tuned = self._current(resource)
        prior = _left_prior(self._store, resource) if tuned is None else tuned.prior
        return None if prior is None else msgspec.to_builtins(prior)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                self.start_rounds(tasks)
                await asyncio.sleep(TICK_S)

    def start_rounds(self, tasks: asyncio.TaskGroup) -> None:
        """Start the rounds that are due now."""
        self._forget()
        for resource in self._due():
            self._tuned[resource.key].task = tasks.create_task(self._round(resource))

    def _due(self) -> list[Resource]:
        """Return whose round it is, and note that it has come."""
        now_s = self._clock()
        return [one for one in self._store.resources.values() if self._is_tunable(one) and self._take_turn(one, now_s)]

    def _is_tunable(self, resource: Resource) -> bool:
        if resource.deleting or resource.spec.get("suspend", False):
            return False
        return not self._is_at_rest(resource) and _is_valid(
            resource
        )  # last: this is asked of every resource in every tick

    def _is_at_rest(self, resource: Resource) -> bool:
        """Return whether the spec asks for nothing, and what tuning once moved is taken back."""
        tuned = self._current(resource)
        return _is_idle(resource) and not (_was_tuned(resource) if tuned is None else tuned.has_work)

    def _take_turn(self, resource: Resource, now_s: float) -> bool:
        tuned = self._current(resource)
        if tuned is None:
            tuned = self._tuned[resource.key] = self._start(resource)
        is_due = now_s >= tuned.next_s or tuned.generation != resource.generation
        if tuned.is_busy or not (is_due or self._has_new(resource, tuned, now_s)):
            return False
        tuned.generation = resource.generation
        tuned.began_s = now_s
        tuned.next_s = now_s + float(resource.spec["tuning"]["intervalSeconds"])
        return True

    def _has_new(self, resource: Resource, tuned: "_Tuned", now_s: float) -> bool:
        """Return whether a replica serves that did not in the last round."""
        if now_s < tuned.began_s + NEW_REPLICA_S:
            return False
        return any(serves(pod) and pod.name not in tuned.asked for pod in self._store.pods(resource.key))

    def _start(self, resource: Resource) -> "_Tuned":
        prior = _left_prior(self._store, resource)
        memory = remembered(resource, prior, self._now())
        token = self._token_of(resource)
        admin = AdminClient(self._session, token, timeout_s=self._timeout_s, slots=self._requests)
        loop = SlowLoop(str(resource.key), admin, on_record=_log_record, clock=self._clock, memory=memory)
        return _Tuned(resource.uid, loop, Report.found(resource.status), prior)

    def _forget(self) -> None:
        """Drop what is gone, or was made again under the same name."""
        resources = self._store.resources
        for key, tuned in list(self._tuned.items()):
            resource = resources.get(key)
            is_at_rest = resource is not None and resource.uid == tuned.uid and self._is_at_rest(resource)
            if (resource is None or resource.uid != tuned.uid or is_at_rest) and not tuned.is_busy:
                del self._tuned[key]
                self._metrics.forget(key)

    def _current(self, resource: Resource) -> "_Tuned | None":
        tuned = self._tuned.get(resource.key)
        return tuned if tuned is not None and tuned.uid == resource.uid else None

    def _report(self, resource: Resource) -> Report | None:
        tuned = self._current(resource)
        return Report.found(resource.status) if tuned is None else tuned.report

    async def _round(self, resource: Resource) -> None:
        try:
            await self._tune(resource, self._tuned[resource.key])
        except Exception:  # the loop's boundary: one deployment's trouble is not the others'
            log.exception("%s: a round of tuning failed; the next one follows", resource.key)

    async def _tune(self, resource: Resource, tuned: "_Tuned") -> None:
        tuning = msgspec.convert(resource.spec["tuning"], Tuning)
        targets = [target(pod) for pod in self._store.pods(resource.key) if serves(pod)]
        tuned.asked = frozenset(one.name for one in targets)
        done = await tuned.loop.round(tuning, targets)
        now = self._now().isoformat(timespec="seconds").replace("+00:00", "Z")
        before, tuned.report = tuned.report, report(tuned.report, tuning, done, now)
        self._metrics.observe(resource.key, tuning, done, tuned.report.status.state)
        prior_before, tuned.prior = tuned.prior, _prior(tuned.prior, tuning, done)
        if tuned.report.is_news:
            self._tell(resource, tuned, tuned.report.status)
        if prior_before != tuned.prior or _shown(before) != _shown(tuned.report) or self._is_at_rest(resource):
            self._changed(resource.key)

    def _tell(self, resource: Resource, tuned: "_Tuned", status: TuningStatus) -> None:
        last = status.last_decision
        if last is None:
            return
        if last.action != Action.HOLD:
            type, reason = "Warning" if last.action == Action.ROLL_BACK else "Normal", _EVENT_REASONS[last.action]
        elif status.state in ("AtLimit", "Frozen") and tuned.may_warn(last.reason, self._clock()):
            type, reason = "Warning", f"Tuning{status.state}"
        else:
            return
        self._event(resource, type, reason, f"{last.reason}: {last.message}")


_EVENT_REASONS = {
    "change": "LimitsChanged",
    "try": "LimitsTried",
    "promote": "LimitsPromoted",
    "roll back": "LimitsRolledBack",
    "commit": "LimitsSettled",
    "restore": "LimitsRestored",
    "recommend": "LimitsRecommended",
}


class _Tuned:
    """One deployment under tuning.

    Attributes:
        asked: the pods of the last round.
    """

    def __init__(self, uid: str, loop: SlowLoop, report: Report | None, prior: BootPrior | None) -> None:
        self.uid = uid
        self.loop = loop
        self.report = report
        self.prior = prior
        self.generation = -1
        self.began_s = self.next_s = 0.0
        self.asked: frozenset[str] = frozenset()
        self.task: asyncio.Task[None] | None = None
        self._warned_s: dict[str, float] = {}

    def may_warn(self, reason: str, now_s: float) -> bool:
        """Return whether the last warning of this reason is long ago; the figures in its sentence differ each time."""
        if now_s - self._warned_s.get(reason, float("-inf")) < REPEAT_AFTER_S:
            return False
        self._warned_s[reason] = now_s
        return True

    @property
    def is_busy(self) -> bool:
        return self.task is not None and not self.task.done()

    @property
    def has_work(self) -> bool:
        return self.loop.has_work


def serves(pod: Pod) -> bool:
    """Return whether a pod is expected to answer on its admin port."""
    return pod.ready and not pod.deleting and pod.ip is not None


def target(pod: Pod) -> Target:
    """Return where the admin port of a pod with an address is."""
    host = f"[{pod.ip}]" if pod.ip and ":" in pod.ip else pod.ip
    return Target(pod.name, f"http://{host}:{ADMIN_PORT}")


def remembered(resource: Resource, prior: BootPrior | None, now: datetime) -> Memory:
    """Return what an earlier process left in the status and the boot prior."""
    status = TuningStatus.from_object(resource.status.get("tuning", {})) or DISABLED
    last = status.decisions[0] if status.decisions else None
    return Memory(
        revision=status.revision,
        trying=last is not None and last.action == Action.TRY,
        tuned=_was_tuned(resource),
        change_age_s=None if last is None else _age_s(last, now),
        kv_moves=tuple(_kv_moves(status, now)),
        prior=prior,
    )


def _age_s(made: MadeDecision, now: datetime) -> float:
    return max(0.0, (now - datetime.fromisoformat(made.time)).total_seconds())


def _kv_moves(status: TuningStatus, now: datetime) -> Iterator[Move]:
    """Yield the changes of the KV share among the last decisions, oldest first."""
    for made in reversed(status.decisions):
        for move in made.moves:
            if values := move.values_of(Knob.KV_CACHE_FRACTION):
                before, after = values
                yield Move(
                    knob=Knob.KV_CACHE_FRACTION,
                    direction=Direction.RAISE if after > before else Direction.CUT,
                    before=before,
                    after=after,
                    at_s=-_age_s(made, now),
                )


def _was_tuned(resource: Resource) -> bool:
    """Return whether the status tells of limits that tuning has moved."""
    status = TuningStatus.from_object(resource.status.get("tuning", {}))
    return status is not None and status.state != "Disabled" and status.revision > 0


def _mode(resource: Resource) -> str:
    return str(resource.spec.get("tuning", {}).get("mode", "Disabled"))


def _is_idle(resource: Resource) -> bool:
    """Return whether the spec asks for nothing: tuning is off, and no limits are given."""
    return _mode(resource) == "Disabled" and not _has_limits(resource)


def _has_limits(resource: Resource) -> bool:
    return bool(resource.spec.get("tuning", {}).get("limits"))


def _is_valid(resource: Resource) -> bool:
    """Return whether spec.tuning is valid; where it is not, the status reports InvalidSpec."""
    try:
        msgspec.convert(resource.spec.get("tuning"), Tuning)
    except msgspec.ValidationError:
        return False
    return True


def _left_prior(store: Store, resource: Resource) -> BootPrior | None:
    """Return the boot prior in the deployment's ConfigMap, None where there is none that can be read."""
    key = resource.key
    child = store.child(key, "ConfigMap", names.boot_prior_map(key.name))
    if child is None or child.owner != resource.uid:
        return None
    try:
        return msgspec.json.decode(child.object["data"][names.BOOT_PRIOR_FILE], type=BootPrior)
    except (KeyError, msgspec.MsgspecError) as error:
        log.warning("%s: ConfigMap %s holds no boot prior (%s); it is written again", key, child.name, error)
        return None


def _prior(before: BootPrior | None, tuning: Tuning, done: Round) -> BootPrior | None:
    """Return what new replicas should start with after a round: limits that stay, and the step model."""
    found = _settled_limits(done.decision) if tuning.mode == "Auto" else spec_limits.in_force(tuning, done.evidence)
    if found is None:
        return before
    revision, limits = found
    learned = [one for pod in done.evidence if (one := pod.evidence) is not None and _has_model(one)]
    if not learned:
        return _same_or(before, BootPrior(revision=revision, limits=limits), LONE_DECODE)
    step = common_step(learned)
    typical = sorted(learned, key=lambda one: _step_s(one.step_model, step))[len(learned) // 2]
    prior = BootPrior(revision=revision, limits=limits, step_model=typical.step_model, key=typical.key)
    return _same_or(before, prior, step)


def _settled_limits(decision: Decision) -> tuple[int, Limits] | None:
    is_settled = decision.state.settled and decision.state.trial is None and decision.revision > 0
    return (decision.revision, decision.limits) if is_settled and decision.limits is not None else None


def _step_s(model: StepModel | None, step: StepCounts) -> float:
    return 0.0 if model is None else model.predict(*step)


def _has_model(evidence: Evidence) -> bool:
    return evidence.step_model is not None and evidence.step_model.settled


MODEL_CHANGE = 0.1
"""A step model is left for new replicas again when a step takes longer or shorter by this share."""


def _same_or(before: BootPrior | None, prior: BootPrior, step: StepCounts) -> BootPrior:
    """Return ``before`` where ``prior`` says hardly anything else, of ``step``: each other one is written to the API server."""
    if before is None or (before.revision, before.limits) != (prior.revision, prior.limits):
        return prior
    if prior.step_model is None or (before.step_model is not None and before.key == prior.key):
        known, found = before.step_model, prior.step_model
        if found is None or (known is not None and _is_near(known, found, step)):
            return before
    return prior


def _is_near(known: StepModel, found: StepModel, step: StepCounts) -> bool:
    before_s, now_s = known.predict(*step), found.predict(*step)
    return abs(now_s - before_s) <= MODEL_CHANGE * before_s


def _shown(known: Report | None) -> object:
    return None if known is None else (known.status, known.conditions)


def _log_record(record: DecisionRecord) -> None:
    level = logging.DEBUG if record.decision.action is Action.HOLD else logging.INFO
    if decisions_log.isEnabledFor(level):
        decisions_log.log(level, "%s", to_line(record).decode().rstrip())
