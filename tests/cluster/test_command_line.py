"""`flyball status` and `flyball logs` against a real API server."""

import pytest

from cluster_kit import Cluster
from cluster_kit.operator_process import OperatorProcess
from cluster_kit.world import NAME, World
from flyball_cli import main
from flyball_operator.cluster.api_server import DEPLOYMENT, LLM_DEPLOYMENT
from flyball_protocol import endpoints


def test_a_deployment_is_shown_and_a_missing_one_is_an_error(
    operator: OperatorProcess,
    cluster: Cluster,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    world.create(replicas=2)
    world.appears(DEPLOYMENT)
    world.appears(LLM_DEPLOYMENT, where=lambda obj: obj.get("status", {}).get("conditions"))
    assert main(["status", NAME, "-n", world.namespace]) == endpoints.EXIT_OK
    shown = capsys.readouterr().out
    assert shown.startswith(
        f"{world.namespace}/{NAME}  http://{NAME}.{world.namespace}.svc:{endpoints.API_PORT}  0/2 ready"
    )
    assert "Accepted" in shown
    assert main(["status", "-n", world.namespace]) == endpoints.EXIT_OK
    header, row = capsys.readouterr().out.splitlines()
    assert header.split()[:2] == ["Name", "Model"]
    assert row.split()[0] == NAME
    assert main(["status", "-A"]) == endpoints.EXIT_OK
    assert [world.namespace, NAME] in [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert main(["status", "other", "-n", world.namespace]) == endpoints.EXIT_CONFIG_ERROR
    assert 'llmdeployments.flyball.dev "other" not found' in capsys.readouterr().err


def test_logs_of_a_deployment_without_pods_is_an_error(
    cluster: Cluster, world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    world.create()
    assert main(["logs", NAME, "-n", world.namespace]) == endpoints.EXIT_CONFIG_ERROR
    assert f"{world.namespace}/{NAME} has no pods" in capsys.readouterr().err
