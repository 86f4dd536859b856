"""Go programs that tests need: built once, kept under ~/.cache/flyball by version."""

import fcntl
import hashlib
import inspect
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cluster_kit.errors import CommandFailed, MissingProgram
from cluster_kit.go_module import GoModule


@dataclass(frozen=True)
class GoProgram:
    """One or more packages of a Go module in this repository; its go.mod is where versions are pinned.

    Args:
        name: of the folder in the cache.
        module: the folder of go.mod; everything in it is part of the cache's key.
        versioned_by: the required module whose version names the build.
        packages: what is built; each leaves a binary of its last path element's name, "." of the folder's.
        ldflags: for the linker; ``{version}`` stands for the version.
        trim: removes what is not needed from a copy of the module ``versioned_by``, which is built in its place. A function
            that needs nothing around it: its source is part of the cache's key.
    """

    name: str
    module: Path
    versioned_by: str
    packages: tuple[str, ...] = (".",)
    tags: str = ""
    ldflags: str = "-s -w"
    trim: Callable[[Path], None] | None = None

    @property
    def version(self) -> str:
        return _first(rf"^(?:require )?\s*{re.escape(self.versioned_by)} (v\S+)", self.module / "go.mod")

    @property
    def folder(self) -> Path:
        """Where the binaries are, once built."""
        return cache_folder() / f"{self.name}-{self.version.removeprefix('v')}-{self._digest()}"

    def build(self) -> Path:
        """Return the folder of the binaries, after building them if nobody has yet: minutes when Go's cache is cold."""
        with locked(self._beside("lock")):
            if not self.folder.exists():
                self._build()
        return self.folder

    def _beside(self, suffix: str) -> Path:
        return self.folder.with_name(f"{self.folder.name}.{suffix}")

    def _build(self) -> None:
        unfinished = self._beside("unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        ldflags = f"-ldflags={self.ldflags.format(version=self.version)}"
        no_dwarf = "-gcflags=all=-dwarf=false"  # to make symbols for debuggers takes a ninth of the time
        flags = (f"-tags={self.tags}", no_dwarf, ldflags)
        # What runs beside it counts seconds; who waits for it does not.
        command = ("nice", "-n", "19", self._go(), "build", *flags, "-o", f"{unfinished}/", *self.packages)
        environment = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly -buildvcs=false"}
        with self._sources() as folder:
            _run(command, folder, environment)
        unfinished.rename(self.folder)

    @contextmanager
    def _sources(self) -> Iterator[Path]:
        """Give the folder to build in: our module, or a copy that requires what ``trim`` left."""
        if self.trim is None:
            yield self.module
            return
        with tempfile.TemporaryDirectory() as folder:
            original = GoModule(self.versioned_by, self.version).folder
            # Go's module cache is read-only, its folders too
            _run(("cp", "-r", "--no-preserve=mode", str(original), "trimmed"), folder)
            self.trim(Path(folder, "trimmed"))
            module = shutil.copytree(self.module, Path(folder, "module"))
            _run((self._go(), "mod", "edit", f"-replace={self.versioned_by}=../trimmed"), module)
            yield module

    def _go(self) -> str:
        if found := shutil.which("go"):
            return found
        needed = _first(r"^go (\S+)", self.module / "go.mod")
        raise MissingProgram("go", f"Install Go {needed} or newer from https://go.dev/dl and put it on PATH.")

    def _digest(self) -> str:
        digest = hashlib.sha256(repr((self.packages, self.tags, self.ldflags)).encode())
        if self.trim is not None:
            digest.update(inspect.getsource(self.trim).encode())
        for path in sorted(self.module.rglob("*")):
            if path.is_file():
                digest.update(path.read_bytes())
        return digest.hexdigest()[:10]


def cache_folder() -> Path:
    """Return Flyball's folder in the user's cache, made if need be."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flyball"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _run(command: tuple[str, ...], folder: Path | str, environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise CommandFailed(command, done.returncode, done.stderr)


def _first(pattern: str, file: Path) -> str:
    found = re.search(pattern, file.read_text(), re.MULTILINE)
    if found is None:
        raise ValueError(f"{file} has no line that matches {pattern!r}")
    return found.group(1)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process at a time in; the lock goes with the process that holds it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
