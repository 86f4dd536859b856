"""The slow loop on a cluster: real HTTP to make-believe replicas, the store filled by hand, a clock that tests move."""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import aiohttp
import msgspec
import pytest
from msgspec import structs
from prometheus_client import CollectorRegistry

from flyball_operator import names
from flyball_operator.cluster.store import Store
from flyball_operator.cluster.tuner import ClusterTuner
from flyball_operator.cluster.tuner_metrics import TunerMetrics
from flyball_operator.observed import Child, Key, Resource
from flyball_operator.tuning.record import from_line
from flyball_protocol import BootPrior, Limits
from operator_kit.evidence import LIMITS
from operator_kit.fake_admin import TOKEN, FakeReplica, fake_replicas

KEY = Key("default", "chat")
START = datetime(2026, 1, 1, tzinfo=UTC)
TUNING: dict[str, Any] = {
    "mode": "Auto",
    "intervalSeconds": 15,
    "cooldownSeconds": 60,
    "minSamples": 100,
    "maxStepPercent": 25,
    "objectives": {"ttftP95Milliseconds": 1000, "interTokenLatencyP95Milliseconds": 40},
    "bounds": {},
}
BROKEN = Key("default", "broken")
SET = structs.replace(LIMITS, step_time_target_ms=34.0)
"""The limits with the step target that the objectives ask for before anything is known."""

CUT = structs.replace(LIMITS, step_time_target_ms=27.2)
AT_SET, AT_CUT = 34.0, 27.2


def good_below(step_ms: float) -> Callable[[Limits], dict[str, Any]]:
    """Evidence of replicas whose gaps meet the objective while steps aim below ``step_ms``."""
    return lambda limits: {"itl_over": 0 if (limits.step_time_target_ms or 1000) < step_ms else 4000}


class Scene:
    """One LLMDeployment and its replicas, under a tuner that can be restarted."""

    def __init__(self, session: aiohttp.ClientSession, replicas: Sequence[FakeReplica]) -> None:
        self.session = session
        self.replicas = list(replicas)
        self.now_s = 1000.0
        self.store = Store()
        self.spec: dict[str, Any] = {"tuning": dict(TUNING)}
        self.uid = "uid-1"
        self.versions = itertools.count(1)
        self.generation = 1
        self.status: dict[str, Any] = {}
        self.token = TOKEN
        self.events: list[tuple[str, str, str]] = []
        self.num_changed = 0
        self.start()

    def start(self, timeout_s: float = 30.0) -> None:
        self.registry = CollectorRegistry()
        self.tuner = ClusterTuner(
            self.store,
            token_of=lambda _: self.token,
            session=self.session,
            metrics=TunerMetrics(self.registry),
            changed=self.changed,
            event=lambda _, type, reason, message: self.events.append((type, reason, message)),
            clock=lambda: self.now_s,
            now=lambda: START + timedelta(seconds=self.now_s),
            timeout_s=timeout_s,
        )

    def restart(self) -> None:
        """The operator dies and comes back: what remains is in the API server and at the replicas."""
        self.start()

    def changed(self, key: Key) -> None:
        """What a reconcile does then: the status and the ConfigMap follow."""
        if key == BROKEN:
            raise RuntimeError("the reconcile of this change fails")
        if key != KEY:
            return
        self.num_changed += 1
        tuning, conditions = self.tuner.status(KEY), self.tuner.conditions(KEY)
        self.status = {"conditions": [one._asdict() for one in conditions]} | ({"tuning": tuning} if tuning else {})
        prior = self.tuner.boot_prior(KEY)
        if prior is not None:
            self.leave_prior(msgspec.convert(prior, BootPrior))

    def leave_prior(self, prior: BootPrior) -> None:
        metadata = {
            "namespace": KEY.namespace,
            "name": names.boot_prior_map(KEY.name),
            "uid": "map",
            "resourceVersion": str(next(self.versions)),
            "ownerReferences": [{"uid": self.uid, "controller": True}],
        }
        data = {names.BOOT_PRIOR_FILE: msgspec.json.encode(prior).decode()}
        self.store.put_child(KEY, Child.of({"kind": "ConfigMap", "metadata": metadata, "data": data}))

    def observe(self) -> None:
        """Put everything into the store, as the watches would."""
        self.store.put_resource(
            Resource(
                key=KEY,
                uid=self.uid,
                generation=self.generation,
                resource_version=str(next(self.versions)),
                spec=self.spec,
                status=self.status,
                deleting=False,
            )
        )
        for pod in self.store.pods(KEY):
            self.store.remove_pod(KEY, pod.name, pod.uid, pod.resource_version)
        for replica in self.replicas:
            self.store.put_pod(KEY, replica.pod)

    async def rounds(self, count: int = 1, *, apart_s: float = 15.0) -> None:
        for _ in range(count):
            self.observe()
            async with asyncio.TaskGroup() as tasks:
                self.tuner.start_rounds(tasks)
            self.now_s += apart_s

    async def until(self, condition: Callable[[], bool], at_most: int = 40) -> None:
        for _ in range(at_most):
            if condition():
                return
            await self.rounds()
        raise AssertionError(f"never became so in {at_most} rounds: {self.tuning}\n{self.events}")

    @property
    def tuning(self) -> dict[str, Any]:
        return dict(self.tuner.status(KEY) or {})

    @property
    def in_force(self) -> list[tuple[int, float | None]]:
        return [(one.revision, one.limits.step_time_target_ms) for one in self.replicas]

    @property
    def budgets(self) -> list[tuple[int, int]]:
        return [(one.revision, one.limits.max_num_batched_tokens) for one in self.replicas]

    @property
    def actions(self) -> list[str]:
        """Of the decisions, oldest first."""
        return [one["action"] for one in reversed(self.tuning.get("decisions", []))]

    def samples(self, name: str) -> dict[tuple[str, ...], float]:
        """The samples of a metric, by the values of its own labels; those of the deployment are checked."""
        found = [one for family in self.registry.collect() for one in family.samples if one.name == name]
        assert all(one.labels["namespace"] == "default" and one.labels["llmdeployment"] == "chat" for one in found)
        return {tuple(one.labels[label] for label in list(one.labels)[2:]): one.value for one in found}

    def condition(self, type: str) -> tuple[str, str]:
        (found,) = [one for one in self.tuner.conditions(KEY) if one.type == type]
        return found.status, found.reason


@asynccontextmanager
async def scene(num_replicas: int = 3, sees: Callable[[Limits], dict[str, Any]] | None = None) -> AsyncIterator[Scene]:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with fake_replicas(num_replicas, sees) as replicas, aiohttp.ClientSession(connector=connector) as session:
        yield Scene(session, replicas)


def run(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """Make an async test a plain one."""

    def plain() -> None:
        asyncio.run(asyncio.wait_for(test(), 60))

    plain.__name__, plain.__doc__ = test.__name__, test.__doc__
    return plain


@run
async def test_a_change_is_tried_judged_and_taken_everywhere() -> None:
    async with scene(sees=good_below(30)) as now:
        await now.rounds()
        assert now.in_force == [(1, AT_SET)] * 3
        await now.until(lambda: now.actions[-1:] == ["try"])
        assert sorted(now.in_force) == [(1, AT_SET), (1, AT_SET), (2, AT_CUT)]
        assert now.tuning["state"] == "Adjusting"
        assert now.tuning["lastDecision"]["action"] == "try"
        assert now.tuning["target"]["stepTimeTargetMilliseconds"] == 34  # of every replica but the canary
        assert now.condition("SLOMet") == ("False", "InterTokenLatencyOver")
        assert now.tuner.boot_prior(KEY) is None
        await now.until(lambda: now.in_force == [(2, AT_CUT)] * 3)
        assert now.actions == ["change", "try", "promote"]
        assert now.tuner.boot_prior(KEY) is None, "it has yet to settle everywhere"
        await now.until(lambda: now.tuning["lastDecision"]["action"] == "commit")
        assert now.tuner.boot_prior(KEY) == {"revision": 2, "limits": structs.asdict(CUT)}
        assert [one.updates[-1].ttl_s for one in now.replicas] == [None] * 3
        await now.until(lambda: now.tuning["state"] == "Converged")
        assert now.tuning["effective"] == now.tuning["target"]
        limits = {
            "maxNumSeqs": 64,
            "maxNumBatchedTokens": 512,
            "kvCachePercent": 80,
            "stepTimeTargetMilliseconds": 27.2,
        }
        assert now.tuning["target"] == limits
        assert (now.condition("SLOMet"), now.condition("TuningHealthy")) == (("True", "Met"), ("True", "Converged"))
        assert [(type, reason) for type, reason, _ in now.events] == [
            ("Normal", "LimitsChanged"),
            ("Normal", "LimitsTried"),
            ("Normal", "LimitsPromoted"),
            ("Normal", "LimitsSettled"),
        ]
        assert "step_time_target_ms 34 ms -> 27.2 ms" in now.events[1][2]


@run
async def test_a_canary_that_gains_nothing_is_taken_back() -> None:
    async with scene(sees=lambda _: {"itl_over": 1500}) as now:
        await now.until(lambda: now.actions == ["change", "try", "roll back"])
        assert now.in_force == [(3, AT_SET)] * 3
        assert now.tuning["lastDecision"]["reason"] == "CanaryGainedNothing"
        assert now.events[-1][:2] == ("Warning", "LimitsRolledBack")
        assert now.tuner.boot_prior(KEY) is None
        await now.until(lambda: now.actions[-1] == "try")
        await now.until(lambda: now.actions[-1] == "roll back")
        assert now.in_force[0][1] == AT_SET
        await now.until(lambda: now.tuning["state"] == "AtLimit")
        assert now.condition("AtLimit") == ("True", "Banned")


@run
async def test_one_replica_is_judged_by_how_it_was_before() -> None:
    async with scene(1, sees=good_below(30)) as now:
        await now.until(lambda: now.actions[-1:] == ["try"])
        assert now.in_force == [(2, AT_CUT)]
        assert now.tuner.boot_prior(KEY) is None  # not known to be good yet
        await now.until(lambda: now.tuning["state"] == "Converged")
        assert now.actions == ["change", "try", "promote"]
        assert now.tuner.boot_prior(KEY) == {"revision": 2, "limits": structs.asdict(CUT)}


@run
async def test_steady_state_says_nothing_new() -> None:
    async with scene() as now:
        await now.until(lambda: now.tuning.get("state") == "Converged")
        status, num_changed, num_events = now.tuning, now.num_changed, len(now.events)
        for count in (1000, 900, 1100, 90, 1000, 95, 1000):  # now and then there are too few samples for a round
            now.replicas[0].sees = lambda _, count=count: {"ttft_count": count // 10}
            for other in now.replicas[1:]:
                other.sees = lambda _, count=count: {"ttft_count": count // 30}
            await now.rounds()
        assert (now.tuning, now.num_changed, len(now.events)) == (status, num_changed, num_events)


@pytest.mark.parametrize("fault", ["garbage", "endless", "stranger", 500, 401])
def test_replicas_that_do_not_answer_freeze_tuning(fault: str | int) -> None:
    async def test() -> None:
        async with scene(sees=good_below(30)) as now:
            for replica in now.replicas[:2]:
                replica.fault = fault
            await now.rounds(3)
            assert now.tuning["state"] == "Frozen"
            assert (now.condition("TuningHealthy"), now.in_force) == (("False", "PartialEvidence"), [(0, None)] * 3)
            assert "only 1 of 3 replicas" in now.tuning["lastDecision"]["message"]
            assert [reason for _, reason, _ in now.events] == ["TuningFrozen"]
            await now.rounds(20)
            assert len(now.events) == 1
            for replica in now.replicas:
                replica.fault = None
            await now.until(lambda: now.in_force == [(2, AT_CUT)] * 3)
            assert now.condition("TuningHealthy")[0] == "True"

    asyncio.run(test())


@run
async def test_a_wrong_token_is_told() -> None:
    async with scene() as now:
        now.token = "wrong"
        now.start()
        await now.rounds(2)
        assert now.condition("TuningHealthy") == ("False", "NoEvidence")
        assert (
            "answered 401, not signed with this deployment's token: the signature is not one"
            in now.tuning["lastDecision"]["message"]
        )


@run
async def test_an_answer_without_end_is_not_read_to_its_end() -> None:
    async with scene() as now:
        for replica in now.replicas:
            replica.fault = "endless"
        await now.rounds(2)
        assert "the answer is longer than 1048576 bytes" in now.tuning["lastDecision"]["message"]


@run
async def test_replicas_that_disagree_are_brought_together_before_anything_is_decided() -> None:
    async with scene(sees=good_below(30)) as now:
        now.status = {"tuning": {"state": "Converged", "revision": 7}}
        for replica, revision in zip(now.replicas, (7, 7, 2), strict=True):
            replica.restart(revision, structs.replace(LIMITS, max_num_seqs=10 * revision))
        await now.rounds()
        assert [(one.revision, one.limits.max_num_seqs) for one in now.replicas] == [(8, 70)] * 3
        assert now.actions == ["change"]
        await now.until(lambda: now.actions == ["change", "try"])


@run
async def test_a_replica_that_takes_no_limits_freezes_tuning() -> None:
    async with scene(sees=good_below(30)) as now:
        for replica in now.replicas[1:]:
            replica.restart(7)
        now.replicas[0].deaf = True
        now.status = {"tuning": {"state": "Converged", "revision": 7}}
        await now.rounds(3)
        assert now.condition("TuningHealthy") == ("False", "Disagreement")
        assert "replicas disagree: chat-1 behind revision 8" in now.tuning["lastDecision"]["message"]
        assert now.actions == ["change"]
        now.replicas[0].deaf = False
        await now.until(lambda: now.actions[-1:] == ["promote"])
        assert now.condition("TuningHealthy")[0] == "True"


@run
async def test_a_replica_that_comes_later_gets_what_is_in_force() -> None:
    async with scene(3, sees=good_below(30)) as now:
        late = now.replicas.pop()
        await now.until(lambda: now.in_force == [(2, AT_CUT)] * 2)
        now.replicas.append(late)
        await now.rounds()
        assert now.in_force == [(2, AT_CUT)] * 3


@run
async def test_a_replica_that_comes_during_a_trial_gets_what_the_others_have() -> None:
    async with scene(3, sees=good_below(30)) as now:
        for replica in now.replicas:
            replica.restart(5)
        late = now.replicas.pop()
        late.restart()
        await now.until(lambda: now.actions[-1:] == ["try"])
        now.replicas.append(late)
        await now.rounds()
        assert sorted(now.in_force) == [(6, AT_SET), (6, AT_SET), (7, AT_CUT)]
        assert late.revision == 6


@pytest.mark.parametrize("status_was_written", [True, False])
def test_a_trial_goes_on_after_a_restart(status_was_written: bool) -> None:
    async def test() -> None:
        async with scene(sees=good_below(30)) as now:
            await now.until(lambda: now.actions[-1:] == ["try"])
            now.status = now.status if status_was_written else {}
            now.restart()
            await now.rounds()
            assert sorted(now.in_force) == [(1, AT_SET), (1, AT_SET), (2, AT_CUT)]
            assert now.tuning["state"] == "Adjusting"
            await now.until(lambda: now.in_force == [(2, AT_CUT)] * 3)
            assert now.actions[-1] == "promote"

    asyncio.run(test())


@run
async def test_a_restart_changes_nothing_that_is_shown() -> None:
    async with scene(sees=good_below(30)) as now:
        await now.until(lambda: now.tuning.get("state") == "Converged")
        shown, prior, num_changed = now.status, now.tuner.boot_prior(KEY), now.num_changed
        now.restart()
        now.observe()
        assert ({**shown, "tuning": now.tuning}, now.tuner.boot_prior(KEY)) == (shown, prior)
        assert [one._asdict() for one in now.tuner.conditions(KEY)] == shown["conditions"]
        await now.rounds(5)
        assert (now.tuning, now.tuner.boot_prior(KEY), now.num_changed) == (shown["tuning"], prior, num_changed)
        assert now.in_force == [(2, AT_CUT)] * 3


@run
async def test_revisions_go_on_when_operator_and_replicas_all_restarted() -> None:
    async with scene(sees=good_below(30)) as now:
        await now.until(lambda: now.tuning.get("state") == "Converged")
        for replica in now.replicas:
            replica.restart()
        now.restart()
        await now.rounds()
        assert now.in_force == [(3, AT_CUT)] * 3, "and the objectives are posted again"


@run
async def test_after_a_restart_nothing_is_posted_until_enough_replicas_answer() -> None:
    async with scene(sees=good_below(30)) as now:
        await now.until(lambda: now.actions[-1:] == ["try"])
        (canary,) = [one for one in now.replicas if one.revision == 2]
        for replica in now.replicas:
            replica.fault = None if replica is canary else 500
            replica.updates.clear()
        now.restart()
        await now.rounds(3)
        assert [one.updates for one in now.replicas] == [[], [], []]


@run
async def test_a_suspended_deployment_is_left_alone() -> None:
    async with scene(sees=good_below(30)) as now:
        now.spec["suspend"] = True
        await now.rounds(3)
        assert [one.num_requests for one in now.replicas] == [0, 0, 0]


@run
async def test_pods_that_do_not_serve_are_not_asked() -> None:
    async with scene(sees=good_below(30)) as now:
        now.replicas[0].ready = False
        now.replicas[1].deleting = True
        await now.rounds()
        assert [one.num_requests for one in now.replicas] == [0, 0, 2]


@run
async def test_recommendations_are_shown_and_not_made() -> None:
    async with scene(sees=good_below(30)) as now:
        now.spec["tuning"]["mode"] = "Recommend"
        await now.rounds()
        assert now.in_force == [(1, None)] * 3, "the objectives are counted, and no limit has moved"
        assert now.tuning["recommended"]["stepTimeTargetMilliseconds"] == 34
        assert (now.tuning["state"], now.tuning["lastDecision"]["action"]) == ("Observing", "recommend")
        assert [(type, reason) for type, reason, _ in now.events] == [("Normal", "LimitsRecommended")]
        assert (now.tuner.boot_prior(KEY), now.actions) == (None, [])


@pytest.mark.parametrize("mode", ["Disabled", "Recommend"])
def test_turning_tuning_off_takes_back_what_is_on_trial(mode: str) -> None:
    async def test() -> None:
        async with scene(sees=good_below(30)) as now:
            await now.until(lambda: now.actions[-1:] == ["try"])
            now.spec, now.generation = {"tuning": TUNING | {"mode": mode}}, 2
            await now.rounds()
            assert now.in_force == [(3, None)] * 3
            assert {one.limits.max_num_batched_tokens for one in now.replicas} == {2048}, "what the spec says"
            assert [one.updates[-1].ttl_s for one in now.replicas] == [None] * 3
            assert now.events[-1][1] == "LimitsRestored"
            await now.rounds(2)
            num_requests = now.replicas[0].num_requests
            await now.rounds(3)
            assert (now.replicas[0].num_requests == num_requests) == (mode == "Disabled")
            assert (now.tuning == {"state": "Disabled"}) == (mode == "Disabled")

    asyncio.run(test())


@run
async def test_rounds_are_counted_until_the_deployment_goes() -> None:
    async with scene(sees=good_below(30)) as now:
        await now.until(lambda: now.tuning.get("state") == "Converged")
        await now.rounds(2)
        decisions = now.samples("flyball_tuner_decisions_total")
        changes = {labels: count for labels, count in decisions.items() if labels[2] != "held"}
        assert changes == {
            ("step_time_target_ms", "ObjectivesSet", "made"): 1,
            ("step_time_target_ms", "InterTokenLatencyOver", "tried"): 1,
            ("step_time_target_ms", "CanaryGained", "kept"): 1,
            ("", "Settled", "settled"): 1,
        }
        assert decisions["", "Steady", "held"] == 1, "a hold that goes on is no news"
        assert now.samples("flyball_tuner_violation_share") == {("ttft",): 0, ("inter_token_latency",): 0}
        assert now.samples("flyball_tuner_objective_seconds") == {("ttft",): 1.0, ("inter_token_latency",): 0.04}
        states = now.samples("flyball_tuner_state")
        assert len(states) == 6 and {labels for labels, value in states.items() if value} == {("Converged",)}
        now.store.remove_resource(KEY, now.uid, "1000")
        now.tuner.start_rounds(cast(asyncio.TaskGroup, None))
        assert now.samples("flyball_tuner_decisions_total") == now.samples("flyball_tuner_state") == {}


@run
async def test_a_new_replica_is_told_the_objectives_at_once() -> None:
    async with scene(sees=good_below(40)) as now:
        late = now.replicas.pop()
        await now.rounds(apart_s=2.0)
        assert [one.limits for one in now.replicas] == [SET, SET]
        await now.rounds(apart_s=2.0)
        assert {len(one.updates) for one in now.replicas} == {1}, "nothing is new, and no interval has passed"
        now.replicas.append(late)
        await now.rounds(apart_s=0.5)
        assert late.limits == SET
        assert len(late.updates) == 1
        await now.rounds(apart_s=2.0)
        assert len(late.updates) == 1, "it is not new any more"


@run
async def test_too_few_samples_give_no_share() -> None:
    async with scene(sees=lambda _: {"ttft_count": 5, "itl_over": 4000}) as now:
        await now.rounds(2)
        assert now.samples("flyball_tuner_violation_share") == {("inter_token_latency",): 0.2}


@run
async def test_limits_of_the_spec_move_replicas_while_tuning_is_off() -> None:
    async with scene(sees=good_below(30)) as now:
        now.spec["tuning"] = TUNING | {"mode": "Disabled", "objectives": {}, "limits": {"maxNumBatchedTokens": 256}}
        await now.rounds()
        assert now.budgets == [(1, 256)] * 3
        assert [(type, reason) for type, reason, _ in now.events] == [("Normal", "LimitsChanged")]
        await now.rounds(3)
        assert {len(one.updates) for one in now.replicas} == {1}, "nothing is posted twice"
        assert [(one["name"], one["revision"]) for one in now.tuning["replicas"]] == [
            (one.name, 1) for one in now.replicas
        ]
        assert {one["effective"]["maxNumBatchedTokens"] for one in now.tuning["replicas"]} == {256}
        assert (now.tuning["state"], now.tuner.conditions(KEY)) == ("Disabled", ())
        prior = now.tuner.boot_prior(KEY)
        assert prior is not None and (prior["revision"], prior["limits"]["max_num_batched_tokens"]) == (1, 256)
        now.restart()
        now.replicas[0].restart()  # with what it starts up with
        await now.rounds()
        assert now.budgets == [(1, 256)] * 3
        now.spec, now.generation = {"tuning": TUNING | {"mode": "Disabled", "objectives": {}}}, 2
        await now.rounds(2)
        assert (now.budgets, now.tuning) == ([(1, 256)] * 3, {"state": "Disabled"})
        assert now.tuner.boot_prior(KEY) is None


def test_a_deployment_whose_spec_is_refused_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """An API server keeps what an older CRD allowed; the status has the reason."""

    async def test() -> None:
        async with scene() as now:
            now.spec["tuning"]["mode"] = "Off"
            await now.rounds(3)
            assert (now.in_force, now.replicas[0].num_requests) == ([(0, None)] * 3, 0)
            assert (now.tuner.status(KEY), now.tuner.conditions(KEY)) == (None, ())

    asyncio.run(test())
    assert not caplog.records


@run
async def test_a_new_deployment_of_the_same_name_starts_afresh() -> None:
    async with scene(sees=good_below(30)) as now:
        await now.until(lambda: now.tuning.get("state") == "Converged")
        now.store.remove_resource(KEY, now.uid, "2")
        now.uid, now.status, now.token = "uid-2", {}, "another"
        await now.rounds(2)
        assert now.condition("TuningHealthy") == ("False", "NoEvidence")  # it asks with the new token
        assert now.tuning.get("decisions") is None
        assert now.tuner.boot_prior(KEY) is None


@run
async def test_changed_objectives_are_taken_up_at_once() -> None:
    async with scene() as now:
        await now.rounds()
        before = now.replicas[0].num_requests
        await now.rounds(apart_s=0)
        assert now.replicas[0].num_requests > before
        before = now.replicas[0].num_requests
        await now.rounds(apart_s=0)
        assert now.replicas[0].num_requests == before  # its interval has not passed
        now.generation = 2
        await now.rounds(apart_s=0)
        assert now.replicas[0].num_requests > before


@run
async def test_trouble_with_one_deployment_is_not_that_of_others(
    caplog: pytest.LogCaptureFixture | None = None,
) -> None:
    async with scene(sees=good_below(30)) as now:
        broken = Resource(
            key=BROKEN,
            uid="x",
            generation=1,
            resource_version="1",
            spec={"tuning": dict(TUNING)},
            status={},
            deleting=False,
        )
        now.store.put_resource(broken)
        await now.until(lambda: now.in_force == [(2, AT_CUT)] * 3)


@run
async def test_replicas_that_hang_hold_up_no_other_deployment() -> None:
    async with scene(4, sees=good_below(30)) as now:
        hanging = now.replicas.pop()
        hanging.fault = "hang"
        for i in range(200):
            key = Key("default", f"hangs-{i}")
            now.store.put_resource(
                Resource(
                    key=key,
                    uid=f"uid-{i}",
                    generation=1,
                    resource_version="1",
                    spec={"tuning": dict(TUNING)},
                    status={},
                    deleting=False,
                )
            )
            now.store.put_pod(key, structs.replace(hanging.pod, name=f"{key.name}-1"))
        rounds = asyncio.create_task(now.rounds())
        while now.actions != ["change"]:
            await asyncio.sleep(0.01)
        assert not rounds.done()
        rounds.cancel()
        await asyncio.wait({rounds})


@run
async def test_a_replica_that_hangs_is_not_waited_for_long() -> None:
    async with scene(1) as now:
        now.start(timeout_s=0.1)
        now.replicas[0].fault = "hang"
        await now.rounds(2)
        assert now.condition("TuningHealthy") == ("False", "NoEvidence")
        assert "chat-1: no answer in 0." in now.tuning["lastDecision"]["message"]


def test_each_decision_is_logged_with_all_that_it_was_made_from(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with scene(sees=good_below(30)) as now:
            await now.until(lambda: now.tuning.get("state") == "Converged")
            now.spec, now.generation = {"tuning": TUNING | {"mode": "Recommend"}}, 2
            await now.rounds(2)

    with caplog.at_level(logging.DEBUG, "flyball_operator.cluster.tuner.decisions"):
        asyncio.run(test())
    lines = [one.getMessage() for one in caplog.records if one.name.endswith(".decisions")]
    records = [from_line(line.encode()) for line in lines]
    actions = {"change", "try", "hold", "promote", "commit", "restore"}
    assert {str(record.decision.action) for record in records} == actions
    assert {one.levelno for one in caplog.records if '"action":"hold"' in one.getMessage()} == {logging.DEBUG}
    assert [record.replay() for record in records] == [record.decision for record in records]
