"""Under steady traffic through the Service, nothing that happens to operator or pods loses a request or changes an answer."""

import itertools
import json
import os
import random
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from e2e_kit import helm, processes
from e2e_kit.models import SERVED_NAME, Model
from e2e_kit.node import NAME, Node
from e2e_kit.traffic import Traffic

ROLLOUT_TIMEOUT = "--timeout=110s"
FEW, FULL, FULL_DRAINS = 2, 20, 5


@pytest.fixture
def times(request: pytest.FixtureRequest) -> int:
    """How often to do what disturbs."""
    return FULL if request.config.getoption("--full") else FEW


@contextmanager
def undisturbed(model: Model) -> Iterator[Traffic]:
    """Traffic that must not notice what happens inside; prints its verdict."""
    with Traffic(model.url, SERVED_NAME) as traffic:
        yield traffic
    print(f"\n{traffic.verdict}")
    assert not traffic.verdict.failed, traffic.verdict.failed[:5]
    assert not traffic.verdict.changed, traffic.verdict.changed[:5]


@pytest.fixture
def model(operator: Node, namespace: str) -> Model:
    model = Model(operator, namespace)
    model.apply()
    model.wait_ready()
    return model


def roll(model: Model, mark: str) -> None:
    """Change the pods' template, and wait until new pods have taken over."""
    model.patch(podTemplate={"metadata": {"annotations": {"test/mark": mark}}})
    path = "{.spec.template.metadata.annotations.test/mark}"
    model.kubectl("wait", f"--for=jsonpath={path}={mark}", f"deployment/{model.name}", ROLLOUT_TIMEOUT)
    model.kubectl("rollout", "status", f"deployment/{model.name}", ROLLOUT_TIMEOUT)


def scale(model: Model, replicas: int) -> None:
    """Scale with kubectl, and wait until no other pod is left."""
    model.kubectl("scale", f"llmdep/{model.name}", f"--replicas={replicas}")
    deadline_s = time.monotonic() + 110
    while [ready(pod) for pod in model.pods()] != [True] * replicas:
        assert time.monotonic() < deadline_s, model.pods()
        time.sleep(0.2)


def ready(pod: dict) -> bool:
    return "deletionTimestamp" not in pod["metadata"] and any(
        one["type"] == "Ready" and one["status"] == "True" for one in pod["status"].get("conditions", [])
    )


def test_rolling_updates(model: Model, times: int) -> None:
    with undisturbed(model):
        for count in range(times):
            roll(model, f"round-{count}")


def test_scaling_down(model: Model, times: int) -> None:
    with undisturbed(model):
        for _ in range(times):
            scale(model, 2)
            scale(model, 1)


def test_draining_the_node(model: Model, times: int) -> None:
    scale(model, 2)
    with undisturbed(model):
        for _ in range(FULL_DRAINS if times == FULL else FEW):
            drain(model)


def drain(model: Model) -> None:
    """Drain our pods off the node. There is no other one, so new pods find it open again once the first has gone."""
    before = {pod["metadata"]["uid"] for pod in model.pods()}
    flags = (f"--pod-selector=app.kubernetes.io/instance={model.name}", "--delete-emptydir-data", "--timeout=110s")
    command = model.node.kubectl_command("drain", NAME, *flags)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as draining:
        while before <= {pod["metadata"]["uid"] for pod in model.pods()} and draining.poll() is None:
            time.sleep(0.1)
        model.node.kubectl("uncordon", NAME)
        _, errors = draining.communicate()
    assert draining.returncode == 0, errors
    deadline_s = time.monotonic() + 110
    while before & {pod["metadata"]["uid"] for pod in model.pods()} or not all(map(ready, model.pods())):
        assert time.monotonic() < deadline_s, model.pods()
        time.sleep(0.2)


def test_killing_the_operator(model: Model, times: int) -> None:
    chance = random.Random(4)
    with undisturbed(model):
        for count in range(times):
            model.patch(podTemplate={"metadata": {"annotations": {"test/mark": f"kill-{count}"}}})
            time.sleep(chance.uniform(0, 4))
            (pid, *_) = processes.running("flyball-operator", "run")
            os.kill(pid, signal.SIGKILL)
            model.node.kubectl(
                "-n", helm.NAMESPACE, "rollout", "status", f"deployment/{helm.RELEASE}-operator", ROLLOUT_TIMEOUT
            )
            roll(model, f"kill-{count}")


def test_changing_the_limits_live(model: Model, times: int) -> None:
    token = admin_token(model)
    with undisturbed(model):
        for revision, num_seqs in zip(range(1, times + 1), itertools.cycle((2, 16)), strict=False):
            for pod in model.pods():
                assert post_limits(pod["status"]["podIP"], token, revision, num_seqs) == "applied"
            time.sleep(3)


def admin_token(model: Model) -> str:
    pod = model.pods()[0]["spec"]["containers"][0]
    (reference,) = (one["valueFrom"]["secretKeyRef"] for one in pod["env"] if one["name"] == "FLYBALL_ADMIN_TOKEN")
    template = f"{{{{.data.{reference['key']} | base64decode}}}}"
    return model.kubectl("get", "secret", reference["name"], "-o", f"go-template={template}")


def post_limits(ip: str, token: str, revision: int, num_seqs: int) -> str:
    body = json.dumps({"revision": revision, "limits": {"max_num_seqs": num_seqs}}).encode()
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"http://{ip}:8001/admin/limits", body, headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return str(json.load(answer)["status"])


def test_killing_a_runtime_loses_its_own_requests_only(model: Model) -> None:
    scale(model, 2)
    with Traffic(model.url, SERVED_NAME) as traffic:
        time.sleep(3)
        uid = model.pods()[0]["metadata"]["uid"]
        (pid, *_) = processes.running("flyball", "serve", cgroup=uid)
        killed_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        while all(map(ready, model.pods())):
            time.sleep(0.1)
        model.kubectl("wait", "--for=condition=Ready", "pod", "--all", ROLLOUT_TIMEOUT)
        back_s = time.monotonic() - killed_s
        time.sleep(2)
    verdict = traffic.verdict
    late = [one for one in verdict.failed if one.sent_s > killed_s + 2]
    print(f"\n{verdict}; ready again after {back_s:.1f} s; failed: {[one.problem for one in verdict.failed]}")
    assert not verdict.changed and not late
