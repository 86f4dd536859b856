"""The wheel, built as `python -m build` does: from the source archive. It is installed and used outside of the repository.

The environment that it is installed into sees the other packages of this one, so nothing is downloaded.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import programs
from checkpoints import make_checkpoint
from flyball_kernels.cpu import build
from flyball_protocol import endpoints, installed_version
from ports import free_port

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PACKAGES = ("protocol", "kernels", "runtime", "operator", "clients", "simulation", "cli")
TIMEOUT_S = 600

COPYING_COMPILER = """#!/bin/sh
# Instead of linking, hands out the library that set-up has compiled from the same sources.
case "$*" in
*--version*) echo copying ;;
*-shared*) while [ "$1" != -o ]; do shift; done; cp {library} "$2" ;;
*) while [ "$1" != -o ]; do shift; done; : > "$2" ;;
esac
"""


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def environment(**extra: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "FLYBALL_"))}
    return kept | {"HF_HUB_OFFLINE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"} | extra


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built file."""
    folder = tmp_path_factory.mktemp("build")
    source = folder / "source"
    for name in (*PACKAGES, "crds"):
        unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=unwanted)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run(
        sys.executable, "-c", f"from setuptools.build_meta import build_sdist; build_sdist({str(folder)!r})", cwd=source
    )
    (archive,) = folder.glob("*.tar.gz")
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", folder)
    run(sys.executable, "-m", "pip", "wheel", *options, archive, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and with what it requires, but without the source tree."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin/python", "install", "--no-deps", "--no-index")
    run(*pip, wheel, cwd=folder)
    # Only now, or pip would find the editable Flyball there. The .pth files of a folder that a .pth file names have no effect.
    required = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    (packages_of(folder) / "required.pth").write_text("\n".join(sorted(required)) + "\n")
    return folder


def packages_of(environment_folder: Path) -> Path:
    (found,) = environment_folder.glob("lib/python*/site-packages")
    return found


def test_every_file_of_the_packages_is_in_the_wheel(installed: Path, tmp_path: Path) -> None:
    packages = [f"flyball_{name}" for name in PACKAGES]
    find = f"import importlib.util as u; print(*[u.find_spec(name).origin for name in {packages}], sep='\\n')"
    found = run(installed / "bin/python", "-c", find, cwd=tmp_path).split()
    assert found == [str(packages_of(installed) / package / "__init__.py") for package in packages]
    for name, package in zip(PACKAGES, packages, strict=True):
        assert contents(packages_of(installed) / package) == contents(ROOT / name / package)


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("flyball --version", f"flyball {installed_version()}"),
        ("flyball crd", "kind: CustomResourceDefinition"),
        (f"flyball render -f {ROOT / 'examples/llmdeployment.yaml'}", "kind: Deployment"),
        ("flyball bench --help", "--request-rate"),
        ("flyball simulate --help", "--workload"),
        ("flyball-operator --help", "run the operator on a cluster"),
        ("flyball-operator run --help", "--namespace"),
    ],
)
def test_a_command_of_the_wheel(installed: Path, command: str, shown: str, tmp_path: Path) -> None:
    program, *words = command.split()
    assert shown in run(installed / "bin" / program, *words, cwd=tmp_path)


@pytest.fixture
def copying_compiler(tmp_path: Path) -> Path:
    programs.find("g++")
    compiler = tmp_path / "copying-compiler"
    compiler.write_text(COPYING_COMPILER.format(library=build.build()))
    compiler.chmod(0o755)
    return compiler


@pytest.fixture
def server(installed: Path, copying_compiler: Path, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A ready `flyball serve` of the wheel with an empty cache of compiled kernels: its address, and its log."""
    url, log = f"http://127.0.0.1:{free_port()}", tmp_path / "server.log"
    model = make_checkpoint(tmp_path / "model", "llama3")
    flags = ["--host", "127.0.0.1", "--port", url.rpartition(":")[2], "--admin-port", str(free_port())]
    flags += [
        "--served-model-name",
        "tiny",
        "--dtype",
        "float32",
        "--kv-cache-memory-bytes",
        "64MiB",
        "--num-threads",
        "1",
    ]
    variables = environment(CXX=str(copying_compiler), FLYBALL_CACHE_DIR=str(tmp_path / "cache"))
    with log.open("wb") as output:
        command = [installed / "bin/flyball", "serve", model, *flags]
        process = subprocess.Popen(command, cwd=tmp_path, env=variables, stdout=output, stderr=output)
    try:
        wait_ready(process, url, log)
        yield url, log
    finally:
        process.terminate()
        assert process.wait(TIMEOUT_S) == endpoints.EXIT_OK


def wait_ready(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    for _ in range(TIMEOUT_S * 4):
        assert process.poll() is None, log.read_text()
        try:
            if httpx.get(url + endpoints.READYZ_PATH, timeout=TIMEOUT_S).status_code == 200:
                return
        except httpx.TransportError:
            pass  # it does not listen yet
        time.sleep(0.25)
    raise TimeoutError(log.read_text())


def test_the_wheel_serves_and_says_that_it_compiles_its_kernels(server: tuple[str, Path]) -> None:
    url, log = server
    request = {"model": "tiny", "prompt": "A flyball governor", "max_tokens": 4, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=request, timeout=TIMEOUT_S)
    assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 4)
    lines = log.read_text()
    assert "Compiling the C++ ops for this machine into" in lines
    assert "C++ ops: " in lines
