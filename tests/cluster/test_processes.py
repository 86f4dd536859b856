"""What the tests start ends with the tests, and what is missing is named."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster_kit import MissingProgram, StartFailed, find_assets
from cluster_kit.assets import ASSETS_VARIABLE, KUBE
from cluster_kit.go_program import GoProgram
from cluster_kit.processes import ProcessGroup

KIT = Path(__file__).parents[1]
OWNER = """
import sys, time
from pathlib import Path
from cluster_kit.processes import ProcessGroup
group = ProcessGroup(Path(sys.argv[1]))
group.start("sleeper", "sh", "-c", "echo $$; exec sleep 600")
print("started", flush=True)
time.sleep(600)
"""


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_killed_session_leaves_no_process(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        (sys.executable, "-c", OWNER, str(tmp_path)),
        env={**os.environ, "PYTHONPATH": str(KIT)},
        stdout=subprocess.PIPE,
    )
    with owner:
        assert owner.stdout is not None and owner.stdout.readline() == b"started\n"
        log = tmp_path / "sleeper.log"
        while not log.read_text().endswith("\n"):
            time.sleep(0.01)
        sleeper = int(log.read_text())
        assert is_running(sleeper)
        owner.kill()
    deadline_s = time.monotonic() + 60
    while is_running(sleeper) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not is_running(sleeper)


def test_a_process_that_ends_early_shows_its_log(tmp_path: Path) -> None:
    group = ProcessGroup(tmp_path)
    try:
        group.start("etcd", "sh", "-c", "echo the port is taken; exit 1")
        with pytest.raises(StartFailed, match=r"(?s)etcd became ready.*the port is taken"):
            group.wait_until("etcd", "ready", lambda: False, timeout_s=10)
    finally:
        group.close()


def test_without_go_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingProgram, match=r"Install Go 1\.\d+.* from https://go.dev/dl"):
        KUBE.build()


def test_given_assets_must_be_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ASSETS_VARIABLE, str(tmp_path))
    (tmp_path / "etcd").touch()
    with pytest.raises(MissingProgram, match=rf"kube-apiserver is not there.*unset {ASSETS_VARIABLE}"):
        find_assets()


def test_a_build_is_kept_under_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert KUBE.folder.parent == tmp_path / "flyball"
    assert KUBE.folder.name.startswith(f"kube-{KUBE.version.removeprefix('v')}-")
    changed = GoProgram(KUBE.name, KUBE.module, KUBE.versioned_by, ldflags="-w")
    assert changed.folder != KUBE.folder
