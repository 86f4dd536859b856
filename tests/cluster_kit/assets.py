"""The folder of Kubernetes' binaries: KUBEBUILDER_ASSETS, or our own build."""

import contextlib
import os
from pathlib import Path

from cluster_kit.errors import MissingProgram
from cluster_kit.go_program import GoProgram

ASSETS_VARIABLE = "KUBEBUILDER_ASSETS"
CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
NODE = ("kubelet", "kube-proxy")

KUBE = GoProgram(
    "kube",
    Path(__file__).with_name("kube"),
    versioned_by="k8s.io/kubernetes",
    ldflags=(
        "-s -w -X k8s.io/component-base/version.gitVersion={version} -X k8s.io/client-go/pkg/version.gitVersion={version}"
    ),
)


def find_assets(parts: tuple[str, ...] = CONTROL_PLANE) -> Path:
    """Return a folder with a binary for each part; builds it at first use unless KUBEBUILDER_ASSETS names one."""
    given = os.environ.get(ASSETS_VARIABLE)
    folder = Path(given) if given else _built()
    for part in parts:
        if not (folder / part).is_file():
            raise MissingProgram(
                str(folder / part), f"Add it, or unset {ASSETS_VARIABLE} to have the tests build all of Kubernetes."
            )
    return folder


def _built() -> Path:
    """Give our one binary the name of each of its parts."""
    folder = KUBE.build()
    for part in CONTROL_PLANE + NODE:
        link = folder / part
        with contextlib.suppress(FileExistsError):  # made before, or by another process just now
            link.symlink_to("kube")
    return folder
