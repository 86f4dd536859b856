"""What values.schema.json refuses, and that Helm's words name the value."""

import pytest

from chart_kit import CHART, Helm
from cluster_kit import CommandFailed

REFUSED = [
    ("replica=2", "additional properties 'replica' not allowed"),
    ("replicas=2", "replicas is now called replicaCount; rename it in your values"),
    ("image.name=x", "at '/image': additional properties 'name' not allowed"),
    ("crds.keep=false", "at '/crds': additional properties 'keep' not allowed"),
    ("replicaCount=0", "at '/replicaCount': minimum: got 0, want 1"),
    ("replicaCount=4", "at '/replicaCount': maximum: got 4, want 3"),
    ("logLevel=info", "at '/logLevel': value must be one of 'Info', 'Debug'"),
    ("metrics.port=80", "at '/metrics/port': minimum: got 80, want 1,024"),
    ("metrics.port=70000", "at '/metrics/port': maximum: got 70,000, want 65,535"),
    ("watchNamespaces=team-a", "at '/watchNamespaces': got string, want array"),
    ("watchNamespaces={Team_A}", "at '/watchNamespaces/0': 'Team_A' does not match pattern"),
    ("watchNamespaces={a,a}", "at '/watchNamespaces': items at 0 and 1 are equal"),
    ("image.repository=a b", "at '/image/repository': 'a b' does not match pattern"),
    ("image.digest=sha256:12", "at '/image/digest': 'sha256:12' does not match pattern"),
    ("image.pullPolicy=always", "at '/image/pullPolicy': value must be one of"),
    ("runtimeImage=a b", "at '/runtimeImage': 'a b' does not match pattern"),
    ("imagePullSecrets={registry}", "at '/imagePullSecrets/0': got string, want object"),
    ("serviceMonitor.enabled=yes", "at '/serviceMonitor/enabled': got string, want boolean"),
    ("serviceMonitor.interval=30", "at '/serviceMonitor/interval': got number, want string"),
    ("prometheusRules.enabled=yes", "at '/prometheusRules/enabled': got string, want boolean"),
    ("dashboards.label.a=b", "at '/dashboards': additional properties 'label' not allowed"),
    ("dashboards.namespace=a/b", "at '/dashboards/namespace': 'a/b' does not match pattern"),
    (
        "networkPolicy.metricsFrom[0].cidr=x",
        "at '/networkPolicy/metricsFrom/0': additional properties 'cidr' not allowed",
    ),
    ("resources.limit.memory=1Gi", "at '/resources': additional properties 'limit' not allowed"),
    ("nodeSelector.zone=1", "at '/nodeSelector/zone': got number, want string"),
    ("podAnnotations.a=true", "at '/podAnnotations/a': got boolean, want string"),
    ("nameOverride=Own", "at '/nameOverride': 'Own' does not match pattern"),
    ("fullnameOverride=1st", "at '/fullnameOverride': '1st' does not match pattern"),
    ("serviceAccount.create=false", "so serviceAccount.name must name an account that exists"),
    ("serviceAccount.automount=true", "at '/serviceAccount': additional properties 'automount' not allowed"),
    ("extraArgs={verbose}", "at '/extraArgs/0': 'verbose' does not match pattern"),
    ("extraEnv[0].value=x", "at '/extraEnv/0': missing property 'name'"),
    ("podLabels.a=1", "at '/podLabels/a': got number, want string"),
    ("tolerations={x}", "at '/tolerations/0': got string, want object"),
]


@pytest.mark.parametrize(("value", "message"), REFUSED, ids=[value for value, _ in REFUSED])
def test_a_value_that_cannot_work_is_refused(helm: Helm, value: str, message: str) -> None:
    with pytest.raises(CommandFailed) as caught:
        helm.render(f"--set={value}")
    assert message in caught.value.stderr


def test_the_chart_can_be_part_of_another(helm: Helm) -> None:
    """Helm gives subcharts the values under global."""
    assert helm("lint", "--strict", str(CHART), "--set=global.registry=example.com")
