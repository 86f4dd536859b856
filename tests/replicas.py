"""`flyball serve` as a subprocess on free loopback ports."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx

from flyball_protocol import endpoints
from ports import free_port

ROOT = Path(__file__).parent.parent
ADMIN_TOKEN = "a-test-token"
START_DEADLINE_S = 60.0
COMPLETION = {"model": "test", "prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def environment(**extra: str) -> dict[str, str]:
    """This process's environment with the source tree first on the path."""
    sources = [str(ROOT / name) for name in ("protocol", "kernels", "runtime", "operator", "cli")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sources), "HF_HUB_OFFLINE": "1", **extra}


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + 20
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(what)
        time.sleep(0.05)


class Replica:
    """One running server. ``client`` talks to its API port, ``admin`` to its admin port.

    ``listener`` is the socket of a `flyball listener` and the port that it holds for this server.
    """

    def __init__(self, model: Path, *flags: str, log: Path, listener: tuple[Path, int] | None = None) -> None:
        self.port, self.admin_port = free_port() if listener is None else listener[1], free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        command = [sys.executable, "-m", "flyball_runtime.cli", "serve", str(model), "--served-model-name", "test"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--admin-port", str(self.admin_port)]
        command += ["--dtype", "float32", "--kv-cache-memory-bytes", "64MiB", "--num-threads", "1", *flags]
        variables = {endpoints.ADMIN_TOKEN_ENV: ADMIN_TOKEN}
        if listener is not None:
            variables[endpoints.LISTENER_ENV] = str(listener[0])
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, env=environment(**variables), stdout=output, stderr=output)
        self.client = httpx.Client(base_url=self.url, timeout=60)
        self.admin = httpx.Client(
            base_url=f"http://127.0.0.1:{self.admin_port}", headers={"Authorization": f"Bearer {ADMIN_TOKEN}"}
        )

    def wait_ready(self) -> None:
        deadline_s = time.monotonic() + START_DEADLINE_S
        while time.monotonic() < deadline_s:
            if self.process.poll() is not None:
                break
            with contextlib.suppress(httpx.TransportError):
                if self.client.get(endpoints.READYZ_PATH).status_code == 200:
                    return
            time.sleep(0.1)
        raise RuntimeError(f"the server did not become ready:\n{self.log.read_text()}")

    def complete(self, **fields: object) -> httpx.Response:
        return self.client.post("/v1/completions", json=COMPLETION | fields)

    def complete_on_a_new_connection(self) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json=COMPLETION, timeout=60)

    def kv_blocks_used(self) -> int:
        return int(self.admin.get(endpoints.ADMIN_EVIDENCE_PATH).json()["kv_blocks"]["used"])

    def load(self) -> tuple[int, int, int]:
        """Running and waiting requests, and KV blocks that they hold."""
        evidence = self.admin.get(endpoints.ADMIN_EVIDENCE_PATH).json()
        return evidence["num_running"], evidence["num_waiting"], evidence["kv_blocks"]["used"]

    def metric(self, sample: str) -> float:
        """The value of one sample, named with its labels."""
        for line in self.client.get(endpoints.METRICS_PATH).text.splitlines():
            name, _, value = line.rpartition(" ")
            if name == sample:
                return float(value)
        raise KeyError(sample)

    def has_engine(self) -> bool:
        """Whether the engine process has been started."""
        return bool(self._engine_pids())

    def engine_pid(self) -> int:
        """The server's child that runs the engine."""
        (pid,) = self._engine_pids()
        return pid

    def _engine_pids(self) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def stop(self) -> int:
        """SIGTERM, then the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    def close(self) -> None:
        self.client.close()
        self.admin.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def replica(model: Path, *flags: str, log: Path, listener: tuple[Path, int] | None = None) -> Iterator[Replica]:
    """A ready server, killed at the end if it still runs."""
    server = Replica(model, *flags, log=log, listener=listener)
    try:
        server.wait_ready()
        yield server
    finally:
        server.close()
