"""The slow loop of a cluster over real servers: does it bring a missed objective back, live, and in how many changes?

    python benchmarks/closed_loop.py [--replicas 2] [--share 0.6] [--minutes 15]

Starts `flyball serve` of the demo model on loopback addresses, sends steady traffic (streams, and long prompts that make them
stutter), sets the inter-token objective to a share of the p95 that the whole envelope gives, and lets ClusterTuner work over a
store filled by hand: no API server. At the end one more server starts from the boot prior that it left.
Writes results/closed_loop.json.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from common import save
from flyball_operator.cluster.store import Store
from flyball_operator.cluster.tuner import ClusterTuner, target
from flyball_operator.observed import Key, Pod, Resource
from flyball_operator.spec import Objectives, Tuning
from flyball_operator.tuning.admin import AdminClient
from flyball_operator.tuning.evidence import pool
from flyball_operator.tuning.signals import objectives_of, signals
from flyball_protocol import Evidence, LimitsReport
from flyball_protocol.endpoints import ADMIN_LIMITS_PATH, ADMIN_PORT, ADMIN_TOKEN_ENV, API_PORT, READYZ_PATH

MODEL = Path(__file__).parents[1] / "examples" / "demo_model" / "checkpoint"
KEY, TOKEN = Key("default", "demo"), "a-benchmark-token"
ENVELOPE = ("--max-num-seqs=16", "--max-num-batched-tokens=1024", "--kv-cache-memory-bytes=64MiB", "--dtype=float32")
NUM_STREAMS, NUM_READERS = 6, 2  # of each replica
WINDOW_S, START_S = 60.0, 180.0


def pod(number: int) -> Pod:
    metadata = {"namespace": KEY.namespace, "name": f"demo-{number}", "uid": f"{number}", "resourceVersion": "1"}
    ip = f"127.99.{random.randint(0, 255)}.{number + 1}"
    return Pod.of({"metadata": metadata, "status": {"podIP": ip, "conditions": [{"type": "Ready", "status": "True"}]}})


@contextlib.asynccontextmanager
async def server(pod: Pod, log: Path, *flags: str) -> AsyncIterator[None]:
    """One replica at the pod's address, ready."""
    addresses = (f"--host={pod.ip}", f"--port={API_PORT}", f"--admin-host={pod.ip}", f"--admin-port={ADMIN_PORT}")
    command = (sys.executable, "-m", "flyball_runtime.cli", "serve", str(MODEL), "--served-model-name=demo")
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(*command, *addresses, *ENVELOPE, "--num-threads=1", "--drain-timeout=5", *flags),
            env={**os.environ, ADMIN_TOKEN_ENV: TOKEN},
            stdout=output,
            stderr=output,
        )
    try:
        await until_ready(pod, process, log)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def until_ready(pod: Pod, process: asyncio.subprocess.Process, log: Path) -> None:
    deadline_s = time.monotonic() + START_S
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < deadline_s and process.returncode is None:
            with contextlib.suppress(aiohttp.ClientConnectionError):
                async with session.get(f"http://{pod.ip}:{API_PORT}{READYZ_PATH}") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.2)
    raise SystemExit(f"{pod.name} did not become ready:\n{log.read_text()[-2000:]}")


async def ask_forever(session: aiohttp.ClientSession, pod: Pod, rng: random.Random, prompt: int, output: int) -> None:
    while True:
        body = {
            "model": "demo",
            "prompt": [rng.randrange(10, 2000) for _ in range(prompt)],
            "max_tokens": output,
            "ignore_eos": True,
            "stream": True,
        }
        async with session.post(f"http://{pod.ip}:{API_PORT}/v1/completions", json=body) as response:
            response.raise_for_status()
            async for _ in response.content:
                pass


class Measured:
    """What the replicas themselves say."""

    def __init__(self, session: aiohttp.ClientSession, pods: list[Pod]) -> None:
        self._admin = AdminClient(session, TOKEN)
        self._targets = [target(pod) for pod in pods]

    async def evidence(self) -> list[Evidence]:
        found = await self._admin.gather(self._targets)
        if missing := [f"{one.pod}: {one.problem}" for one in found if one.evidence is None]:
            raise SystemExit("; ".join(missing))
        return [one.evidence for one in found if one.evidence is not None]

    async def itl_p95_s(self) -> float:
        """The worst replica's."""
        return max(one.itl.p95_s or 0.0 for one in await self.evidence())

    async def share_over(self, objective_ms: int) -> float:
        tuning = tuning_of(objective_ms)
        return signals(tuning, pool(await self.evidence(), objectives_of(tuning)).counts)[1].share


def tuning_of(objective_ms: int) -> Tuning:
    return Tuning(
        mode="Auto",
        interval_seconds=5,
        cooldown_seconds=10,
        min_samples=20,
        max_step_percent=25,
        objectives=Objectives(inter_token_latency_p95_milliseconds=objective_ms),
    )


async def tune(session: aiohttp.ClientSession, pods: list[Pod], objective_ms: int, minutes: float) -> dict[str, Any]:
    """Run the tuner until it has nothing left to change; return what it did."""
    store, started_s = Store(), time.monotonic()
    spec = {"tuning": msgspec.to_builtins(tuning_of(objective_ms))}
    store.put_resource(
        Resource(key=KEY, uid="1", generation=1, resource_version="1", spec=spec, status={}, deleting=False)
    )
    for one in pods:
        store.put_pod(KEY, one)
    tuner = ClusterTuner(
        store,
        token_of=lambda _: TOKEN,
        session=session,
        changed=lambda _: None,
        event=lambda _, type, reason, message: print(f"{time.monotonic() - started_s:6.0f} s  {reason}: {message}"),
    )
    task = asyncio.create_task(tuner.run())
    try:
        while time.monotonic() - started_s < 60 * minutes and not task.done():
            await asyncio.sleep(1)
            if (tuner.status(KEY) or {}).get("state") in ("Converged", "AtLimit"):
                break
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return {
        "seconds": round(time.monotonic() - started_s, 1),
        "tuning": dict(tuner.status(KEY) or {}),
        "boot_prior": tuner.boot_prior(KEY),
    }


async def start_with(session: aiohttp.ClientSession, prior: Any, folder: Path) -> LimitsReport:
    """Return what a replica says that starts from a boot prior."""
    (folder / "limits.json").write_text(json.dumps(prior))
    one = pod(99)
    async with server(one, folder / "late.log", f"--boot-prior={folder / 'limits.json'}"):
        url = target(one).url + ADMIN_LIMITS_PATH
        async with session.get(url, headers={"Authorization": f"Bearer {TOKEN}"}) as response:
            return msgspec.json.decode(await response.read(), type=LimitsReport)


async def closed_loop(num_replicas: int, share: float, minutes: float, folder: Path) -> dict[str, Any]:
    pods = [pod(number) for number in range(num_replicas)]
    async with contextlib.AsyncExitStack() as stack:
        for one in pods:
            await stack.enter_async_context(server(one, folder / f"{one.name}.log"))
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        rng = random.Random(0)
        traffic = [
            asyncio.create_task(ask_forever(session, one, rng, *lengths))
            for one in pods
            for lengths in [(32, 150)] * NUM_STREAMS + [(1500, 8)] * NUM_READERS
        ]
        stack.callback(lambda: [task.cancel() for task in traffic])
        measured = Measured(session, pods)
        await asyncio.sleep(WINDOW_S + 5)
        objective_ms = max(1, round(1000 * share * await measured.itl_p95_s()))
        before = await measured.share_over(objective_ms)
        print(f"objective {objective_ms} ms, missed by {before:.1%} of inter-token gaps")
        done = await tune(session, pods, objective_ms, minutes)
        after = await measured.share_over(objective_ms)
        limits = [msgspec.to_builtins(one.target) | {"revision": one.revision} for one in await measured.evidence()]
        if failed := [task for task in traffic if task.done()]:
            raise SystemExit(f"{len(failed)} clients failed, the first: {failed[0].exception()}")
        for task in traffic:
            task.cancel()
        late = await start_with(session, done["boot_prior"], folder) if done["boot_prior"] else None
    return {
        "replicas": num_replicas,
        "objective_ms": objective_ms,
        "share_over_before": round(before, 4),
        "share_over_after": round(after, 4),
        "limits": limits,
        "late_replica": None if late is None else {"revision": late.revision, **msgspec.to_builtins(late.target)},
        **done,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--share", type=float, default=0.6, help="objective, as a share of the p95 at the start")
    parser.add_argument("--minutes", type=float, default=15.0, help="give up after so long")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(closed_loop(args.replicas, args.share, args.minutes, Path(folder)))
    print(json.dumps(result, indent=2))
    save("closed_loop", result)


if __name__ == "__main__":
    main()
