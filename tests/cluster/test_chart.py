"""The chart on a real API server: what it renders is accepted, its rights hold, the CRD comes, changes and stays."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from chart_kit import CHART, Helm, goldens
from chart_kit.helm import NAMESPACE, RELEASE, objects
from cluster_kit import Cluster, CommandFailed, ControlPlane, find_assets
from cluster_kit.api import until
from cluster_kit.cluster import PATIENCE_S
from operator_kit.foreign_crds import PROMETHEUS_OPERATOR
from ports import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

CRD = "crd/llmdeployments.flyball.dev"
ACCOUNT = "flyball-operator"
MONITORING = ("servicemonitors", "prometheusrules")
RESTRICTED = "pod-security.kubernetes.io/enforce=restricted"
CHAT = {
    "apiVersion": "flyball.dev/v1alpha1",
    "kind": "LLMDeployment",
    "metadata": {"name": "chat", "namespace": "team-a"},
    "spec": {"model": {"uri": "hf://Qwen/Qwen3-0.6B"}},
}


@pytest.fixture(scope="module")
def bare() -> Iterator[ControlPlane]:
    """A control plane of our own without the CRD, which is for Helm to bring, change and leave."""
    with ControlPlane(find_assets()) as ours:
        for name in (NAMESPACE, "team-a", "team-b"):
            ours.create_namespace(name)
        yield ours


@pytest.fixture
def helm(bare: ControlPlane) -> Iterator[Helm]:
    """Helm with a release of the chart, which it ends with."""
    helm = Helm(bare)
    install(helm)
    yield helm
    helm("uninstall", RELEASE, f"--namespace={NAMESPACE}", "--ignore-not-found")


def install(helm: Helm, *arguments: str, chart: Path = CHART) -> None:
    helm("upgrade", "--install", RELEASE, str(chart), f"--namespace={NAMESPACE}", *arguments)


def uninstall(helm: Helm) -> str:
    return helm("uninstall", RELEASE, f"--namespace={NAMESPACE}")


def is_there(cluster: Cluster, *what: str) -> bool:
    return bool(cluster.kubectl("get", *what, "--ignore-not-found", "-o", "name"))


def served_fields(cluster: Cluster) -> set[str]:
    (version,) = cluster.get(CRD)["spec"]["versions"]
    return set(version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"])


@pytest.fixture
def next_chart(tmp_path: Path) -> Path:
    """The chart of a later version, whose CRD has one more field."""
    chart = shutil.copytree(CHART, tmp_path / "flyball")
    crd = yaml.safe_load(goldens.CRD.read_text())
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    spec["properties"]["motto"] = {"type": "string"}
    (chart / "files" / goldens.CRD.name).write_text(yaml.safe_dump(crd))
    return chart


def test_an_upgrade_changes_the_crd_and_keeps_what_users_made(helm: Helm, bare: ControlPlane, next_chart: Path) -> None:
    bare.wait_established(CRD)
    bare.apply(CHAT)
    before = bare.get("llmdeployment", "chat", "-n", "team-a")
    assert "motto" not in served_fields(bare)

    install(helm, chart=next_chart)

    assert "motto" in served_fields(bare)
    assert bare.get("llmdeployment", "chat", "-n", "team-a") == before
    bare.apply({**CHAT, "spec": {**CHAT["spec"], "motto": "steady"}})
    helm("rollback", RELEASE, "1", f"--namespace={NAMESPACE}")
    assert "motto" not in served_fields(bare)


def test_an_uninstall_leaves_the_crd_and_what_users_made(helm: Helm, bare: ControlPlane) -> None:
    bare.wait_established(CRD)
    bare.apply(CHAT)
    before = bare.get("llmdeployment", "chat", "-n", "team-a")

    uninstall(helm)

    assert not is_there(
        bare, "deployment,service,serviceaccount,role,rolebinding", "-n", NAMESPACE, "-l", "helm.sh/chart"
    )
    assert not is_there(bare, "clusterrole,clusterrolebinding", "-l", "helm.sh/chart")
    assert bare.get("llmdeployment", "chat", "-n", "team-a") == before
    install(helm)  # takes the CRD over again
    assert bare.get("llmdeployment", "chat", "-n", "team-a") == before


def test_a_release_that_stops_managing_the_crd_leaves_it(helm: Helm, bare: ControlPlane) -> None:
    install(helm, "--set=crds.install=false")
    assert is_there(bare, CRD)


def test_a_crd_that_somebody_applied_goes_under_helm_when_told_to(bare: ControlPlane, tmp_path: Path) -> None:
    helm, theirs = Helm(bare), tmp_path / "crd.yaml"
    theirs.write_text(goldens.CRD.read_text().replace("shortNames: [llmdep]", "shortNames: [model]"))
    bare.kubectl("delete", CRD, "--ignore-not-found")
    bare.kubectl("apply", "--server-side", "-f", str(theirs))
    with pytest.raises(CommandFailed, match="invalid ownership metadata"):
        install(helm)

    install(helm, "--take-ownership", "--force-conflicts")

    assert bare.get(CRD)["spec"]["names"]["shortNames"] == ["llmdep"]
    uninstall(helm)


@pytest.fixture(scope="module")
def monitoring(bare: ControlPlane) -> None:
    """The kinds ServiceMonitor and PrometheusRule, as the Prometheus operator defines them, and where the values put them."""
    for kind in MONITORING:
        crd = PROMETHEUS_OPERATOR.file(f"example/prometheus-operator-crd/monitoring.coreos.com_{kind}.yaml")
        bare.kubectl("apply", "--server-side", f"--filename={crd}")
        bare.wait_established(f"crd/{kind}.monitoring.coreos.com")
    for name in ("monitoring", "grafana"):
        bare.create_namespace(name)


@pytest.mark.usefixtures("monitoring")
@pytest.mark.parametrize("values", goldens.VALUES, ids=lambda path: path.stem)
def test_the_api_server_accepts_every_object(bare: ControlPlane, values: Path) -> None:
    """As new objects, and without a field that it does not know."""
    rendered = Helm().render(f"--values={values}", release="r" * 53)
    strict = ("apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict")
    accepted = bare.kubectl(*strict, "-o=name", "-f=-", input=rendered)
    assert len(accepted.splitlines()) == len(list(objects(rendered)))


@pytest.mark.parametrize("values", goldens.VALUES, ids=lambda path: path.stem)
def test_the_pods_pass_where_only_restricted_ones_do(helm: Helm, bare: ControlPlane, values: Path) -> None:
    bare.kubectl("label", "namespace", NAMESPACE, "--overwrite", RESTRICTED)
    found = {one["kind"]: one for one in objects(Helm().render(f"--values={values}"))}
    template = found["Deployment"]["spec"]["template"]
    pod = {"apiVersion": "v1", "kind": "Pod", "spec": {**template["spec"], "serviceAccountName": ACCOUNT}}
    pod["metadata"] = {**template["metadata"], "name": "operator", "namespace": NAMESPACE}
    for one in (pod, found["Pod"]):
        bare.kubectl("create", "--dry-run=server", "-f", "-", input=json.dumps(one))


def allowed(cluster: Cluster, user: str, namespace: str, *asked: str) -> set[str]:
    """Ask the API server what a user may do in a namespace ("" is all of them).

    Args:
        asked: such as ``get secrets/my-secret``, ``patch deployments.apps`` or ``patch llmdeployments.flyball.dev --scale``.
    """
    reviews = [_review(user, namespace, *_ASKED.findall(one)[0]) for one in asked]
    content = json.dumps({"apiVersion": "v1", "kind": "List", "items": reviews})
    answers = cluster.kubectl("create", '-o=jsonpath={.status.allowed}{"\\n"}', "-f=-", input=content).split()
    return {one for one, answer in zip(asked, answers, strict=True) if answer == "true"}


_ASKED = re.compile(r"(\w+) (\w+)(?:\.([\w.]+))?(?:/([\w-]+))?(?: --(\w+))?")


def _review(user: str, namespace: str, verb: str, resource: str, group: str, name: str, part: str) -> dict[str, Any]:
    what = {
        "verb": verb,
        "resource": resource,
        "group": group,
        "name": name,
        "subresource": part,
        "namespace": namespace,
    }
    spec = {"user": user, "resourceAttributes": what}
    return {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}


OPERATOR = f"system:serviceaccount:{NAMESPACE}:{ACCOUNT}"
SECRET_VERBS = ("get", "create", "list", "watch", "update", "patch", "delete", "deletecollection")


def test_the_account_creates_secrets_and_reads_none(helm: Helm, bare: ControlPlane) -> None:
    def verbs(resource: str, namespace: str) -> set[str]:
        found = allowed(bare, OPERATOR, namespace, *(f"{verb} {resource}" for verb in SECRET_VERBS))
        return {one.split()[0] for one in found}

    assert verbs("secrets", "") == {"create"}
    assert verbs("secrets", "team-a") == {"create"}
    assert verbs("secrets/flyball-operator-key", NAMESPACE) == {"create", "get"}
    assert verbs("secrets/another", NAMESPACE) == {"create"}
    with pytest.raises(CommandFailed, match='cannot list resource "secrets"'):
        bare.kubectl("get", "secrets", "-n", "team-a", kubeconfig=bare.kubeconfig_of(NAMESPACE, ACCOUNT))


def test_an_account_for_namespaces_has_no_rights_elsewhere(helm: Helm, bare: ControlPlane) -> None:
    install(helm, "--set=watchNamespaces={team-a}")
    rights = ("list llmdeployments.flyball.dev", "patch deployments.apps", "create secrets", "list pods")
    assert allowed(bare, OPERATOR, "team-a", *rights) == {*rights}
    assert allowed(bare, OPERATOR, "team-b", *rights) == set()
    assert allowed(bare, OPERATOR, "", *rights) == set()
    assert allowed(bare, OPERATOR, NAMESPACE, *rights) == {"create secrets"}  # of its key


def bind(role: str) -> dict[str, Any]:
    group = "rbac.authorization.k8s.io"
    return {
        "apiVersion": f"{group}/v1",
        "kind": "RoleBinding",
        "metadata": {"name": f"user-{role}", "namespace": "team-a"},
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": role},
        "subjects": [{"kind": "User", "apiGroup": group, "name": f"user-{role}"}],
    }


@pytest.mark.usefixtures("helm")
@pytest.mark.parametrize(("role", "writes"), [("view", False), ("edit", True)])
def test_who_may_do_it_to_pods_may_do_it_to_llmdeployments(bare: ControlPlane, role: str, writes: bool) -> None:
    """The controller manager adds rules to the cluster's roles, and removes an earlier release's, some time later."""
    bare.apply(bind(role))
    writing = {
        "create llmdeployments.flyball.dev",
        "delete llmdeployments.flyball.dev",
        "patch llmdeployments.flyball.dev --scale",
    }
    asked = {*writing, "watch llmdeployments.flyball.dev", "patch llmdeployments.flyball.dev --status"}
    expected = {"watch llmdeployments.flyball.dev", *(writing if writes else ())}
    until(lambda: allowed(bare, f"user-{role}", "team-a", *asked) == expected, f"the rights {sorted(expected)}")


def rendered(kind: str, *arguments: str, release: str = RELEASE) -> dict[str, Any]:
    (found,) = (one for one in objects(Helm().render(*arguments, release=release)) if one["kind"] == kind)
    return found


@contextmanager
def running_operator(cluster: ControlPlane, *arguments: str, release: str = RELEASE) -> Iterator[int]:
    """Run an operator as the Deployment of a release says, under its account; yields its metrics port."""
    port, account = free_port(), f"{release}-operator"
    (container,) = rendered("Deployment", *arguments, release=release)["spec"]["template"]["spec"]["containers"]
    environment = {
        **os.environ,
        "KUBECONFIG": str(cluster.kubeconfig_of(NAMESPACE, account)),
        "POD_NAMESPACE": NAMESPACE,
        "POD_NAME": account,
    }
    here = ("--host=127.0.0.1", f"--metrics-port={port}")
    command = (sys.executable, "-m", "flyball_operator.cli", *container["args"], *here)
    cluster.processes.start(account, *command, environment=environment)
    try:
        yield port
    finally:
        cluster.processes.kill(account)


@pytest.fixture
def operator_port(helm: Helm, bare: ControlPlane) -> Iterator[int]:
    """The metrics port of an operator that runs as the chart's Deployment says, under the release's account."""
    with running_operator(bare) as port:
        yield port


def helm_test(port: int, patience_s: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
    """Run what the pod of `helm test` runs."""
    (container,) = rendered("Pod")["spec"]["containers"]
    program, flag = container["command"]
    script, url = container["args"]
    assert (program, flag, url) == ("python", "-c", f"http://flyball-operator.{NAMESPACE}:8080/metrics")
    patient = script.replace("monotonic() + 60", f"monotonic() + {patience_s}")
    command = (sys.executable, flag, patient, f"http://127.0.0.1:{port}/metrics")
    return subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE_S)


def test_an_installed_operator_leads_and_makes_a_model(operator_port: int, bare: ControlPlane) -> None:
    told = helm_test(operator_port)
    assert told.stdout == "an operator is ready and leads\n", told.stderr + bare.processes.log_tail(ACCOUNT)
    assert told.returncode == 0
    bare.apply({**CHAT, "metadata": {"name": "made", "namespace": "team-a"}})
    for child in ("deployment/made", "service/made"):
        bare.wait("create", child, "-n=team-a")


def test_two_releases_in_a_namespace_serve_side_by_side(helm: Helm, bare: ControlPlane) -> None:
    """Each for a namespace of its own, with a lease of its own."""
    second, none = "second", ("--set=crds.install=false", "--set=userRoles.create=false")
    scopes = {RELEASE: "--set=watchNamespaces={team-a}", second: "--set=watchNamespaces={team-b}"}
    install(helm, scopes[RELEASE])
    helm("install", second, str(CHART), f"--namespace={NAMESPACE}", scopes[second], *none)
    with ExitStack() as operators:
        operators.callback(helm, "uninstall", second, f"--namespace={NAMESPACE}")
        for release, scope in scopes.items():
            told = helm_test(operators.enter_context(running_operator(bare, scope, release=release)))
            assert told.returncode == 0, told.stderr + bare.processes.log_tail(f"{release}-operator")
        for namespace in ("team-a", "team-b"):
            bare.apply({**CHAT, "metadata": {"name": "side", "namespace": namespace}})
            bare.wait("create", "deployment/side", f"-n={namespace}")


@pytest.mark.parametrize("scope", ["--set=watchNamespaces={team-a}", "--set-json=watchNamespaces=[]"])
def test_a_namespace_that_a_release_serves_is_refused_to_another(helm: Helm, scope: str) -> None:
    """Two operators would undo each other's changes without end."""
    install(helm, scope)
    none = ("--set=crds.install=false", "--set=userRoles.create=false")
    with pytest.raises(CommandFailed, match=r'Role.* "flyball-operator" .*cannot be imported .*must equal "second"'):
        helm("install", "second", str(CHART), f"--namespace={NAMESPACE}", scope, *none)


def test_helm_test_says_what_is_wrong() -> None:
    told = helm_test(free_port(), 1)
    assert told.returncode == 1
    assert "no ready operator leads" in told.stderr
    assert "Connection refused" in told.stderr
