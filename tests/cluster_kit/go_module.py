"""Files out of published Go modules: other projects' CRDs, at the version that is named."""

import json
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cluster_kit.errors import CommandFailed, MissingProgram


@dataclass(frozen=True)
class GoModule:
    """One version of a module. Go downloads it once, checks it and keeps it."""

    path: str
    version: str

    @property
    def folder(self) -> Path:
        """Its files: read-only."""
        return _folder(self)

    def file(self, name: str) -> Path:
        """Return a file of the module, by its path inside."""
        return self.folder / name


@cache
def _folder(module: GoModule) -> Path:
    go = shutil.which("go")
    if go is None:
        raise MissingProgram("go", "Install Go from https://go.dev/dl and put it on PATH.")
    command = (go, "mod", "download", "-json", f"{module.path}@{module.version}")
    with tempfile.TemporaryDirectory() as empty:  # outside any module of ours
        done = subprocess.run(command, cwd=empty, capture_output=True, text=True)
    if done.returncode:
        raise CommandFailed(command, done.returncode, done.stdout + done.stderr)
    return Path(json.loads(done.stdout)["Dir"])
