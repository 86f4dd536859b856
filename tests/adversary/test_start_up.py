"""Starts and ends that are not gentle."""

import os
import signal
import tempfile
from pathlib import Path

import pytest

from adversary_kit.condition import log_problems
from flyball_protocol import endpoints
from replicas import Replica, wait_until

pytestmark = pytest.mark.slow


def test_a_long_temporary_folder_is_used_or_refused_in_one_line(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Unix socket's path has 107 bytes at most."""
    folder = tmp_path / ("t" * 120)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    server = Replica(model, log=tmp_path / "server.log")
    try:
        wait_until(lambda: server.process.poll() is not None or is_ready(server), "neither ready nor ended")
        assert server.process.poll() in (None, endpoints.EXIT_CONFIG_ERROR)
        assert not log_problems(server.log.read_bytes())
    finally:
        server.close()


def is_ready(server: Replica) -> bool:
    return "ready: " in server.log.read_text()


def test_a_killed_server_leaves_no_folder(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="fb-") as name:
        monkeypatch.setenv("TMPDIR", name)
        server = Replica(model, log=Path(name).with_suffix(".log"))
        try:
            server.wait_ready()
            engine_pid = server.engine_pid()
            os.kill(server.process.pid, signal.SIGKILL)
            wait_until(lambda: not Path(f"/proc/{engine_pid}").exists(), "the engine lives on")
            wait_until(lambda: not list(Path(name).iterdir()), f"left behind: {list(Path(name).iterdir())}")
        finally:
            server.close()
            server.log.unlink()
