"""An operator whose kubeconfig has an exec plugin, as those of EKS, GKE and AKS have."""

import json
import sys
from pathlib import Path

from cluster_kit import Cluster
from cluster_kit.operator_process import ACCOUNT, OperatorProcess, child_rules, grant
from cluster_kit.world import World
from flyball_operator.cluster.api_server import DEPLOYMENT

PLUGIN = """
import json, sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
folder = Path(sys.argv[1])
with (folder / "runs").open("a") as runs:
    runs.write("x")
expires = (datetime.now(UTC) + timedelta(seconds=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
status = {"token": (folder / "token").read_text(), "expirationTimestamp": expires}
print(json.dumps({"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": status}))
"""


def test_an_operator_serves_with_the_tokens_of_a_plugin(
    cluster: Cluster, namespace: str, world: World, tmp_path: Path
) -> None:
    """Watches and calls alike."""
    grant(cluster, namespace, child_rules())
    account = json.loads(cluster.kubeconfig_of(namespace, ACCOUNT).read_text())["users"][0]["user"]
    (tmp_path / "plugin.py").write_text(PLUGIN)
    (tmp_path / "token").write_text(account["token"])
    command = {"command": sys.executable, "args": [str(tmp_path / "plugin.py"), str(tmp_path)]}
    user = {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "interactiveMode": "Never", **command}}
    with OperatorProcess(cluster, namespace, user=user) as operator:
        world.create()
        world.appears(DEPLOYMENT)
        world.change(replicas=2)
        world.appears(DEPLOYMENT, where=lambda obj: obj["spec"]["replicas"] == 2)
        assert (tmp_path / "runs").read_text(), "the plugin ran"
        assert operator.is_running
