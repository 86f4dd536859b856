"""What the chart renders to."""

import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from chart_kit import CHART, Helm, goldens
from chart_kit.helm import Manifest, objects
from cluster_kit import CommandFailed
from flyball_operator import cli, names
from flyball_operator.spec import schema

ROOT = CHART.parents[1]


def of_kind(kind: str, rendered: str) -> Manifest:
    (found,) = (one for one in objects(rendered) if one["kind"] == kind)
    return found


def labels_match(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


@pytest.mark.parametrize("values", goldens.VALUES, ids=lambda path: path.stem)
def test_lint_finds_nothing(helm: Helm, values: Path) -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", str(CHART), f"--values={values}")


@pytest.mark.parametrize("values", goldens.VALUES, ids=lambda path: path.stem)
def test_the_render_is_the_one_under_review(values: Path) -> None:
    assert goldens.render(values) == goldens.golden_of(values).read_text(), "if this is meant: make chart"


def test_the_chart_carries_the_crd_of_this_version(helm: Helm) -> None:
    assert goldens.CRD_COPY.read_bytes() == goldens.CRD.read_bytes(), "make chart copies it"
    assert of_kind("CustomResourceDefinition", helm.render()) == yaml.safe_load(schema.crd_text())


def test_helm_never_deletes_the_crd(helm: Helm) -> None:
    crd = of_kind("CustomResourceDefinition", helm.render())
    assert crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_chart_and_package_have_one_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (chart["version"], chart["appVersion"]) == (version, version)


@pytest.mark.parametrize("values", goldens.VALUES, ids=lambda path: path.stem)
def test_the_operator_understands_its_arguments(values: Path) -> None:
    (container,) = of_kind("Deployment", goldens.render(values))["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["flyball-operator"]
    arguments = cli.build_parser().parse_args(container["args"])
    assert arguments.metrics_port == container["ports"][0]["containerPort"]


def test_what_selects_the_operators_pods_finds_them() -> None:
    rendered = goldens.render(goldens.VALUES_OF["everything"])
    pod = of_kind("Deployment", rendered)["spec"]["template"]["metadata"]["labels"]
    service = of_kind("Service", rendered)
    selectors = [
        of_kind("Deployment", rendered)["spec"]["selector"]["matchLabels"],
        of_kind("PodDisruptionBudget", rendered)["spec"]["selector"]["matchLabels"],
        of_kind("NetworkPolicy", rendered)["spec"]["podSelector"]["matchLabels"],
        service["spec"]["selector"],
        names.OPERATOR_LABELS,  # by which the replicas' NetworkPolicies admit it
    ]
    assert all(labels_match(selector, pod) for selector in selectors)
    monitored = of_kind("ServiceMonitor", rendered)["spec"]["selector"]["matchLabels"]
    assert labels_match(monitored, service["metadata"]["labels"])
    test_pod = of_kind("Pod", rendered)["metadata"]["labels"]
    assert not any(labels_match(selector, test_pod) for selector in selectors)


def test_the_network_policy_admits_helm_test() -> None:
    rendered = goldens.render(goldens.VALUES_OF["everything"])
    (rule,) = of_kind("NetworkPolicy", rendered)["spec"]["ingress"]
    admitted = [peer["podSelector"]["matchLabels"] for peer in rule["from"] if "podSelector" in peer]
    assert any(labels_match(selector, of_kind("Pod", rendered)["metadata"]["labels"]) for selector in admitted)


def test_a_namespace_that_looks_like_a_number_stays_a_name(helm: Helm) -> None:
    rendered = helm.render("--set-string=watchNamespaces={123}", release="1e3", namespace="456")
    found = list(objects(rendered))
    named = {one["metadata"].get("namespace") for one in found}
    assert named == {None, "123", "456"}
    deployment = of_kind("Deployment", rendered)
    for labels in (deployment["metadata"]["labels"], deployment["spec"]["template"]["metadata"]["labels"]):
        assert labels["app.kubernetes.io/instance"] == "1e3"


def test_the_longest_release_name_makes_valid_names(helm: Helm) -> None:
    rendered = helm.render(release="r" * 53)  # Helm's own limit
    assert max(len(of_kind(kind, rendered)["metadata"]["name"]) for kind in ("Service", "Deployment")) <= 63


@pytest.mark.parametrize("values", goldens.VALUES, ids=lambda path: path.stem)
def test_each_replica_has_its_own_name_in_the_lease(values: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host name would not do: it is the pod's name cut to 63 characters."""
    (container,) = of_kind("Deployment", goldens.render(values))["spec"]["template"]["spec"]["containers"]
    fields = {one["name"]: one["valueFrom"]["fieldRef"]["fieldPath"] for one in container["env"] if "valueFrom" in one}
    for variable, path in fields.items():
        monkeypatch.setenv(variable, path)
    arguments = cli.build_parser().parse_args(container["args"])
    assert (arguments.identity, arguments.own_namespace) == ("metadata.name", "metadata.namespace")


def test_a_version_with_build_metadata_makes_valid_labels(helm: Helm, tmp_path: Path) -> None:
    chart = shutil.copytree(CHART, tmp_path / "flyball")
    version = yaml.safe_load((chart / "Chart.yaml").read_text())["version"]
    (chart / "Chart.yaml").write_text((CHART / "Chart.yaml").read_text().replace(version, f"{version}+ci.7"))
    labels = of_kind("Deployment", helm.render(chart=chart))["metadata"]["labels"]
    assert labels["helm.sh/chart"] == f"flyball-{version}_ci.7"
    assert labels["app.kubernetes.io/version"] == f"{version}_ci.7"


def test_a_kubernetes_that_does_not_know_the_crds_rules_is_refused(helm: Helm) -> None:
    """isCIDR came with 1.31: before it, the CRD is not accepted."""
    assert helm.render("--kube-version=1.31.0")
    with pytest.raises(CommandFailed, match=r"requires kubeVersion: >=1\.31\.0-0"):
        helm.render("--kube-version=1.30.14")


def named(kind: str, *arguments: str) -> str:
    found = of_kind(kind, Helm().render("--set=userRoles.create=false", *arguments))
    return str(found["metadata"]["name"])


def test_a_release_can_have_another_name() -> None:
    assert named("Deployment") == "flyball-operator"
    assert named("Deployment", "--set=nameOverride=llm") == named("Service", "--set=nameOverride=llm") == "flyball-llm"
    assert named("Deployment", "--set=nameOverride=llm", "--set=fullnameOverride=models") == "models"
    assert len(named("Service", f"--set=nameOverride={'n' * 63}")) == 63


def test_the_account_can_be_one_that_exists(helm: Helm) -> None:
    rendered = helm.render("--set=serviceAccount.create=false", "--set=serviceAccount.name=ours")
    assert of_kind("Deployment", rendered)["spec"]["template"]["spec"]["serviceAccountName"] == "ours"
    found = list(objects(rendered))
    subjects = [one["subjects"] for one in found if one["kind"].endswith("RoleBinding")]
    assert subjects and all([one["name"] for one in each] == ["ours"] for each in subjects)
    assert "ServiceAccount" not in {one["kind"] for one in found}


def test_what_is_added_to_the_pod_replaces_nothing_of_ours() -> None:
    rendered = {name: goldens.render(goldens.VALUES_OF[name]) for name in ("default", "everything")}
    plain, full = (of_kind("Deployment", one)["spec"]["template"] for one in rendered.values())
    labels = full["metadata"]["labels"]
    assert labels.items() >= plain["metadata"]["labels"].items() and labels["example.com/cost-center"] == "42"
    (container,), (ours,) = full["spec"]["containers"], plain["spec"]["containers"]
    assert container["args"][-1] == "--resync-seconds=600"
    for part in ("env", "volumeMounts"):
        assert container[part][:-1] == ours[part]
    assert full["spec"]["volumes"][:-1] == plain["spec"]["volumes"]
    assert full["spec"]["securityContext"] == {
        **plain["spec"]["securityContext"],
        **dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), 1000),
    }


HAS_NO_USE = {"service", "ingress", "httpRoute", "livenessProbe", "readinessProbe", "autoscaling", "automount"}
"""Values of a new chart for what the operator has not, or must not have otherwise."""


def test_values_have_the_names_that_helm_gives_those_of_a_new_chart(helm: Helm, tmp_path: Path) -> None:
    helm("create", str(tmp_path / "new"))
    theirs = yaml.safe_load((tmp_path / "new" / "values.yaml").read_text())
    ours = yaml.safe_load((CHART / "values.yaml").read_text())
    assert {*theirs} - {*ours} <= HAS_NO_USE
    for name in ("image", "serviceAccount"):
        assert {*theirs[name]} - {*ours[name]} <= HAS_NO_USE


def leaves(path: str, node: dict[str, Any]) -> Iterator[str]:
    for name, child in node.get("properties", {}).items():
        inner = f"{path}.{name}" if path else name
        yield from leaves(inner, child) if "properties" in child else [inner]


def set_in(values: dict[str, Any], path: str) -> bool:
    for part in path.split("."):
        if not isinstance(values, dict) or part not in values:
            return False
        values = values[part]
    return True


@pytest.mark.parametrize("file", [CHART / "values.yaml", goldens.VALUES_OF["everything"]], ids=lambda path: path.name)
def test_every_value_of_the_schema_is_there(file: Path) -> None:
    described = set(leaves("", yaml.safe_load((CHART / "values.schema.json").read_text()))) - {"global", "replicas"}
    assert len(described) > 20
    values = yaml.safe_load(file.read_text())
    assert not {path for path in described if not set_in(values, path)}
