"""A cluster as its administrator sees it: a kubeconfig, and kubectl."""

import json
import subprocess
import time
from pathlib import Path
from typing import Any

from cluster_kit.errors import CommandFailed

KUBECTL_TIMEOUT_S = 660.0
PATIENCE_S = 240.0
"""A busy machine takes this long for what takes seconds on an idle one. Kubernetes' controllers add their own periods: some
look up every 30 s what kinds there are, and back off for as long from an API server that was away."""


class Cluster:
    """Somebody's cluster, or (see ControlPlane) our own.

    Args:
        folder: for the kubeconfigs that this makes.
    """

    def __init__(self, kubectl: Path, kubeconfig: Path, folder: Path) -> None:
        self.kubeconfig = kubeconfig
        self.folder = folder
        self._kubectl = kubectl

    @property
    def url(self) -> str:
        return str(self._config()["clusters"][0]["cluster"]["server"])

    def kubectl(self, *arguments: str, input: str | None = None, kubeconfig: Path | None = None) -> str:
        """Run kubectl and return what it printed.

        Raises:
            CommandFailed: with kubectl's words in ``stderr``.
        """
        command = self.kubectl_command(*arguments, kubeconfig=kubeconfig)
        done = subprocess.run(command, input=input, capture_output=True, text=True, timeout=KUBECTL_TIMEOUT_S)
        if done.returncode:
            raise CommandFailed(("kubectl", *arguments), done.returncode, done.stderr)
        return done.stdout

    def kubectl_command(self, *arguments: str, kubeconfig: Path | None = None) -> tuple[str, ...]:
        """Return the whole command, for those who run it in the background."""
        return (str(self._kubectl), f"--kubeconfig={kubeconfig or self.kubeconfig}", *arguments)

    def get(self, *arguments: str) -> dict[str, Any]:
        """Return an object, or a list of them: ``get("pods", "-n", namespace)["items"]``."""
        found: dict[str, Any] = json.loads(self.kubectl("get", "-o", "json", *arguments))
        return found

    def apply(self, *manifests: dict[str, Any]) -> None:
        """Create or change objects, server-side."""
        content = json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests})
        self.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", input=content)

    def create_namespace(self, name: str) -> None:
        """Create a namespace in which pods can be made: those need the default service account."""
        self.kubectl("create", "namespace", name)
        self.wait("create", "serviceaccount/default", "-n", name)

    def wait(self, condition: str, *what: str) -> None:
        """Wait until objects meet a condition of ``kubectl wait --for``. Raises CommandFailed."""
        self.kubectl("wait", f"--for={condition}", *what, f"--timeout={PATIENCE_S:g}s")

    def wait_established(self, *crds: str) -> None:
        """Wait until the API server serves the kinds of these CRDs. Raises CommandFailed.

        kubectl fails on a CRD that is so new that its list of conditions is null.
        """
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                return self.wait("condition=Established", *crds)
            except CommandFailed as error:
                if "accessor error" not in error.stderr or time.monotonic() > deadline_s:
                    raise
            time.sleep(0.1)

    def kubeconfig_of(self, namespace: str, service_account: str) -> Path:
        """Return a kubeconfig that may do what a service account may."""
        token = self.kubectl("-n", namespace, "create", "token", service_account, "--duration=24h").strip()
        config = self._config() | {"users": [{"name": "account", "user": {"token": token}}]}
        config["contexts"][0]["context"]["user"] = "account"
        path = self.folder / f"{namespace}-{service_account}.kubeconfig"
        path.write_text(json.dumps(config))
        return path

    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads(self.kubectl("config", "view", "--raw", "--minify", "-o", "json"))
        return config
