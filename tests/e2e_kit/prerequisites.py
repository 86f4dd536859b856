"""What a machine must have to run a Kubernetes node; all that is missing is said at once."""

import os
import shutil
from pathlib import Path

from cluster_kit.errors import ClusterError

CNI_PLUGINS = Path("/usr/lib/cni")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
DEBIAN_PACKAGES = {
    "buildah": "buildah",
    "conntrack": "conntrack",
    "curl": "curl",
    "ip": "iproute2",
    "iptables": "iptables",
    "mmdebstrap": "mmdebstrap",
    "mount": "mount",
    "nft": "nftables",
    "prometheus": "prometheus",
    "runc": "runc",
    "setpriv": "util-linux",
    "unshare": "util-linux",
    str(CNI_PLUGINS / "bridge"): "containernetworking-plugins",
}


class MissingPrerequisites(ClusterError):
    def __init__(self, missing: dict[str, str]) -> None:
        packages = " ".join(sorted(set(missing.values())))
        super().__init__(
            f"e2e tests need {', '.join(sorted(missing))}. On Debian: apt-get install --yes --no-install-recommends {packages}"
        )


class NotRoot(ClusterError):
    def __init__(self, uid: int) -> None:
        super().__init__(
            f"e2e tests start a kubelet, containers and network namespaces: run them as root, not as uid {uid}."
        )


def check() -> None:
    """Raise NotRoot or MissingPrerequisites unless a node can run here."""
    if os.geteuid() != 0:
        raise NotRoot(os.geteuid())
    path = f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}"
    missing = {name: package for name, package in DEBIAN_PACKAGES.items() if not shutil.which(name, path=path)}
    if missing:
        raise MissingPrerequisites(missing)
