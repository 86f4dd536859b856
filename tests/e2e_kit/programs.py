"""The Go programs of a node. Their versions are in the go.mod files."""

import re
import time
from pathlib import Path

from cluster_kit.assets import find_assets
from cluster_kit.go_module import GoModule
from cluster_kit.go_program import GoProgram

_MODULES = Path(__file__).with_name("go")


def keep_few_scalers(keda: Path) -> None:
    """Leave of KEDA's seventy scalers the two that Flyball uses, for the others' libraries take half of the time to compile.

    Two more stay, for a constant that all use, and because they alone use something that is imported for them.
    """
    folder = keda / "pkg" / "scalers"
    names = ("scaler", "metrics_api_scaler", "prometheus_scaler", "azure_queue_scaler", "cpu_memory_scaler")
    kept = [folder / f"{name}.go" for name in names]
    for path in set(folder.glob("*.go")) - set(kept):
        path.unlink()
    made = set(re.findall(r"^func (New\w+)\(", "".join(path.read_text() for path in kept), re.MULTILINE))
    builder = keda / "pkg" / "scaling" / "scalers_builder.go"
    case = r"\tcase .*:\n(?:.*//.*\n)*\t\treturn scalers\.(\w+)\(.*\n"
    builder.write_text(re.sub(case, lambda found: found[0] if found[1] in made else "", builder.read_text()))


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
    trim=keep_few_scalers,
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
    return GoModule(KEDA.versioned_by, KEDA.version).folder / "config"
