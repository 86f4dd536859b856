"""The operator's rights, as RBAC rules: what it does, and no more."""

from collections.abc import Iterator

import pytest

from chart_kit import Helm, goldens
from chart_kit.helm import Manifest, objects
from flyball_operator import cli
from flyball_operator.cluster import api_server
from flyball_operator.cluster.admin_token import KEY_SECRET
from flyball_operator.cluster.election import LEASE_NAME

READ = {"list", "watch"}
CHILD = {"get", "list", "watch", "create", "patch", "delete"}

Rule = tuple[str, str, str]
"""Resource with its group as kubectl spells it, verb, and the one object's name or ""."""


def rules(role: Manifest) -> Iterator[Rule]:
    for rule in role["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                for verb in rule["verbs"]:
                    for name in rule.get("resourceNames", [""]):
                        yield ".".join(filter(None, (resource, group))), verb, name


def roles(rendered: str) -> dict[tuple[str, str, str], set[Rule]]:
    """Rules by kind, namespace and name of the role."""
    return {
        (one["kind"], one["metadata"].get("namespace", ""), one["metadata"]["name"]): set(rules(one))
        for one in objects(rendered)
        if one["kind"] in ("Role", "ClusterRole")
    }


def serving() -> set[Rule]:
    """What the operator's own code says it does."""
    children = (*api_server.BUILT_IN_CHILDREN, *api_server.OPTIONAL_CHILDREN)
    return {
        *((api_server.LLM_DEPLOYMENT.resource, verb, "") for verb in READ),
        ("llmdeployments/status.flyball.dev", "patch", ""),
        *((api_server.POD.resource, verb, "") for verb in READ),
        *((child.resource, verb, "") for child in children for verb in CHILD),
        (api_server.SECRET.resource, "create", ""),
        (api_server.EVENT.resource, "create", ""),
        (api_server.EVENT.resource, "patch", ""),
    }


def own(lease: str = LEASE_NAME) -> set[Rule]:
    """What it does in its own namespace."""
    return {
        ("leases.coordination.k8s.io", "get", lease),
        ("leases.coordination.k8s.io", "update", lease),
        ("leases.coordination.k8s.io", "create", ""),
        ("secrets", "get", KEY_SECRET),
        ("secrets", "create", ""),
    }


def test_cluster_wide_rights(helm: Helm) -> None:
    assert roles(helm.render("--set=userRoles.create=false")) == {
        ("ClusterRole", "", "flyball-operator"): serving(),
        ("Role", "flyball-system", "flyball-operator-own"): own(),
    }


def test_rights_in_a_list_of_namespaces(helm: Helm) -> None:
    assert roles(helm.render("--set=watchNamespaces={a,b}", "--set=userRoles.create=false")) == {
        ("Role", "a", "flyball-operator"): serving(),
        ("Role", "b", "flyball-operator"): serving(),
        ("Role", "flyball-system", "flyball-operator-own"): own(),
    }


def test_rights_where_it_is_installed_and_serves(helm: Helm) -> None:
    assert roles(helm.render("--set=watchNamespaces={flyball-system}", "--set=userRoles.create=false")) == {
        ("Role", "flyball-system", "flyball-operator"): serving(),
        ("Role", "flyball-system", "flyball-operator-own"): own(),
    }


def test_each_release_has_a_lease_of_its_own(helm: Helm) -> None:
    """With one between them, the second release in a namespace would wait for ever."""
    rendered = helm.render("--set=userRoles.create=false", release="second")
    (deployment,) = (one for one in objects(rendered) if one["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert cli.build_parser().parse_args(container["args"]).lease_name == "second-operator"
    assert roles(rendered)["Role", "flyball-system", "second-operator-own"] == own("second-operator")


@pytest.mark.parametrize("scope", ["--set=watchNamespaces={a}", "--set-json=watchNamespaces=[]"])
def test_the_right_to_serve_has_one_name_whatever_the_release(helm: Helm, scope: str) -> None:
    """So Helm refuses a second release for the same namespaces."""
    names = [{name for *_, name in roles(helm.render(scope, release=release))} for release in ("one", "two")]
    assert "flyball-operator" in names[0] & names[1]


@pytest.mark.parametrize("values", goldens.VALUES, ids=lambda path: path.stem)
def test_every_binding_has_its_role_and_the_operators_account(values: str) -> None:
    found = list(objects(goldens.render(values)))
    known = {(one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]) for one in found}
    bindings = [one for one in found if one["kind"].endswith("RoleBinding")]
    assert bindings
    for binding in bindings:
        namespace = binding["metadata"].get("namespace")
        assert (binding["roleRef"]["kind"], namespace, binding["roleRef"]["name"]) in known
        assert [(one["kind"], one["namespace"], one["name"]) in known for one in binding["subjects"]] == [True]


@pytest.mark.parametrize("values", goldens.VALUES, ids=lambda path: path.stem)
def test_no_rule_is_a_wildcard_or_leads_to_more_rights(values: str) -> None:
    for found in roles(goldens.render(values)).values():
        for resource, verb, name in found:
            assert "*" not in resource + verb + name
            assert verb not in {"escalate", "bind", "impersonate"}
            assert not resource.endswith(("rbac.authorization.k8s.io", "/token", "/exec", "/proxy"))
            assert resource != "secrets" or verb == "create" or (verb, name) == ("get", KEY_SECRET)
