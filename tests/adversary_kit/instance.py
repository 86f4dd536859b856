"""A running `flyball local`, over fake runtimes or real ones."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from adversary_kit.condition import log_problems, usage
from adversary_kit.witness import Seen, least_disturbed, witness
from operator_kit.local import FAKE_RUNTIME, ManifestFile
from replicas import wait_until

START_DEADLINE_S = 60.0
STREAM_OF_FAKE = {"stream": True, "tokens": 4000, "gap_s": 0.005}


class Instance:
    """A running instance.

    Attributes:
        manifest: its file; a change is taken within half a second, or at once with ``reload``.
        decisions: its ``decisions.jsonl``.
    """

    def __init__(self, folder: Path, manifest: ManifestFile, flyball: Path, *, max_fds: int | None) -> None:
        self.manifest = manifest
        self.log, self.log_dir = folder / "instance.log", folder / "logs"
        self.decisions = self.log_dir / "decisions.jsonl"
        command = [sys.executable, "-m", "flyball_cli", "local", "-f", str(manifest.path), "--port", "0"]
        command += ["--state-dir", str(folder / "state"), "--log-dir", str(self.log_dir), "--flyball", str(flyball)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1"}

        def limit_fds() -> None:
            if max_fds is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, (max_fds, max_fds))

        self.client = httpx.Client(timeout=60)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, preexec_fn=limit_fds)

    def wait_ready(self, num_replicas: int = 1) -> None:
        """Wait for its replicas, and learn the port."""
        for number in range(1, num_replicas + 1):
            self.wait_said(f"replica {number} ready in")
        self.port = int(self.said().partition("http://127.0.0.1:")[2].partition(":")[0])
        self.client.base_url = httpx.URL(f"http://127.0.0.1:{self.port}")

    def wait_said(self, text: str, times: int = 1) -> None:
        deadline_s = time.monotonic() + START_DEADLINE_S
        while self.said().count(text) < times:
            assert self.process.poll() is None, f"it ended:\n{self.said()}"
            assert time.monotonic() < deadline_s, f"it never said {text!r}:\n{self.said()}"
            time.sleep(0.02)

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def reload(self) -> None:
        self.process.send_signal(signal.SIGHUP)

    @property
    def pids(self) -> list[int]:
        """The instance and every process below it."""
        found, at = [self.process.pid], 0
        while at < len(found):
            children = Path(f"/proc/{found[at]}/task/{found[at]}/children").read_text().split()
            found += [int(pid) for pid in children]
            at += 1
        return found

    @contextlib.contextmanager
    def unharmed(self) -> Iterator[None]:
        """Check after the block that the instance lives, is ready, answers, and has what it had before."""
        before, log_bytes = usage([self.process.pid]), self.log.stat().st_size
        yield
        assert self.process.poll() is None, f"it ended with {self.process.poll()}:\n{self.said()[-3000:]}"
        wait_until(lambda: self.client.get("/readyz").status_code == 200, "the deployment is not ready")
        wait_until(lambda: usage([self.process.pid]).is_near(before), f"it had {before} before")
        with self.log.open("rb") as log:
            log.seek(log_bytes)
            problems = log_problems(log.read())
        assert not problems, "\n".join(problems)

    def under(self, attack: Callable[[], None]) -> Seen:
        """Attack while another client streams through the balancer, up to some times; return the best round."""
        return least_disturbed(lambda: self.watched(attack, STREAM_OF_FAKE))

    def watched(self, attack: Callable[[], None], body: dict[str, Any]) -> Seen:
        """Attack once while another client streams; that client must get every token."""
        with witness(self.port, self.pids, body) as seen:
            attack()
        assert not seen.problems, seen.problems
        return seen

    def close(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def instance(
    flyball: Sequence[str] = FAKE_RUNTIME,
    *,
    max_fds: int | None = None,
    before_start: Callable[[Path], None] = lambda log_dir: None,
    **spec: Any,
) -> Iterator[Instance]:
    """A ready instance, killed at the end.

    Args:
        flyball: the runtime's command.
        max_fds: its limit of open files, and that of its replicas.
        before_start: gets the folder of logs.
        spec: changes to the manifest of operator_kit.local.
    """
    with tempfile.TemporaryDirectory(prefix="flyball-") as name:  # short: it holds a socket
        folder = Path(name)
        program = folder / "flyball"
        program.write_text(f'#!/bin/sh\nexec {" ".join(flyball)} "$@"\n')
        program.chmod(0o755)
        (folder / "logs").mkdir()
        before_start(folder / "logs")
        running = Instance(folder, ManifestFile(folder, **spec), program, max_fds=max_fds)
        try:
            running.wait_ready(spec.get("replicas", 1))
            yield running
        finally:
            running.close()
