"""A LocalRunner over fake runtimes: fast probes, short backoff, a manifest that tests may edit."""

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from flyball_operator.local import LocalOptions, LocalRunner, Snapshot
from flyball_operator.local.control import InstanceFolder
from flyball_operator.local.replica import CrashBackoff
from flyball_operator.local.template import local_deployment
from flyball_operator.observed import Object
from flyball_operator.spec import LLMDeployment, manifest

FAKE_RUNTIME = (sys.executable, str(Path(__file__).with_name("fake_runtime.py")))
DEADLINE_S = 20.0


def fast_deployment(deployment: LLMDeployment) -> Object:
    """The real Deployment with probes that are fast enough for tests."""
    built = local_deployment(deployment)
    (container,) = built["spec"]["template"]["spec"]["containers"]
    fast = {"periodSeconds": 0.05, "timeoutSeconds": 0.5, "failureThreshold": 2}
    for probe, changes in (("startupProbe", {"failureThreshold": 100}), ("readinessProbe", {}), ("livenessProbe", {})):
        container[probe] |= fast | changes
        if "terminationGracePeriodSeconds" in container[probe]:
            container[probe]["terminationGracePeriodSeconds"] = 0.2
    return built


class ManifestFile:
    """The manifest of a fake deployment; ``write`` replaces it as an editor would."""

    def __init__(self, folder: Path, **spec: Any) -> None:
        self.path = folder / "chat.yaml"
        self.env = {"PYTHONPATH": os.pathsep.join(sys.path)}
        self.spec: dict[str, Any] = {
            "model": {"uri": "hf://org/name"},
            "accelerator": {"count": 0},
            "replicas": 1,
            "rollout": {"drain": {"preStopSeconds": 0, "timeoutSeconds": 10}},
        }
        self.write(**spec)

    def write(self, **changes: Any) -> None:
        env = changes.pop("env", {})
        self.spec |= changes
        self.env |= env
        runtime = {
            **self.spec.get("runtime", {}),
            "env": [{"name": name, "value": value} for name, value in self.env.items()],
        }
        document = {
            "apiVersion": "flyball.dev/v1alpha1",
            "kind": "LLMDeployment",
            "metadata": {"name": "chat"},
            "spec": self.spec | {"runtime": runtime},
        }
        self.write_text(yaml.safe_dump(document))

    def write_text(self, text: str) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(text)
        new.replace(self.path)

    def read(self) -> LLMDeployment:
        return manifest.read_file(self.path)[0]


class Running:
    """A runner that has been started, and what tests ask of it."""

    def __init__(
        self, runner: LocalRunner, file: ManifestFile, folder: InstanceFolder, client: aiohttp.ClientSession
    ) -> None:
        self.runner = runner
        self.file = file
        self.folder = folder
        self.client = client

    @property
    def lines(self) -> str:
        return "\n".join(event.text for event in self.runner.snapshot().events)

    async def until(self, condition: Callable[[Snapshot], bool]) -> Snapshot:
        """Wait for a condition of the snapshot; past the deadline, fail with what the runner said."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not condition(snapshot := self.runner.snapshot()):
                    await asyncio.sleep(0.01)
                return snapshot
        except TimeoutError:
            logs = "\n".join(path.read_text()[-2000:] for path in sorted(self.folder.log_dir.glob("*.log")))
            raise AssertionError(f"never became so:\n{self.runner.snapshot()}\n{self.lines}\n{logs}") from None

    async def until_ready(self, count: int) -> Snapshot:
        return await self.until(lambda now: now.num_ready == count == len(now.replicas))

    async def until_line(self, text: str) -> Snapshot:
        return await self.until(lambda _: text in self.lines)

    def post(self, path: str, **body: Any) -> Any:
        return self.client.post(self.runner.url + path, json=body)

    async def complete(self, **body: Any) -> dict[str, Any]:
        async with self.post("/v1/completions", **body) as response:
            assert response.status == 200, await response.text()
            answer: dict[str, Any] = await response.json()
            return answer

    async def stream(self, **body: Any) -> list[str]:
        """Return the events of a stream, without their `data: `."""
        async with self.post("/v1/completions", stream=True, **body) as response:
            assert response.status == 200, await response.text()
            text = (await response.read()).decode()
            return [event.removeprefix("data: ") for event in text.split("\n\n") if event]


@asynccontextmanager
async def running(
    wait_for: int | None = None,
    *,
    port: int = 0,
    evidence_period_s: float | None = None,
    numa_nodes: tuple[int, ...] = (0,),
    **spec: Any,
) -> AsyncIterator[Running]:
    """Run fake replicas; ``wait_for`` waits until so many are ready, and no others exist."""
    with tempfile.TemporaryDirectory(prefix="flyball-") as name:  # short: it holds a socket
        file = ManifestFile(Path(name), **spec)
        folder = InstanceFolder(Path(name) / "state", "chat")
        assert folder.acquire()
        chosen = LocalOptions(
            executable=FAKE_RUNTIME,
            log_dir=folder.log_dir,
            port=port,
            watch_period_s=0.02,
            evidence_period_s=evidence_period_s,
            build=fast_deployment,
            numa_nodes=numa_nodes,
            backoff=lambda: CrashBackoff(first_s=0.05, most_s=0.2, stable_s=60.0),
        )
        try:
            async with (
                aiohttp.ClientSession() as client,
                LocalRunner(file.read(), file.path, folder, chosen) as runner,
            ):
                now = Running(runner, file, folder, client)
                if wait_for is not None:
                    await now.until_ready(wait_for)
                yield now
        finally:
            folder.release()
