"""The simulator as machine code: a copy of the packages, in which mypyc has compiled what a step runs.

The numbers are the same to the last bit. What serves is not compiled: this is for runs of many millions of steps.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from flyball_protocol.quoting import lines
from flyball_runtime.core.errors import ConfigError
from flyball_simulation import replica

PACKAGES = (
    *("flyball_protocol", "flyball_runtime", "flyball_operator"),
    *("flyball_clients", "flyball_simulation", "flyball_cli"),
)

MODULES = (
    *(f"flyball_runtime/core/{name}.py" for name in ("measurements", "objective_counts", "window")),
    *(
        f"flyball_runtime/governor/{name}.py"
        for name in ("ghost_cache", "learner", "lengths", "nnls", "pace", "recursive", "store", "work")
    ),
    *(f"flyball_runtime/kv_cache/{name}.py" for name in ("block_pool", "kv_cache")),
    *(f"flyball_runtime/scheduler/{name}.py" for name in ("limits", "outlook", "queue", "scheduler", "seats")),
    "flyball_runtime/engine/engine.py",
    *(f"flyball_simulation/{name}.py" for name in ("executor", "replica")),
)
"""What is compiled. mypyc has no way with classes of msgspec, so modules that define one are not."""

NEEDED = ("mypyc", "setuptools")
MAX_QUOTED_CHARS = 2000
NOT_COPIED = shutil.ignore_patterns("__pycache__", "*.so")


def is_running() -> bool:
    """Whether this process runs the compiled modules."""
    return not (replica.__file__ or "").endswith(".py")


def run(words: Sequence[str]) -> int:
    """Run ``flyball`` with these words on compiled modules, in a process of its own; returns its exit code.

    Raises:
        ConfigError: they cannot be compiled, or not be loaded.
    """
    folder = _folder()
    if _source("flyball_simulation").parent == folder:  # this is that process already
        raise ConfigError(
            f"--compile: this Python does not load the modules that were compiled in {folder}. Delete it."
        )
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-P", "-m", "flyball_cli", *words]
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=False).returncode


def _folder() -> Path:
    """Return the folder with the packages, from the cache or made now. Processes may ask at the same time."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"--compile needs mypy and setuptools; this Python has no {' and no '.join(missing)}. Install them (pip install "
            "mypy setuptools), or leave --compile out."
        )
    sources = {package: _source(package) for package in PACKAGES}
    root = Path(os.environ.get("FLYBALL_CACHE_DIR") or Path.home() / ".cache" / "flyball") / "simulator"
    folder = root / _key(sources)
    if folder.is_dir():
        return folder
    print("flyball simulate: compiling the simulator, which takes about a minute, once", file=sys.stderr)
    try:
        _make(folder, sources)
    except OSError as error:
        raise ConfigError(
            f"--compile cannot write to {root} ({error.strerror}). Set FLYBALL_CACHE_DIR to a folder that can be written."
        ) from error
    return folder


def _make(folder: Path, sources: dict[str, Path]) -> None:
    """Copy the packages to a folder and compile them there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="building-", dir=folder.parent) as temporary:
        made = Path(temporary) / "packages"
        for package, source in sources.items():
            shutil.copytree(source, made / package, ignore=NOT_COPIED)
        _compile(made)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise


def _source(package: str) -> Path:
    """Return the folder of a package, without importing it."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ConfigError(f"--compile copies the package {package}, which is not here. Install Flyball anew.")
    return Path(spec.origin).parent


def _key(sources: dict[str, Path]) -> str:
    """Return a name for what the compiled packages depend on."""
    key = hashlib.sha256(f"{sysconfig.get_config_var('EXT_SUFFIX')} {version('mypy')} {MODULES}".encode())
    for package, source in sources.items():
        for folder, folders, names in os.walk(source):
            left_out = NOT_COPIED(folder, [*folders, *names])
            folders[:] = sorted(set(folders) - left_out)
            for file in (Path(folder, name) for name in sorted(set(names) - left_out)):
                key.update(f"{package}/{file.relative_to(source)}\n".encode())
                key.update(file.read_bytes())
    return key.hexdigest()[:16]


def _compile(folder: Path) -> None:
    """Compile MODULES where they are. Raises ConfigError."""
    words = [sys.executable, "-m", "mypyc", "--ignore-missing-imports", "--follow-imports=silent", *MODULES]
    # products and sums are rounded one by one, as Python does, also where a CPU could fuse them
    flags = f"{os.environ.get('CFLAGS', '')} -ffp-contract=off".strip()
    done = subprocess.run(words, cwd=folder, env=os.environ | {"CFLAGS": flags}, capture_output=True, check=False)
    if done.returncode:
        told = (done.stderr or done.stdout).decode(errors="replace").strip()[-MAX_QUOTED_CHARS:]
        raise ConfigError(
            f"--compile: mypyc ended with {done.returncode}. It needs a C compiler and the headers of Python; without "
            f"--compile the result is the same. It said last:\n{lines(told)}"
        )
    for left in ("build", ".mypy_cache"):
        shutil.rmtree(folder / left, ignore_errors=True)
