"""flyball-operator run, as a process with a service account's rights."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import yaml

from cluster_kit.api import until
from cluster_kit.cluster import PATIENCE_S, Cluster
from flyball_operator.cluster.operator import OperatorOptions
from ports import free_port

ACCOUNT = "flyball-operator"
WRITES = ("create", "update", "patch", "delete")
AT_REST_S = 2.0
RENDERED = Path(__file__).parents[1] / "chart" / "golden" / "default.yaml"


def child_rules() -> list[dict[str, Any]]:
    """The rules under which the operator serves, as charts/flyball grants them."""
    return _rules("ClusterRole", "flyball-operator")


def own_rules() -> list[dict[str, Any]]:
    """Its rules in the namespace that it is installed in, as charts/flyball grants them."""
    return _rules("Role", "flyball-operator-own")


def _rules(kind: str, name: str) -> list[dict[str, Any]]:
    objects = yaml.safe_load_all(RENDERED.read_text())
    (role,) = (one for one in objects if one and (one["kind"], one["metadata"]["name"]) == (kind, name))
    rules: list[dict[str, Any]] = role["rules"]
    return rules


def grant(cluster: Cluster, namespace: str, rules: Sequence[dict[str, Any]]) -> None:
    """Make the operator's service account in a namespace, with these rules there and its own."""
    api_group = "rbac.authorization.k8s.io"
    metadata = {"name": ACCOUNT, "namespace": namespace}
    cluster.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        {"apiVersion": f"{api_group}/v1", "kind": "Role", "metadata": metadata, "rules": [*rules, *own_rules()]},
        {
            "apiVersion": f"{api_group}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": api_group, "kind": "Role", "name": ACCOUNT},
            "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": namespace}],
        },
    )


def attentive_options(namespace: str) -> OperatorOptions:
    """Return options of an operator that leads unasked and looks at the cluster's kinds more often than a real one."""
    return OperatorOptions(
        namespaces=(namespace,),
        own_namespace=namespace,
        identity="one",
        runtime_image="runtime:1",
        host="127.0.0.1",
        metrics_port=free_port(),
        lease=None,
        platform_s=0.2,
    )


class OperatorProcess:
    """One operator for one namespace; ``with`` starts and ends it.

    Args:
        server: another address of the API server, such as a proxy's.
        user: another user of the kubeconfig, as it says there who asks; it must be the same account.
    """

    def __init__(
        self,
        cluster: Cluster,
        namespace: str,
        *arguments: str,
        server: str | None = None,
        identity: str = "one",
        user: dict[str, Any] | None = None,
    ) -> None:
        self.port = free_port()
        self.identity = identity
        kubeconfig = _through(cluster.kubeconfig_of(namespace, ACCOUNT), server, f"{namespace}-{identity}", user)
        self.log_path = cluster.folder / f"operator-{namespace}-{identity}-{self.port}.log"
        self._environment = {**os.environ, "KUBECONFIG": str(kubeconfig)}
        self._command = (
            *(sys.executable, "-m", "flyball_operator.cli", "run"),
            *(f"--namespace={namespace}", f"--own-namespace={namespace}", f"--identity={identity}"),
            *("--host=127.0.0.1", f"--metrics-port={self.port}", "--lease-seconds=15", *arguments),
        )

    def start(self) -> Self:
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(self._command, env=self._environment, stdout=log, stderr=log)
        return self

    def __enter__(self) -> Self:
        self.start()
        try:
            self.wait_ready()
        except AssertionError:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.is_running:
            self.kill()
        print(f"--- operator {self.identity}\n{self.log[-8000:]}")  # pytest shows it when the test fails

    def wait_ready(self) -> None:
        until(lambda: self._answer("/readyz").startswith("ok"), f"the operator is ready; its log:\n{self.log[-2000:]}")

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        self._process.terminate()
        return self._process.wait(PATIENCE_S)

    def pause(self) -> None:
        """Stop the process where it is, as a machine does that hangs or sleeps."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def wait(self) -> int:
        """Return the exit code of a process that ends by itself."""
        return self._process.wait(PATIENCE_S)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def is_leader(self) -> bool:
        return "flyball_operator_leader 1.0" in self._answer("/metrics")

    def waits_for(self, what: str) -> bool:
        """Whether /readyz says that it waits for this."""
        return what in self._answer("/readyz")

    @property
    def pid(self) -> int:
        return self._process.pid

    def calls(self, *verbs: str, lease: bool = False) -> dict[str, int]:
        """Return how often it did these, by verb and resource; those on the lease only when asked for."""
        pattern = re.compile(r'flyball_operator_api_calls_total\{code="(.+)",resource="(.+)",verb="(.+)"\} (.+)')
        found: dict[str, int] = {}
        for _, resource, verb, number in pattern.findall(self._answer("/metrics")):
            if verb in verbs and (lease or not resource.startswith("leases.")):
                found[f"{verb} {resource}"] = found.get(f"{verb} {resource}", 0) + int(float(number))
        return found

    def metric(self, name: str) -> float:
        """Return the value of a metric without labels."""
        found = re.search(rf"^{name} (\S+)$", self._answer("/metrics"), re.MULTILINE)
        return float(found[1]) if found else 0.0

    def wait_at_rest(self, timeout_s: float = PATIENCE_S) -> None:
        """Wait until it has written nothing for AT_REST_S."""

        def is_at_rest() -> bool:
            before = self.calls(*WRITES)
            time.sleep(AT_REST_S)
            return bool(before) and self.calls(*WRITES) == before

        until(is_at_rest, "the end of all writes", timeout_s)

    def _answer(self, path: str) -> str:
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}{path}", timeout=30).text
        except httpx.HTTPError as error:
            return f"no answer: {error}"


def _through(kubeconfig: Path, server: str | None, name: str, user: dict[str, Any] | None) -> Path:
    """Return a kubeconfig of its own, for another address or another user if they are given."""
    config = json.loads(kubeconfig.read_text())
    if server is not None:
        config["clusters"][0]["cluster"] = {"server": server}
    if user is not None:
        config["users"][0]["user"] = user
    path = kubeconfig.with_name(f"{name}.kubeconfig")
    path.write_text(json.dumps(config))
    return path
