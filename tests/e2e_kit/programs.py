"""The Go programs of a node. Their versions are in the go.mod files."""

import subprocess
import time
from pathlib import Path

from cluster_kit.assets import find_assets
from cluster_kit.go_program import GoProgram

_MODULES = Path(__file__).with_name("go")

CONTAINERD = GoProgram(
    "containerd",
    _MODULES / "containerd",
    versioned_by="github.com/containerd/containerd/v2",
    packages=tuple(
        f"github.com/containerd/containerd/v2/cmd/{name}" for name in ("containerd", "containerd-shim-runc-v2", "ctr")
    ),
    tags="no_btrfs,no_devmapper,no_zfs",
)
COREDNS = GoProgram("coredns", _MODULES / "coredns", versioned_by="github.com/coredns/coredns")
HELM = GoProgram("helm", _MODULES / "helm", versioned_by="helm.sh/helm/v4", packages=("helm.sh/helm/v4/cmd/helm",))
KEDA = GoProgram(
    "keda",
    _MODULES / "keda",
    versioned_by="github.com/kedacore/keda/v2",
    packages=("github.com/kedacore/keda/v2/cmd/operator", "github.com/kedacore/keda/v2/cmd/adapter"),
)


def build_all() -> None:
    """Build those that nobody has built yet, and say how long each took."""
    others = {program.name: program.build for program in (CONTAINERD, COREDNS, HELM, KEDA)}
    for name, build in {"Kubernetes": find_assets, **others}.items():
        started_s = time.monotonic()
        build()
        print(f"e2e: {name} ready after {time.monotonic() - started_s:.0f} s", flush=True)


def keda_config() -> Path:
    """Return the folder of KEDA's CRDs, roles and Deployments, in Go's module cache: read-only."""
    command = ("go", "list", "-m", "-f", "{{.Dir}}", "github.com/kedacore/keda/v2")
    done = subprocess.run(command, cwd=KEDA.module, check=True, capture_output=True, text=True)
    return Path(done.stdout.strip()) / "config"
