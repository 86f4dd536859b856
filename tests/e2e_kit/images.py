"""The images that run on the node, built with buildah from a base that mmdebstrap makes; none comes from a registry."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from cluster_kit.errors import CommandFailed
from cluster_kit.go_program import cache_folder
from e2e_kit.programs import KEDA

ROOT = Path(__file__).parents[2]
DEMO_MODEL = ROOT / "examples" / "demo_model" / "checkpoint"
SUITE = "bookworm"

BASE = f"localhost/debian:{SUITE}"
PAUSE = "localhost/pause:e2e"
RUNTIME = "localhost/flyball-runtime:e2e"
OPERATOR = "localhost/flyball-operator:e2e"
MODEL = "localhost/demo-model:e2e"
KEDA_OPERATOR = "localhost/keda-operator:e2e"
KEDA_ADAPTER = "localhost/keda-adapter:e2e"
ALL = (PAUSE, RUNTIME, OPERATOR, MODEL, KEDA_OPERATOR, KEDA_ADAPTER)

BASE_VARIABLE = "FLYBALL_E2E_BASE"
TORCH_INDEX_VARIABLE = "FLYBALL_E2E_TORCH_INDEX"
PYPI = "https://pypi.org/simple"
CERTIFICATES = "/run/certificates.crt"
SYSTEM_FILES = {"/etc/ssl/certs/ca-certificates.crt": CERTIFICATES, "/etc/pip.conf": "/etc/pip.conf"}
"""Mounted into the builds, not copied, so that they reach the package registries as this machine does."""
MIN_FREE_BYTES = 25 * 10**9
"""What building all images anew and running them takes, and a few GB."""
UNUSED_DOCUMENTS = ("doc", "info", "locale", "man")


def build_all() -> None:
    """Build what is missing or out of date; buildah keeps the layers of the last time."""
    _make_room()
    base = os.environ.get(BASE_VARIABLE) or _debian()
    torch_index = os.environ.get(TORCH_INDEX_VARIABLE, PYPI)
    _build_dockerfile("operator", OPERATOR, base)
    _build_dockerfile("runtime", RUNTIME, base, "DEVICE=cpu", f"TORCH_INDEX={torch_index}")
    _assemble(PAUSE, base, {}, ("/bin/sleep", "infinity"))
    _assemble(MODEL, "scratch", dict.fromkeys(DEMO_MODEL.iterdir(), "/"))
    programs = KEDA.build()
    _assemble(KEDA_OPERATOR, "scratch", {programs / "operator": "/keda"}, ("/keda",))
    _assemble(KEDA_ADAPTER, "scratch", {programs / "adapter": "/keda-adapter"}, ("/keda-adapter",))


def export(image: str, archive: Path) -> None:
    """Write an image to a file that ``ctr images import`` reads."""
    _run("buildah", "push", "--quiet", image, f"docker-archive:{archive}:{image}")


def size(image: str) -> str:
    """Return the size as buildah words it, ``338 MB``."""
    return _run("buildah", "images", "--noheading", "--format", "{{.Size}}", image).strip()


def _make_room() -> None:
    """Each change of the code leaves some 10 GB of layers that no image uses any more."""
    store = _run("buildah", "info", "--format", "{{.store.GraphRoot}}").strip()
    if (free := shutil.disk_usage(store).free) < MIN_FREE_BYTES:
        print(f"e2e: {free / 1e9:.0f} GB free in {store}; removing layers that no image uses", flush=True)
        try:
            _run("buildah", "rmi", "--prune")
        except CommandFailed as error:  # a build that was killed keeps layers in use; the space may do all the same
            print(f"e2e: not all of them could be removed: {error}", flush=True)
        if (free := shutil.disk_usage(store).free) < MIN_FREE_BYTES:
            needed = f"building all of them may take {MIN_FREE_BYTES / 1e9:.0f} GB"
            print(
                f"e2e: {free / 1e9:.0f} GB free, {needed}; `buildah rm --all` removes what killed builds left",
                flush=True,
            )


def _debian() -> str:
    if not _exists(BASE):
        archive = cache_folder() / f"debian-{SUITE}.tar"
        excluded = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in UNUSED_DOCUMENTS]
        caches = '--customize-hook=rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/apt/*'
        # Not later, by a Dockerfile: the package writes to a file on which SYSTEM_FILES are mounted then.
        certificates = "--include=ca-certificates"
        _run("mmdebstrap", "--quiet", "--variant=minbase", certificates, *excluded, caches, SUITE, str(archive))
        _assemble(BASE, "scratch", {archive: "/"}, ("/bin/sh",))
        archive.unlink()
    return BASE


def _build_dockerfile(name: str, image: str, base: str, *arguments: str) -> None:
    flags = [f"--build-arg={argument}" for argument in (f"BASE={base}", *arguments)]
    flags += [f"--volume={here}:{there}:ro" for here, there in SYSTEM_FILES.items() if Path(here).exists()]
    if any(flag.endswith(f":{CERTIFICATES}:ro") for flag in flags):
        flags.append(f"--build-arg=PIP_CERT={CERTIFICATES}")
    dockerfile = ROOT / "docker" / f"{name}.Dockerfile"
    isolation = ("--isolation=chroot", "--network=host")
    _run(
        "buildah",
        "build",
        "--quiet",
        "--layers",
        *isolation,
        *flags,
        f"--tag={image}",
        f"--file={dockerfile}",
        str(ROOT),
    )


def _assemble(image: str, base: str, files: dict[Path, str], command: Sequence[str] = ()) -> None:
    container = _run("buildah", "from", base).strip()
    try:
        for source, target in files.items():
            _run("buildah", "add", "--quiet", container, str(source), target)
        _run("buildah", "config", f"--entrypoint={_json_list(command)}", "--cmd=", container)
        _run("buildah", "commit", "--quiet", container, image)
    finally:
        _run("buildah", "rm", container)


def _json_list(words: Sequence[str]) -> str:
    return "[" + ", ".join(f'"{word}"' for word in words) + "]"


def _exists(image: str) -> bool:
    return bool(_run("buildah", "images", "--quiet", "--filter", f"reference={image}").strip())


def _run(program: str, *arguments: str) -> str:
    command = (shutil.which(program) or program, *arguments)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CommandFailed(command, done.returncode, done.stderr[-4000:])
    return done.stdout
