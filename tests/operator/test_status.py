"""`flyball status` asks the instance that runs."""

import asyncio
import json
import socket
from pathlib import Path

import pytest

from flyball_operator import cli
from flyball_operator.errors import LocalError
from flyball_operator.local.control import InstanceFolder, ask_status
from operator_kit.local import running


def test_status_is_the_running_instances_snapshot() -> None:
    async def scenario() -> None:
        async with running(2, replicas=2) as now:
            snapshot = await ask_status(now.folder)
            assert (snapshot.name, snapshot.url) == (now.runner.snapshot().name, now.runner.url)
            assert [replica.number for replica in snapshot.replicas] == [1, 2]

    asyncio.run(scenario())


def test_status_of_nothing_says_how_to_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LocalError, match="no instance runs"):
        asyncio.run(ask_status(InstanceFolder(tmp_path, "demo")))
    assert cli.main(["status", "demo", "--state-dir", str(tmp_path)]) == 2
    assert "start one with flyball local" in capsys.readouterr().err


def test_status_prints_a_table_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> None:
        async with running(1) as now:
            arguments = ["status", now.folder.path.name, "--state-dir", str(now.folder.path.parent)]
            assert await asyncio.to_thread(cli.main, arguments) == 0
            assert "1/1 ready" in capsys.readouterr().out
            assert await asyncio.to_thread(cli.main, [*arguments, "-o", "json"]) == 0
            assert json.loads(capsys.readouterr().out)["url"] == now.runner.url

    asyncio.run(scenario())


def test_status_without_a_name_lists_the_instances_that_run(capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> None:
        async with running(1) as now:
            root = now.folder.path.parent
            leave_a_socket(root / "killed")
            assert await asyncio.to_thread(cli.main, ["status", "--state-dir", str(root)]) == 0
            header, row = (line.split() for line in capsys.readouterr().out.splitlines())
            assert header == ["Name", "Model", "Ready", "URL"]
            assert row == [now.folder.path.name, now.runner.snapshot().model, "1/1", now.runner.url]
            assert await asyncio.to_thread(cli.main, ["status", "--state-dir", str(root), "--json"]) == 0
            assert [one["url"] for one in json.loads(capsys.readouterr().out)] == [now.runner.url]

    asyncio.run(scenario())


def leave_a_socket(folder: Path) -> None:
    """Leave what an instance leaves that is killed."""
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(folder / "control.sock"))


def test_without_instances_status_says_how_to_ask_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--state-dir", str(tmp_path / "new")]) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "no deployments found; -n NAMESPACE lists" in printed.err
