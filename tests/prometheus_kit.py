"""Prometheus' own programs, as Debian's package prometheus has them: promtool, and a server that scrapes one address."""

import json
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import programs
from ports import free_port

START_TIMEOUT_S = 120.0
"""Generous: it takes a second where nothing else runs."""


def find(program: str) -> str:
    """Return the path of a program; skips or fails the test without it."""
    return programs.find(program, "prometheus")


class Prometheus:
    """A server that answers queries."""

    def __init__(self, url: str) -> None:
        self._url = url

    def query(self, expr: str) -> list[dict[str, Any]]:
        """Return the series of an instant query. Raises HTTPError for an expression that cannot be evaluated."""
        asked = f"{self._url}/api/v1/query?{urllib.parse.urlencode({'query': expr})}"
        with urllib.request.urlopen(asked, timeout=30) as answer:
            return list(json.load(answer)["data"]["result"])

    def wait_for(self, expr: str) -> None:
        """Return when a query has a result. Raises TimeoutError."""
        _until(lambda: bool(self.query(expr)), f"no series for {expr}")


@contextmanager
def scraping(targets: Mapping[str, Mapping[str, str]], folder: Path, *, interval: str = "1s") -> Iterator[Prometheus]:
    """Run a server on loopback that scrapes ``targets``: HOST:PORT to labels, honoured where the target sets them itself."""
    found = [{"targets": [target], "labels": dict(labels)} for target, labels in targets.items()]
    job = {"job_name": "flyball", "honor_labels": True, "static_configs": found}
    config = folder / "prometheus.json"
    config.write_text(
        json.dumps({"global": {"scrape_interval": interval, "scrape_timeout": interval}, "scrape_configs": [job]})
    )
    port = free_port()
    command = [
        find("prometheus"),
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "prometheus.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            server = Prometheus(f"http://127.0.0.1:{port}")
            _until(lambda: bool(server.query("vector(1)")), f"Prometheus does not answer: {folder / 'prometheus.log'}")
            yield server
        finally:
            process.terminate()


def _until(holds: Callable[[], bool], problem: str) -> None:
    end_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end_s:
        try:
            if holds():
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            pass
        time.sleep(0.2)
    raise TimeoutError(problem)
