"""The command, as a process and in this one."""

import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from flyball_operator import cli
from flyball_operator.spec import FolderModel, manifest
from operator_kit.local import DEADLINE_S, FAKE_RUNTIME, ManifestFile

ROOT = Path(__file__).parents[2]


@contextmanager
def workplace() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="flyball-") as name:  # short: it holds a socket
        folder = Path(name)
        flyball = folder / "flyball"
        flyball.write_text(f'#!/bin/sh\nexec {FAKE_RUNTIME[0]} {FAKE_RUNTIME[1]} "$@"\n')
        flyball.chmod(0o755)
        yield folder


def local(folder: Path, *options: str, file: str | None = None) -> list[str]:
    """Return the command line of an instance in ``folder``."""
    where = ["--state-dir", str(folder / "state"), "--flyball", str(folder / "flyball"), "--port", "0"]
    return [
        sys.executable,
        "-m",
        "flyball_operator.cli",
        "local",
        "-f",
        file or str(folder / "chat.yaml"),
        *where,
        *options,
    ]


class Instance:
    """A running `flyball local`; its standard error is read from a file."""

    def __init__(self, folder: Path, *options: str, num_files: int | None = None, stdin: Path | None = None) -> None:
        self.log = folder / "instance.log"
        limited = ["sh", "-c", f'ulimit -n {num_files}; exec "$@"', "sh"] if num_files is not None else []
        source = contextlib.nullcontext() if stdin is None else stdin.open("rb")
        with self.log.open("wb") as log, source as given:
            command = [*limited, *local(folder, *options, file=None if stdin is None else "-")]
            self.process = subprocess.Popen(command, stdin=given, stderr=log, stdout=log, env=environment())

    def until(self, text: str) -> str:
        deadline = time.monotonic() + DEADLINE_S
        while text not in (said := self.log.read_text()):
            assert time.monotonic() < deadline, f"never said {text!r}:\n{said}"
            assert self.process.poll() is None or text in self.log.read_text(), f"ended:\n{said}"
            time.sleep(0.02)
        return said

    def end(self) -> int:
        try:
            return self.process.wait(DEADLINE_S)
        finally:
            self.process.kill()
            self.process.wait()


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_drains_and_exits_0(number: int) -> None:
    with workplace() as folder:
        ManifestFile(folder)
        instance = Instance(folder)
        said = instance.until("replica 1 ready in")
        url = said.partition(" at ")[2].partition(": starting")[0]
        assert f"try: curl {url}/v1/chat/completions " in said
        with urllib.request.urlopen(url + "/readyz") as response:
            assert response.status == 200
        instance.process.send_signal(number)
        assert instance.end() == 0
        assert "replica 1 drained and stopped" in instance.log.read_text()


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once() -> None:
    with workplace() as folder:
        ManifestFile(folder, env={"FAKE_IGNORE_SIGTERM": "1"})
        instance = Instance(folder)
        instance.until("replica 1 ready in")
        instance.process.send_signal(signal.SIGINT)
        instance.until("once more to end at once")
        instance.process.send_signal(signal.SIGINT)
        assert instance.end() == 130


def test_run_again_with_a_changed_file_reconciles_the_running_instance() -> None:
    with workplace() as folder:
        file = ManifestFile(folder)
        instance = Instance(folder)
        instance.until("replica 1 ready in")
        other = ManifestFile(folder)
        other.path = folder / "other.yaml"
        other.write(replicas=2)
        command = [word if word != str(file.path) else str(other.path) for word in local(folder)]
        second = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=DEADLINE_S)
        assert second.returncode == 0, second.stderr
        assert "handed to the instance at http://127.0.0.1:" in second.stdout
        assert "scaling 1 -> 2: spec.replicas changed" in second.stdout
        instance.until("replica 2 ready in")
        other.write(replicas=1)  # the file handed over last is the one that is watched
        instance.until("replica 2 drained and stopped")
        other.write_text("replicas: [")
        instance.until("is not taken, what runs goes on")
        other.write(replicas=1)
        instance.process.send_signal(signal.SIGHUP)
        instance.until("was read again: nothing to change")
        instance.process.send_signal(signal.SIGTERM)
        assert instance.end() == 0


@pytest.mark.slow
def test_a_manifest_from_standard_input_runs_and_is_not_watched() -> None:
    with workplace() as folder:
        file = ManifestFile(folder)
        instance = Instance(folder, stdin=file.path)
        instance.until("replica 1 ready in")
        instance.process.send_signal(signal.SIGHUP)
        instance.until("came from standard input, which is read once")
        file.write(replicas=2)
        handed = subprocess.run(
            local(folder, file="-"),
            input=file.path.read_bytes(),
            env=environment(),
            capture_output=True,
            timeout=DEADLINE_S,
        )
        assert b"scaling 1 -> 2: spec.replicas changed" in handed.stdout, handed.stderr
        instance.process.send_signal(signal.SIGTERM)
        assert instance.end() == 0


@pytest.mark.slow
def test_replicas_of_an_instance_that_was_killed_end_by_themselves() -> None:
    with workplace() as folder:
        ManifestFile(folder)
        instance = Instance(folder, "--verbose")
        said = instance.until("replica 1 ready in")
        port = int(said.partition("ready in")[2].partition("port ")[2].partition("\n")[0])
        instance.until(f"[replica-1] serving on {port}")
        instance.process.kill()
        instance.end()
        deadline = time.monotonic() + DEADLINE_S
        while _listens(port):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        again = Instance(folder)  # neither its lock nor its socket is in the way
        again.until("replica 1 ready in")
        again.process.send_signal(signal.SIGTERM)
        assert again.end() == 0


@pytest.mark.slow
def test_250_half_sent_heads_and_160_file_handles_end_nothing() -> None:
    tuning = {"mode": "Recommend", "objectives": {"interTokenLatencyP95Milliseconds": 40}, "intervalSeconds": 1}
    with workplace() as folder, contextlib.ExitStack() as stack:
        ManifestFile(folder, tuning=tuning, env={"FAKE_ITL_OVER": "4000"})
        instance = Instance(folder, num_files=160)
        said = instance.until("replica 1 ready in")
        url = said.partition(" at ")[2].partition(": starting")[0]
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        for _ in range(250):
            one = stack.enter_context(socket.create_connection(address, timeout=DEADLINE_S))
            with contextlib.suppress(ConnectionError):
                one.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: chat\r\nX: ")
        with urllib.request.urlopen(url + "/v1/models", timeout=DEADLINE_S) as response:
            assert response.status == 200
        instance.until("tuning recommends")
        instance.process.send_signal(signal.SIGTERM)
        assert instance.end() == 0
        assert "Traceback" not in instance.log.read_text()
        assert (folder / "state" / "chat" / "logs" / "decisions.jsonl").read_bytes()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_taken_port_ends_the_command_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with workplace() as folder, socket.socket() as taken:
        ManifestFile(folder)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert cli.main([*local(folder)[3:], "--port", str(port)]) == 2
        assert f"cannot listen on 127.0.0.1 port {port}" in capsys.readouterr().err


def test_a_malformed_manifest_ends_the_command_with_its_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    with workplace() as folder:
        ManifestFile(folder, replicas=-1)
        assert cli.main(local(folder)[3:]) == 2
        assert "chat.yaml: spec.replicas is -1; the least is 0" in capsys.readouterr().err


def test_without_a_flyball_command_the_way_out_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with workplace() as folder:
        ManifestFile(folder)
        assert cli.main(["local", "-f", str(folder / "chat.yaml"), "--state-dir", str(folder / "state")]) == 2
        assert "--flyball FILE" in capsys.readouterr().err


def test_render_prints_every_child(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["render", "-f", str(ROOT / "examples" / "llmdeployment.yaml")]) == 0
    rendered = list(yaml.safe_load_all(capsys.readouterr().out))
    assert [one["kind"] for one in rendered] == ["Deployment", "Service", "PodMonitor"]
    assert {one["metadata"]["name"] for one in rendered} == {"chat"}


def feed(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_a_manifest_is_read_from_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = ROOT / "examples" / "llmdeployment.yaml"
    assert cli.main(["render", "-f", str(example)]) == 0
    from_file = capsys.readouterr().out
    feed(monkeypatch, example.read_bytes())
    assert cli.main(["render", "-f", "-"]) == 0
    assert capsys.readouterr().out == from_file


def test_a_relative_model_from_standard_input_is_in_the_current_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    feed(monkeypatch, yaml.safe_dump(deployment(uri="file:./model")).encode())
    (llm,) = manifest.read_file(manifest.STDIN)
    assert isinstance(llm.model_source, FolderModel)
    assert llm.model_source.path.resolve() == tmp_path / "model"


@pytest.mark.parametrize("stdin", [b"a: [", None])
def test_what_is_wrong_with_standard_input_is_told(
    stdin: bytes | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if stdin is None:
        monkeypatch.setattr(sys, "stdin", None)
    else:
        feed(monkeypatch, stdin)
    assert cli.main(["validate", "-f", "-"]) == 2
    assert "standard input: " in capsys.readouterr().err


def deployment(uri: str, name: str = "chat", **spec: Any) -> dict[str, Any]:
    head = {"apiVersion": "flyball.dev/v1alpha1", "kind": "LLMDeployment", "metadata": {"name": name}}
    return {**head, "spec": {"model": {"uri": uri}, **spec}}


def test_validate_names_what_is_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two = [deployment("hf://org/name", name) for name in ("one", "two")]
    (tmp_path / "two.yaml").write_text(yaml.safe_dump_all(two))
    assert cli.main(["validate", "-f", str(tmp_path / "two.yaml")]) == 0
    assert capsys.readouterr().out == "default/one is valid\ndefault/two is valid\n"


def test_validate_lists_every_problem_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "chat.yaml").write_text(yaml.safe_dump(deployment("hf://org/name", replicas=-1, seed=3)))
    assert cli.main(["validate", "-f", str(tmp_path / "chat.yaml")]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert len(printed.err.splitlines()) == 2
    assert {"spec.replicas", "spec.seed"} <= set(printed.err.split())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"made: 2024-13-45\n", "apiVersion is None"),
        (b"made: " + b"9" * 5000, "a number of 5000 characters"),
        (b"x: " + b"[" * 100_000, "levels deep"),
        (b"a: \0", "control characters"),
        (b"a: \xff", "cannot be read"),
        (
            (
                "a0: &a0 [" + "x," * 9 + "]\n" + "".join(f"a{i}: &a{i} [{f'*a{i - 1},' * 9}]\n" for i in range(1, 9))
            ).encode(),
            "20000 values",
        ),
    ],
)
def test_render_says_in_a_line_what_is_wrong(
    content: bytes, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "chat.yaml").write_bytes(content)
    assert cli.main(["render", "-f", str(tmp_path / "chat.yaml")]) == 2
    printed = capsys.readouterr()
    assert words in printed.err
    assert "Traceback" not in printed.err
    assert not printed.out


def test_a_file_without_end_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["render", "-f", "/dev/zero"]) == 2
    assert "more than 4000000 bytes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("output", "code", "says"),
    [("/dev/full", 2, "standard output cannot be written: No space left on device\n"), ("closed", 0, "")],
)
def test_output_that_cannot_be_written_is_a_line_and_one_that_is_enough_is_none(
    output: str, code: int, says: str
) -> None:
    if output == "closed":
        reading, writing = os.pipe()
        os.close(reading)
    else:
        writing = os.open(output, os.O_WRONLY)
    command = [sys.executable, "-m", "flyball_cli", "render", "-f", "examples/llmdeployment.yaml"]
    with os.fdopen(writing, "wb") as stdout:
        ended = subprocess.run(
            command, stdout=stdout, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment(), timeout=DEADLINE_S
        )
    assert (ended.returncode, ended.stderr.removeprefix("flyball render: ")) == (code, says)


def test_crd_prints_the_definition(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["crd"]) == 0
    assert capsys.readouterr().out == (ROOT / "crds" / "llmdeployments.yaml").read_text()
