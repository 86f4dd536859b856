"""The sockets' folder has a path that a socket can have, and goes with the last process that uses it."""

import os
import shutil
import signal
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest
import zmq

from flyball_runtime.core.config import EngineConfig
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.engine import process, runner
from flyball_runtime.engine.heartbeat import Heartbeat
from flyball_runtime.engine.process import Addresses, make_socket_folder, run_engine


@pytest.mark.parametrize("num_chars", [10, 80, 120, 240])
def test_a_socket_can_be_bound_in_it_however_long_tmpdir_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, num_chars: int
) -> None:
    base = tempfile.mkdtemp(dir="/tmp")
    parent = Path(base) / ("x" * max(1, num_chars - len(base) - 1))
    parent.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(parent))
    folder = make_socket_folder()
    try:
        with zmq.Context() as context, context.socket(zmq.PULL) as socket:
            socket.bind(f"ipc://{folder}/from")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert ("TMPDIR" in caplog.text) == (num_chars > 100)
    finally:
        for path in (folder, Path(base)):
            shutil.rmtree(path, ignore_errors=True)


def test_a_folder_that_cannot_be_made_ends_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "x" * 200)
    monkeypatch.setattr(process, "SHORT_FOLDER", tmp_path / "missing")
    with pytest.raises(ConfigError, match="TMPDIR"):
        make_socket_folder()


@pytest.mark.parametrize("killed", [True, False])
def test_the_engine_removes_it_when_the_api_process_was_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, killed: bool
) -> None:
    class Served:
        def __init__(self, *_: Any) -> None: ...

        def serve(self) -> None: ...

    monkeypatch.setattr(runner, "start_engine", lambda *_, **__: None)
    monkeypatch.setattr(process, "EngineProcess", Served)
    monkeypatch.setattr(process, "freeze_startup_objects", lambda: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    folder = tmp_path / "sockets"
    folder.mkdir()
    (folder / "to").touch()
    addresses = Addresses(to_engine="inproc://to", from_engine="inproc://from", folder=folder)
    parent = os.getpid() if killed else os.getppid()
    run_engine(EngineConfig(model="", served_model_name=""), addresses, Heartbeat(), parent, 0.0)
    assert folder.exists() != killed
