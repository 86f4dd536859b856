"""A cluster of one node: control plane, containerd, kubelet, kube-proxy, CoreDNS."""

import json
import subprocess
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster_kit.assets import CONTROL_PLANE, NODE, find_assets
from cluster_kit.control_plane import ControlPlane
from cluster_kit.errors import CommandFailed
from e2e_kit import images, network
from e2e_kit.prerequisites import CNI_PLUGINS
from e2e_kit.programs import CONTAINERD, COREDNS

NAME = "node1"
MODELS = "llmdeployments.flyball.dev"
PODS_OF_MODELS = "app.kubernetes.io/name=flyball"
START_TIMEOUT_S = 60.0
DELETE_TIMEOUT_S = 300.0


class Node(ControlPlane):
    """Runs pods for real. Must be alone in its network, mount and PID namespaces, which end what it leaves.

    Args:
        folder: for everything that the node keeps; 10 GB with the images.
    """

    address = network.NODE_IP

    def __init__(self, folder: Path) -> None:
        network.set_up()
        super().__init__(find_assets(CONTROL_PLANE + NODE), folder)
        self._socket = folder / "containerd.sock"
        self._containerd = CONTAINERD.build()

    def start(self) -> None:
        super().start()
        self._start_containerd()
        self.import_image(images.PAUSE)
        self._start_kubelet()
        self._start_proxy()
        self._start_dns()
        self.kubectl("wait", "--for=create", f"node/{NAME}", f"--timeout={START_TIMEOUT_S}s")
        self.kubectl("wait", "--for=condition=Ready", f"node/{NAME}", f"--timeout={START_TIMEOUT_S}s")

    def take_apiserver_away(self) -> None:
        """Stop the API server, and with it those that need it to stay leaders: a leader ends when it cannot renew its lease."""
        self.stop_apiserver()
        for part in ("kube-controller-manager", "kube-scheduler"):
            self.processes.kill(part)

    def bring_apiserver_back(self) -> None:
        """Start the API server, and the leaders that ended with it; where they are static pods, the kubelet does that."""
        self.start_apiserver()
        self.start_controllers()

    def close(self) -> None:
        """End the processes; containers, mounts and files go with the namespaces."""
        self.processes.close()

    @contextmanager
    def namespace(self) -> Iterator[str]:
        """Make a namespace, and delete it at the end, with all that is in it.

        Models go first: a namespace that still has pods is looked at again after half of their grace period, here minutes.
        """
        name = f"e2e-{uuid.uuid4().hex[:8]}"
        self.create_namespace(name)
        yield name
        self._delete_models(name)
        self.kubectl("delete", "namespace", name, f"--timeout={DELETE_TIMEOUT_S:g}s")

    def _delete_models(self, namespace: str) -> None:
        """Delete the LLMDeployments of a namespace, and wait until their pods are gone, or for as long as that may take."""
        if not self.kubectl("get", "crd", MODELS, "--ignore-not-found", "-o", "name"):
            return
        self.kubectl("-n", namespace, "delete", MODELS, "--all")
        deadline_s = time.monotonic() + DELETE_TIMEOUT_S
        while self.get("pods", "-n", namespace, "-l", PODS_OF_MODELS)["items"] and time.monotonic() < deadline_s:
            time.sleep(0.5)

    def apiserver_flags(self) -> Iterable[str]:
        front_proxy = self.pki.front_proxy
        return (
            f"--advertise-address={self.address}",
            "--kubelet-preferred-address-types=InternalIP",
            f"--kubelet-client-certificate={self.pki.admin.certificate}",
            f"--kubelet-client-key={self.pki.admin.key}",
            "--enable-aggregator-routing",
            f"--requestheader-client-ca-file={self.pki.ca}",
            "--requestheader-allowed-names=front-proxy",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--proxy-client-cert-file={front_proxy.certificate}",
            f"--proxy-client-key-file={front_proxy.key}",
        )

    def import_image(self, image: str) -> None:
        """Bring an image that buildah has to the node."""
        archive = self.folder / "image.tar"
        images.export(image, archive)
        self._ctr("images", "import", str(archive))
        archive.unlink()

    def tag_image(self, image: str, *names: str) -> None:
        """Give an image of the node further names."""
        self._ctr("images", "tag", "--force", image, *names)

    def patch_gpus(self, count: int) -> None:
        """Let the node say that it has GPUs, as a device plugin would."""
        patch = {"status": {"capacity": {"nvidia.com/gpu": str(count)}}}
        self.kubectl("patch", "node", NAME, "--subresource=status", "--type=merge", "-p", json.dumps(patch))

    def _start_containerd(self) -> None:
        self._write("cni/10-bridge.conflist", json.dumps(self._cni()))
        config = self._write("containerd.toml", self._containerd_toml())
        self.processes.start(
            "containerd", str(self._containerd / "containerd"), f"--config={config}", environment=self._environment()
        )
        self.processes.wait_until("containerd", "ready", self._containerd_answers, START_TIMEOUT_S)

    def _start_kubelet(self) -> None:
        config = self._write("kubelet.json", json.dumps(self._kubelet()))
        self.start_part(
            "kubelet",
            f"--config={config}",
            f"--kubeconfig={self.kubeconfig}",
            f"--root-dir={self.folder / 'kubelet'}",
            f"--hostname-override={NAME}",
            f"--node-ip={self.address}",
        )

    def _start_proxy(self) -> None:
        self.start_part(
            "kube-proxy",
            f"--kubeconfig={self.kubeconfig}",
            f"--hostname-override={NAME}",
            "--proxy-mode=nftables",
            f"--cluster-cidr={network.POD_RANGE}",
            # Limits of the whole machine, which a namespace may not set.
            "--conntrack-max-per-core=0",
            "--conntrack-tcp-timeout-established=0s",
            "--conntrack-tcp-timeout-close-wait=0s",
        )

    def _start_dns(self) -> None:
        corefile = self._write("Corefile", self._corefile())
        self.processes.start("coredns", str(COREDNS.build() / "coredns"), "-conf", str(corefile))

    def _containerd_answers(self) -> bool:
        try:
            self._ctr("version")
        except CommandFailed:
            return False
        return True

    def _ctr(self, *arguments: str) -> str:
        command = (str(self._containerd / "ctr"), f"--address={self._socket}", "--namespace=k8s.io", *arguments)
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise CommandFailed(command, done.returncode, done.stderr)
        return done.stdout

    def _environment(self) -> dict[str, str]:
        return {"PATH": f"{self._containerd}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}

    def _write(self, name: str, content: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        return path

    def _containerd_toml(self) -> str:
        # restrict_oom_score_adj: without CAP_SYS_RESOURCE runc may not lower oom_score_adj, and no sandbox would start.
        return f"""
            version = 3
            root = "{self.folder}/containerd"
            state = "{self.folder}/containerd-run"
            [grpc]
              address = "{self._socket}"
            [plugins."io.containerd.cri.v1.runtime"]
              restrict_oom_score_adj = true
              netns_mounts_under_state_dir = true
            [plugins."io.containerd.cri.v1.runtime".cni]
              bin_dirs = ["{CNI_PLUGINS}"]
              conf_dir = "{self.folder}/cni"
            [plugins."io.containerd.cri.v1.images".pinned_images]
              sandbox = "{images.PAUSE}"
            """

    def _cni(self) -> dict[str, object]:
        ranges = [[{"subnet": network.POD_RANGE}]]
        bridge = {
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": True,
            "hairpinMode": True,
            "ipam": {
                "type": "host-local",
                "ranges": ranges,
                "routes": [{"dst": "0.0.0.0/0"}],
                "dataDir": f"{self.folder}/ipam",
            },
        }
        ports = {"type": "portmap", "capabilities": {"portMappings": True}}
        return {"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge, ports]}

    def _kubelet(self) -> dict[str, object]:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "containerRuntimeEndpoint": f"unix://{self._socket}",
            # Machines with cgroup v1, and those where nobody may lay out the cgroups anew.
            "failCgroupV1": False,
            "cgroupDriver": "cgroupfs",
            "cgroupsPerQOS": False,
            "enforceNodeAllocatable": [],
            "authentication": {"anonymous": {"enabled": False}, "x509": {"clientCAFile": str(self.pki.ca)}},
            "authorization": {"mode": "AlwaysAllow"},
            "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1Gi"},
            "imageGCHighThresholdPercent": 100,
            # Tests kill the same container many times.
            "featureGates": {"KubeletCrashLoopBackOffMax": True},
            "crashLoopBackOff": {"maxContainerRestartPeriod": "2s"},
            "clusterDNS": [self.address],
            "clusterDomain": "cluster.local",
        }

    def _corefile(self) -> str:
        return f"""
            .:53 {{
              bind {self.address}
              kubernetes cluster.local in-addr.arpa {{
                kubeconfig {self.kubeconfig} test
              }}
              errors
            }}
            """
