"""etcd, API server, controller manager and scheduler as processes of the test session."""

import json
import shutil
import ssl
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from cluster_kit.cluster import Cluster
from cluster_kit.pki import Pki
from cluster_kit.processes import ProcessGroup
from ports import free_port

LOOPBACK = "127.0.0.1"
SERVICE_RANGE = "10.96.0.0/16"
FIRST_SERVICE = "10.96.0.1"
"""The address of the Service ``kubernetes``."""
START_TIMEOUT_S = 240.0


class ControlPlane(Cluster):
    """A Kubernetes without nodes, with RBAC on. Pods are made and scheduled if a test adds a node, but nothing runs them.

    ``pki.admin`` and ``pki.ca`` are for clients that do not read kubeconfigs.
    """

    address = LOOPBACK

    def __init__(self, assets: Path, folder: Path | None = None) -> None:
        folder = folder or Path(tempfile.mkdtemp(prefix="flyball-cluster-"))
        super().__init__(assets / "kubectl", folder / "kubeconfig", folder)
        self.pki = Pki.create(folder, self.address, FIRST_SERVICE)
        self.processes = ProcessGroup(folder)
        self._assets = assets
        self._port = free_port()
        self._etcd_url = f"http://{LOOPBACK}:{free_port()}"
        self._trust = ssl.create_default_context(cafile=str(self.pki.ca))
        self._write_kubeconfig()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def start(self) -> None:
        self._start_etcd()
        self.start_apiserver()
        self.start_controllers()

    def close(self) -> None:
        self.processes.close()
        shutil.rmtree(self.folder)

    @property
    def url(self) -> str:
        return f"https://{self.address}:{self._port}"

    def start_apiserver(self) -> None:
        """Start the API server where it was before, and return when it is ready."""
        pki = self.pki
        self.start_part(
            "kube-apiserver",
            f"--etcd-servers={self._etcd_url}",
            f"--bind-address={self.address}",
            f"--secure-port={self._port}",
            f"--service-cluster-ip-range={SERVICE_RANGE}",
            *self.apiserver_flags(),
            "--authorization-mode=Node,RBAC",
            "--allow-privileged",
            "--profiling=false",
            f"--client-ca-file={pki.ca}",
            f"--tls-cert-file={pki.server.certificate}",
            f"--tls-private-key-file={pki.server.key}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={pki.service_accounts.key}",
            f"--service-account-signing-key-file={pki.service_accounts.key}",
        )
        self.processes.wait_until("kube-apiserver", "ready", self._is_ready, START_TIMEOUT_S)

    def apiserver_flags(self) -> Iterable[str]:
        """Return the flags that a cluster with nodes has otherwise: a loopback address may not be an endpoint."""
        return ("--endpoint-reconciler-type=none",)

    def stop_apiserver(self) -> None:
        """Take the API server away, without a word to its clients. What it stored stays."""
        self.processes.kill("kube-apiserver")

    def _start_etcd(self) -> None:
        peer = f"http://{LOOPBACK}:{free_port()}"
        self.start_part(
            "etcd",
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={self._etcd_url}",
            f"--advertise-client-urls={self._etcd_url}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
        )

    def start_controllers(self) -> None:
        """Start controller manager and scheduler."""
        self.start_part("kube-scheduler", f"--kubeconfig={self.kubeconfig}", "--leader-elect=false", "--secure-port=0")
        self.start_part(
            "kube-controller-manager",
            f"--kubeconfig={self.kubeconfig}",
            f"--service-account-private-key-file={self.pki.service_accounts.key}",
            f"--root-ca-file={self.pki.ca}",
            "--use-service-account-credentials",
            "--leader-elect=false",
            "--secure-port=0",
            "--kube-api-qps=500",
            "--kube-api-burst=1000",
            "--horizontal-pod-autoscaler-sync-period=1s",
            # Pods of the tests are on a node that does not exist. This one deletes such pods after 40 s, and at once when it
            # has met the node's name before.
            "--controllers=*,-pod-garbage-collector-controller",
        )

    def start_part(self, part: str, *flags: str) -> None:
        """Start one of the binaries of the control plane's folder."""
        self.processes.start(part, str(self._assets / part), *flags)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/readyz", context=self._trust, timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def _write_kubeconfig(self) -> None:
        admin = self.pki.admin
        user = {"client-certificate": str(admin.certificate), "client-key": str(admin.key)}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": {"server": self.url, "certificate-authority": str(self.pki.ca)}}],
            "users": [{"name": "admin", "user": user}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
            "current-context": "test",
        }
        self.kubeconfig.write_text(json.dumps(config))
