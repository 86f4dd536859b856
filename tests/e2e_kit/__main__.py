"""Prepare this machine for the e2e tests, then run them in namespaces of their own: python -m e2e_kit [pytest's arguments]

Binaries and images are made out here, where the package registries are. The tests run where no packet leaves; when they end,
or are killed, the kernel ends every process and mount that they leave.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cluster_kit import ClusterError
from cluster_kit.go_program import cache_folder, locked
from e2e_kit import FOLDER_VARIABLE
from e2e_kit.prepare import prepare

ISOLATION = (
    *("setpriv", "--pdeathsig=KILL"),  # ends unshare with us
    *("unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"),
)
KEEP_PID_1 = '"$@"; exit $?'
"""pytest must not be process 1 of its namespace: that one has to reap the orphans, and a shell does."""


def main(arguments: Sequence[str]) -> int:
    try:
        print("e2e: preparing programs and images, a quarter of an hour the first time, a minute later", flush=True)
        prepare()
    except ClusterError as error:
        print(f"e2e: {error}", file=sys.stderr)
        return 2
    with state_folder() as folder:
        pytest = (sys.executable, "-m", "pytest", "-m", "e2e", "--durations=10", "tests/e2e", *arguments)
        environment = os.environ | {FOLDER_VARIABLE: str(folder)}
        return subprocess.run((*ISOLATION, "sh", "-c", KEEP_PID_1, "sh", *pytest), env=environment).returncode


@contextmanager
def state_folder() -> Iterator[Path]:
    """An empty folder for the node, one session at a time; what a killed session left is removed first."""
    folder = cache_folder() / "e2e-node"
    with locked(folder.with_suffix(".lock")):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
