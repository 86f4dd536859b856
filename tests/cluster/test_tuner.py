"""The slow loop against a real API server, with fake runtimes as the pods' processes: canary, restart, boot prior, status."""

import base64
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from cluster_kit import Cluster
from cluster_kit.api import until
from cluster_kit.llm import condition
from cluster_kit.operator_process import OperatorProcess, child_rules, grant
from cluster_kit.world import NAME, World
from flyball_operator import names
from flyball_operator.cluster.api_server import CONFIG_MAP, DEPLOYMENT, EVENT, LLM_DEPLOYMENT, POD, SECRET
from flyball_protocol import Evidence
from flyball_protocol.endpoints import ADMIN_EVIDENCE_PATH, ADMIN_PORT, ADMIN_TOKEN_ENV, API_PORT
from operator_kit.fake_admin import any_loopback_address

Object = dict[str, Any]
pytestmark = pytest.mark.slow

FAKE_RUNTIME = Path(__file__).parents[1] / "operator_kit" / "fake_runtime.py"
TUNING: Object = {
    "mode": "Auto",
    "intervalSeconds": 1,
    "cooldownSeconds": 60,
    "objectives": {"interTokenLatencyP95Milliseconds": 40},
}


class FakePod:
    """A Pod object whose status says that it serves, and a fake runtime at its address."""

    def __init__(self, world: World, name: str, token: str, **environment: str) -> None:
        self.name = name
        self.ip = any_loopback_address()
        self._world = world
        self._token = token
        self._environment = environment

    @contextmanager
    def running(self) -> Iterator["FakePod"]:
        flags = (f"--host={self.ip}", f"--port={API_PORT}", f"--admin-host={self.ip}", f"--admin-port={ADMIN_PORT}")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), ADMIN_TOKEN_ENV: self._token}
        process = subprocess.Popen(
            [sys.executable, str(FAKE_RUNTIME), *flags, "--drain-timeout=0"],
            env=environment | self._environment,
            stdout=subprocess.DEVNULL,
        )
        try:
            until(self.evidence, f"an answer of {self.name}")
            self._create()
            yield self
        finally:
            process.kill()
            process.wait()

    def evidence(self) -> Evidence | None:
        headers = {"Authorization": f"Bearer {self._token}"}
        try:
            answer = httpx.get(f"http://{self.ip}:{ADMIN_PORT}{ADMIN_EVIDENCE_PATH}", headers=headers, timeout=30)
        except httpx.TransportError:
            return None
        return msgspec.json.decode(answer.raise_for_status().content, type=Evidence)

    @property
    def in_force(self) -> tuple[int, float | None]:
        evidence = self.evidence()
        assert evidence is not None
        return evidence.revision, evidence.target.step_time_target_ms

    def shorten_window(self) -> None:
        """Let evidence cover 1 s only, so that what waits for it to settle goes on."""
        httpx.post(f"http://{self.ip}:{API_PORT}/fake/window/1", timeout=30).raise_for_status()

    def leave(self) -> None:
        self._world.api.delete(POD, self._world.namespace, self.name)

    def _create(self) -> None:
        metadata = {"name": self.name, "namespace": self._world.namespace, "labels": names.labels(NAME)}
        spec = {"containers": [{"name": "runtime", "image": "none"}], "terminationGracePeriodSeconds": 0}
        self._world.api.create(POD, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
        self._world.api.bind(self._world.namespace, self.name, "nowhere")
        ready = {"type": "Ready", "status": "True"}
        status = {"phase": "Running", "podIP": self.ip, "podIPs": [{"ip": self.ip}], "conditions": [ready]}
        self._world.api.merge(POD, self._world.namespace, self.name, {"status": status}, "status")


class Stage:
    """A tuned LLMDeployment whose pods are fake runtimes that meet the objective while steps aim below 30 ms."""

    def __init__(self, world: World, stack: ExitStack) -> None:
        self.world = world
        self._stack = stack
        self.pods: list[FakePod] = []
        world.create(replicas=3)
        environment = world.appears(DEPLOYMENT)["spec"]["template"]["spec"]["containers"][0]["env"]
        (reference,) = [one["valueFrom"]["secretKeyRef"] for one in environment if one["name"] == ADMIN_TOKEN_ENV]
        secret = world.appears(SECRET, reference["name"])
        self._token = base64.b64decode(secret["data"][names.ADMIN_TOKEN_KEY]).decode()

    def add_pod(self, **environment: str) -> FakePod:
        seen = {"FAKE_ITL_OVER": "4000", "FAKE_FAST_BELOW": "30"}
        pod = FakePod(self.world, f"{NAME}-{len(self.pods)}", self._token, **(seen | environment))
        self.pods.append(self._stack.enter_context(pod.running()))
        return pod

    @property
    def in_force(self) -> list[tuple[int, float | None]]:
        return sorted(pod.in_force for pod in self.pods)

    @property
    def tuning(self) -> Object:
        found: Object = self.world.says().get("tuning", {})
        return found

    def put_on_trial(self) -> FakePod:
        """Return the canary of three pods. The trial stays as it is until ``shorten_windows()``."""
        for _ in range(3):
            self.add_pod()
        self.world.change(tuning=TUNING)  # not before: while pods come one by one, the first alone is canary and all
        self.until_in_force((1, 34.0), (1, 34.0), (2, 27.2))
        (canary,) = [pod for pod in self.pods if pod.in_force[0] == 2]
        return canary

    def shorten_windows(self) -> None:
        for pod in self.pods:
            pod.shorten_window()

    def until_in_force(self, *expected: tuple[int, float | None]) -> None:
        until(lambda: self.in_force == list(expected), f"limits {expected} at the pods; {self.world.says()}")

    def prior(self) -> Object | None:
        found = self.world.get(CONFIG_MAP, names.boot_prior_map(NAME))
        return None if found is None else msgspec.json.decode(found["data"][names.BOOT_PRIOR_FILE])


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def test_limits_go_to_a_canary_then_to_all_and_new_pods_start_with_them(
    operator: OperatorProcess, world: World, stack: ExitStack
) -> None:
    stage = Stage(world, stack)
    stage.put_on_trial()
    stage.shorten_windows()
    stage.until_in_force((2, 27.2), (2, 27.2), (2, 27.2))
    until(lambda: stage.prior(), "the boot prior")
    limits = {"max_num_seqs": 64, "kv_cache_fraction": 1.0, "max_num_batched_tokens": 512, "step_time_target_ms": 27.2}
    assert stage.prior() == {"revision": 2, "limits": limits}
    until(lambda: stage.tuning.get("state") == "Converged", "convergence")
    assert stage.tuning["target"] == stage.tuning["effective"]
    shown = {"maxNumSeqs": 64, "maxNumBatchedTokens": 512, "kvCachePercent": 100, "stepTimeTargetMilliseconds": 27.2}
    assert stage.tuning["target"] == shown
    assert [one["action"] for one in stage.tuning["decisions"]] == ["promote", "try", "change"]
    assert condition(world.get(LLM_DEPLOYMENT), "TuningHealthy")["status"] == "True"
    until(lambda: condition(world.get(LLM_DEPLOYMENT), "SLOMet")["status"] == "True", "SLOMet")
    told = [one["reason"] for one in world.api.list(EVENT, world.namespace) if one["reason"].startswith("Limits")]
    assert sorted(told) == ["LimitsChanged", "LimitsPromoted", "LimitsSettled", "LimitsTried"]
    late = stage.add_pod()
    late.shorten_window()
    until(lambda: late.in_force == (2, 27.2), "the limits at a pod that started without them")
    until(lambda: stage.tuning["state"] == "Converged" and stage.tuning["effective"] == stage.tuning["target"], "rest")
    operator.wait_at_rest()


def test_an_operator_that_is_killed_in_the_middle_of_a_trial(
    cluster: Cluster, namespace: str, world: World, stack: ExitStack
) -> None:
    grant(cluster, namespace, child_rules())
    operator = stack.enter_context(OperatorProcess(cluster, namespace))
    stage = Stage(world, stack)
    stage.put_on_trial()
    operator.kill()
    stage.shorten_windows()
    assert stage.in_force == [(1, 34.0), (1, 34.0), (2, 27.2)]
    stack.enter_context(OperatorProcess(cluster, namespace, identity="two"))
    stage.until_in_force((2, 27.2), (2, 27.2), (2, 27.2))
    until(lambda: stage.tuning["decisions"][0]["action"] == "promote", "the verdict")
    assert stage.tuning["revision"] == 2


def test_a_canary_that_goes_away_is_waited_for_then_the_change_is_taken_back(
    operator: OperatorProcess, world: World, stack: ExitStack
) -> None:
    stage = Stage(world, stack)
    canary = stage.put_on_trial()
    canary.leave()
    stage.pods.remove(canary)
    until(lambda: stage.tuning["lastDecision"]["reason"] == "CanarySilent", "a hold that says why")
    frozen = condition(world.get(LLM_DEPLOYMENT), "TuningHealthy")
    assert (frozen["status"], frozen["reason"]) == ("False", "CanarySilent")
    stage.shorten_windows()
    stage.until_in_force((3, 34.0), (3, 34.0))
    assert stage.tuning["decisions"][0]["reason"] == "CanaryUnjudged"
