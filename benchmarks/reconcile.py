"""The operator with 100, 300 and 1,000 LLMDeployments on a real control plane.

    python benchmarks/reconcile.py [--counts 100 300 1000] [--changes 100] [--rest-seconds 60]

For each count, with a fresh operator in a fresh namespace: all resources created at once, until each has its Deployment and
Service; one change of a spec at a time, until its Deployment has changed; a minute in which nobody does anything; an
operator that is killed and started again, and then writes nothing. There are no nodes, so pods stay pending. API server, etcd
and controller manager run on the same machine. (Not called operator.py: that would hide the standard library's module.)
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from common import save

sys.path.append(
    str(Path(__file__).parent.parent / "tests")
)  # the cluster and the operator's process are the tests' own

from cluster_kit import ControlPlane, find_assets
from cluster_kit.api import Api, until
from cluster_kit.llm import llm
from cluster_kit.operator_process import WRITES, OperatorProcess, child_rules, grant
from flyball_operator.cluster.api_server import BUILT_IN_CHILDREN, DEPLOYMENT, LLM_DEPLOYMENT, SERVICE, Kind

CRDS = Path(__file__).parent.parent / "crds"
VERBS = (*WRITES, "get", "list", "watch")
METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
MAX_P95_S, MAX_MIB, MAX_CALLS_AT_REST = 1.0, 200.0, 30.0
"""What is asked for at every count: of one change, of the process, and calls a minute, which must not grow with the count."""


class Arrivals:
    """A watch that notes when each object first reached each of its generations."""

    def __init__(self, api: Api, kind: Kind, namespace: str) -> None:
        self._news = threading.Condition()
        self._at: dict[tuple[str, int], float] = {}
        self._watch = api.watch(kind.path(namespace), METADATA)
        threading.Thread(target=self._read, daemon=True).start()
        time.sleep(1)

    def _read(self) -> None:
        with contextlib.suppress(httpx.RemoteProtocolError):  # the API server goes before we do
            for event in self._watch:
                metadata = event["object"]["metadata"]
                with self._news:
                    self._at.setdefault((metadata["name"], metadata.get("generation", 1)), time.perf_counter())
                    self._news.notify_all()

    def wait(self, name: str, generation: int, timeout_s: float) -> float:
        """Return when it was there."""
        with self._news:
            if not self._news.wait_for(lambda: (name, generation) in self._at, timeout_s):
                raise TimeoutError(f"{name} did not reach generation {generation} within {timeout_s} s")
            return self._at[name, generation]


def quantiles(values: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50": cuts[49], "p95": cuts[94], "p99": cuts[98], "max": max(values), "count": len(values)}


def peak_mib(operator: OperatorProcess) -> float:
    lines = Path(f"/proc/{operator.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def created(api: Api, namespace: str, names: Sequence[str]) -> dict[str, Any]:
    arrivals = [Arrivals(api, kind, namespace) for kind in (DEPLOYMENT, SERVICE)]
    asked = {}
    start = time.perf_counter()
    for name in names:
        asked[name] = time.perf_counter()
        api.create(LLM_DEPLOYMENT, llm(namespace, name))
    creating_s = time.perf_counter() - start
    took = [max(one.wait(name, 1, 300) for one in arrivals) - at for name, at in asked.items()]
    return {"creating_all_s": creating_s, "to_children_s": quantiles(took)}


def changed(api: Api, namespace: str, names: Sequence[str], changes: int) -> dict[str, float]:
    """One change at a time, the next when the one before is done."""
    arrivals = Arrivals(api, DEPLOYMENT, namespace)
    took = []
    for number in range(changes):
        name = names[number * len(names) // changes]
        generation = (api.get(DEPLOYMENT, namespace, name) or {})["metadata"]["generation"]
        start = time.perf_counter()
        api.merge(LLM_DEPLOYMENT, namespace, name, {"spec": {"runtime": {"maxNumSeqs": 10 + number}}})
        took.append(arrivals.wait(name, generation + 1, 60) - start)
    return quantiles(took)


def versions(api: Api, namespace: str) -> dict[tuple[str, str], Any]:
    """What a write of a child would change: its generation where it has one, else its resource version."""
    children = ((kind.kind, child["metadata"]) for kind in BUILT_IN_CHILDREN for child in api.list(kind, namespace))
    return {(kind, one["name"]): one.get("generation", one["resourceVersion"]) for kind, one in children}


def measure(cluster: ControlPlane, count: int, changes: int, rest_s: float) -> dict[str, Any]:
    namespace = f"bench-{count}"
    names = [f"chat-{number:04}" for number in range(count)]
    cluster.create_namespace(namespace)
    grant(cluster, namespace, child_rules())
    api = Api(cluster.kubeconfig)
    result: dict[str, Any] = {"count": count, "load_average": os.getloadavg()[0]}
    with OperatorProcess(cluster, namespace, "--lease-seconds=15") as operator:
        before = total(operator)
        result |= created(api, namespace, names)
        api_is_quiet(operator)
        result["calls_per_object"] = {key: value / count for key, value in difference(before, total(operator)).items()}
        result["change_to_child_s"] = changed(api, namespace, names, changes)
        api_is_quiet(operator)
        result["at_rest"] = at_rest(operator, count, rest_s)
        result["peak_mib"] = peak_mib(operator)
        operator.kill()
    result["restart"] = restarted(cluster, api, namespace, names)
    for name in names:
        api.delete(LLM_DEPLOYMENT, namespace, name)
    cluster.kubectl("delete", "namespace", namespace, "--wait=false")
    return result


def restarted(cluster: ControlPlane, api: Api, namespace: str, names: Sequence[str]) -> dict[str, Any]:
    before = versions(api, namespace)
    start = time.perf_counter()
    with OperatorProcess(cluster, namespace, "--lease-seconds=15", identity="one") as operator:
        ready_s = time.perf_counter() - start
        until(
            lambda: operator.metric("flyball_operator_reconcile_seconds_count") >= len(names), "one look at each", 120
        )
        looked_s = time.perf_counter() - start
        operator.wait_at_rest()
        writes = sum(operator.calls(*WRITES).values()) - operator.calls("create").get(REVIEWS, 0)
        rewritten = [key for key, value in versions(api, namespace).items() if before.get(key) != value]
        return {
            "to_ready_s": ready_s,
            "to_all_reconciled_s": looked_s,
            "writes": writes,
            "children_rewritten": len(rewritten),
            "peak_mib": peak_mib(operator),
        }


REVIEWS = "create selfsubjectaccessreviews.authorization.k8s.io"


def at_rest(operator: OperatorProcess, count: int, seconds: float) -> dict[str, Any]:
    before = total(operator)
    time.sleep(seconds)
    calls = difference(before, total(operator))
    minutes = seconds / 60
    return {
        "seconds": seconds,
        "calls": calls,
        "writes": sum(number for call, number in calls.items() if call.split()[0] in WRITES and "leases" not in call),
        "calls_per_minute": sum(calls.values()) / minutes,
        "calls_per_object_and_minute": sum(calls.values()) / count / minutes,
    }


def total(operator: OperatorProcess) -> dict[str, int]:
    return operator.calls(*VERBS, lease=True)


def difference(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {key: value - before.get(key, 0) for key, value in after.items() if value != before.get(key, 0)}


def api_is_quiet(operator: OperatorProcess) -> None:
    operator.wait_at_rest(timeout_s=600)


def problems(result: dict[str, Any]) -> list[str]:
    """Return what misses its target."""
    checks: list[tuple[str, Callable[[dict[str, Any]], float], float]] = [
        ("p95 of one change, s", lambda result: result["change_to_child_s"]["p95"], MAX_P95_S),
        ("peak memory, MiB", lambda result: max(result["peak_mib"], result["restart"]["peak_mib"]), MAX_MIB),
        ("calls a minute at rest", lambda result: result["at_rest"]["calls_per_minute"], MAX_CALLS_AT_REST),
        ("writes at rest", lambda result: result["at_rest"]["writes"], 0),
        ("children rewritten by a restart", lambda result: result["restart"]["children_rewritten"], 0),
    ]
    return [
        f"{result['count']} LLMDeployments: {what} is {value:.3g}, more than {most:g}"
        for what, value_of, most in checks
        if (value := value_of(result)) > most
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=[100, 300, 1000])
    parser.add_argument("--changes", type=int, default=100)
    parser.add_argument("--rest-seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    results = []
    with ControlPlane(find_assets()) as cluster:
        cluster.kubectl("apply", "--server-side", "-f", str(CRDS))
        cluster.wait_established("-f", str(CRDS))
        for count in arguments.counts:
            results.append(measure(cluster, count, arguments.changes, arguments.rest_seconds))
            print(json.dumps(results[-1], indent=1), flush=True)
    missed = [problem for result in results for problem in problems(result)]
    save("operator", {"results": results, "missed": missed})
    print("\n".join(missed) or "every target is met")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
