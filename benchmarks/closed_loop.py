"""Tuning on real replicas under a load that shifts: requests within their objectives, beside limits that stay as they are.

    python benchmarks/closed_loop.py [--minutes 5] [--load 0.6] [--contender NAME ...] [--chart FILE.svg]

Each contender gets two fresh replicas (`flyball serve` of an 88M model, one thread each), the same requests at the same times,
and each request goes to the replica with the fewest unfinished ones. Three phases of equal length: chat alone, chat beside long
prompts, chat beside bursts of batch work. The rate is a share of what one replica was measured to compute just before, the
objectives are multiples of what one request takes alone; both are the same for all contenders.

`auto` starts with vLLM's defaults, and ClusterTuner is given the objectives. In the middle it is ended like a process that is
killed; another goes on from what the status of the resource held. The other contenders serve with fixed limits and no
objectives. A request is good if its first token came in time and the 95th percentile of its own gaps is within the objective.
Writes results/closed_loop.json, with a line of time for each contender.
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from prometheus_client import CollectorRegistry

from common import make_checkpoint, save
from flyball_operator.cluster.store import Store
from flyball_operator.cluster.tuner import ClusterTuner, target
from flyball_operator.cluster.tuner_metrics import TunerMetrics
from flyball_operator.observed import Key, Pod, Resource
from flyball_operator.spec import Objectives, Tuning
from flyball_operator.tuning.admin import AdminClient
from flyball_protocol.endpoints import ADMIN_PORT, ADMIN_TOKEN_ENV, API_PORT, READYZ_PATH

KEY, TOKEN = Key("default", "demo"), "a-benchmark-token"
FLAGS = ("--served-model-name=m", "--dtype=bfloat16", "--max-model-len=4096", "--num-threads=1", "--drain-timeout=5")
KV_CACHE = "--kv-cache-memory-bytes=512MiB"
CONTENDERS = {
    "vllm-defaults": (256, 2048),
    "fixed-8-128": (8, 128),
    "auto": (256, 2048),
    "fixed-32-512": (32, 512),
    "fixed-64-1024": (64, 1024),
}
"""Max sequences and token budget. What `auto` starts with is vLLM's default on a CPU."""
NUM_REPLICAS = 2
CHAT, LONG, BATCH = (32, 256, 64, 160), (768, 2048, 16, 48), (64, 192, 96, 96)
"""Fewest and most prompt tokens, fewest and most output tokens."""
BURST_S = 15.0
TTFT_OF_ALONE, ITL_OF_ALONE = 4.0, 4.0
SLICE_S = 10.0
START_S = 180.0
VOCABULARY = range(300, 8000)


@dataclass(frozen=True)
class Speed:
    """What one replica does, measured with nothing beside it: seconds."""

    long_prompt_s: float
    gap_s: float
    prompt_token_s: float
    output_token_s: float

    def cost_s(self, kind: Sequence[int]) -> float:
        """Return the seconds of a replica that a request of this kind takes on average."""
        return (kind[0] + kind[1]) / 2 * self.prompt_token_s + (kind[2] + kind[3]) / 2 * self.output_token_s


@dataclass(frozen=True)
class Ask:
    at_s: float
    phase: str
    prompt: list[int]
    max_tokens: int


@dataclass
class Answer:
    ask: Ask
    ttft_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    text: str = ""
    problem: str = ""

    def is_good(self, objectives: Objectives) -> bool:
        ttft_ms, itl_ms = objectives.ttft_p95_milliseconds, objectives.inter_token_latency_p95_milliseconds
        assert ttft_ms is not None and itl_ms is not None
        in_time = self.ttft_s is not None and self.ttft_s * 1000 <= ttft_ms
        return not self.problem and in_time and (self.itl_p95_s or 0.0) * 1000 <= itl_ms

    @property
    def itl_p95_s(self) -> float | None:
        return quantile(self.gaps_s, 0.95)


def quantile(values: Sequence[float], share: float) -> float | None:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def pod(number: int, host: int) -> Pod:
    metadata = {"namespace": KEY.namespace, "name": f"demo-{number}", "uid": f"{number}", "resourceVersion": "1"}
    status = {"podIP": f"127.99.{host}.{number + 1}", "conditions": [{"type": "Ready", "status": "True"}]}
    return Pod.of({"metadata": metadata, "status": status})


@contextlib.asynccontextmanager
async def replica(one: Pod, model: Path, limits: tuple[int, int], log: Path) -> AsyncIterator[int]:
    """One replica at the pod's address, ready. Yields the id of its process."""
    addresses = (f"--host={one.ip}", f"--port={API_PORT}", f"--admin-host={one.ip}", f"--admin-port={ADMIN_PORT}")
    envelope = (f"--max-num-seqs={limits[0]}", f"--max-num-batched-tokens={limits[1]}", KV_CACHE)
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "flyball_runtime.cli", "serve", str(model), *FLAGS, *addresses, *envelope),
            env={**os.environ, ADMIN_TOKEN_ENV: TOKEN},
            stdout=output,
            stderr=output,
        )
    try:
        await until_ready(one, process, log)
        yield process.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def until_ready(one: Pod, process: asyncio.subprocess.Process, log: Path) -> None:
    deadline_s = time.monotonic() + START_S
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < deadline_s and process.returncode is None:
            with contextlib.suppress(aiohttp.ClientConnectionError):
                async with session.get(f"http://{one.ip}:{API_PORT}{READYZ_PATH}") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.2)
    raise SystemExit(f"{one.name} did not become ready:\n{log.read_text()[-2000:]}")


async def send(session: aiohttp.ClientSession, one: Pod, ask: Ask) -> Answer:
    answer, sent_s, last_s = Answer(ask), time.perf_counter(), 0.0
    fixed = {"model": "m", "temperature": 0, "ignore_eos": True, "stream": True}
    try:
        async with session.post(
            f"http://{one.ip}:{API_PORT}/v1/completions",
            json={**fixed, "prompt": ask.prompt, "max_tokens": ask.max_tokens},
        ) as response:
            if response.status != 200:
                answer.problem = f"status {response.status}"
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event, now_s = msgspec.json.decode(line[6:]), time.perf_counter()
                if "error" in event:
                    answer.problem = str(event["error"])[:200]
                elif event["choices"] and event["choices"][0]["text"]:
                    answer.text += event["choices"][0]["text"]
                    if answer.ttft_s is None:
                        answer.ttft_s = now_s - sent_s
                    else:
                        answer.gaps_s.append(now_s - last_s)
                    last_s = now_s
    except aiohttp.ClientError as error:
        answer.problem = type(error).__name__
    return answer


async def measure_speed(session: aiohttp.ClientSession, one: Pod, rng: random.Random) -> Speed:
    def ask(num_prompt: int, num_output: int) -> Ask:
        return Ask(0.0, "", rng.choices(VOCABULARY, k=num_prompt), num_output)

    await send(session, one, ask(512, 16))
    alone = [await send(session, one, ask(LONG[1], 32)) for _ in range(3)]
    long_prompt_s = statistics.median(answer.ttft_s or 0.0 for answer in alone)
    gap_s = statistics.median(gap for answer in alone for gap in answer.gaps_s)
    started_s = time.perf_counter()
    await asyncio.gather(*(send(session, one, ask(16, 128)) for _ in range(16)))
    output_token_s = (time.perf_counter() - started_s) / (16 * 128)
    return Speed(long_prompt_s, gap_s, long_prompt_s / LONG[1], output_token_s)


def make_load(speed: Speed, share: float, phase_s: float, rng: random.Random) -> list[Ask]:
    """Return the requests of the three phases in order of time: ``share`` of what the replicas can compute."""
    mixes = {"chat": {"chat": 1.0}, "long prompts": {"chat": 0.5, "long": 0.5}, "batch": {"chat": 0.5, "batch": 0.5}}
    kinds = {"chat": CHAT, "long": LONG, "batch": BATCH}
    found = []
    for index, (phase, mix) in enumerate(mixes.items()):
        for name, part in mix.items():
            rate = NUM_REPLICAS * share * part / speed.cost_s(kinds[name])
            times = bursts(rate, phase_s) if name == "batch" else arrivals(rate, phase_s, rng)
            for at_s in times:
                least, most, fewest, longest = kinds[name]
                prompt = rng.choices(VOCABULARY, k=rng.randint(least, most))
                found.append(Ask(index * phase_s + at_s, phase, prompt, rng.randint(fewest, longest)))
    return sorted(found, key=lambda ask: ask.at_s)


def arrivals(rate: float, phase_s: float, rng: random.Random) -> Iterator[float]:
    at_s = rng.expovariate(rate)
    while at_s < phase_s:
        yield at_s
        at_s += rng.expovariate(rate)


def bursts(rate: float, phase_s: float) -> Iterator[float]:
    for number in range(int(phase_s / BURST_S)):
        yield from [number * BURST_S] * round(rate * BURST_S)


class Balancer:
    """Sends each request when it is due, to the replica with the fewest unfinished ones."""

    def __init__(self, session: aiohttp.ClientSession, pods: Sequence[Pod]) -> None:
        self._session = session
        self._unfinished = {one.name: 0 for one in pods}
        self._pods = pods

    async def run(self, load: Sequence[Ask]) -> list[Answer]:
        started_s, sent = time.perf_counter(), []
        for ask in load:
            await asyncio.sleep(ask.at_s - (time.perf_counter() - started_s))
            sent.append(asyncio.create_task(self._send(ask)))
        return list(await asyncio.gather(*sent))

    async def _send(self, ask: Ask) -> Answer:
        one = min(self._pods, key=lambda one: self._unfinished[one.name])
        self._unfinished[one.name] += 1
        try:
            return await send(self._session, one, ask)
        finally:
            self._unfinished[one.name] -= 1


class Tuned:
    """The tuner of a cluster over a store that is filled by hand, with the events that it would write."""

    def __init__(self, session: aiohttp.ClientSession, pods: Sequence[Pod], objectives: Objectives) -> None:
        self._session = session
        self._started_s = time.monotonic()
        tuning = Tuning(mode="Auto", interval_seconds=5, cooldown_seconds=10, min_samples=20, max_step_percent=25)
        self._spec = {"tuning": msgspec.to_builtins(msgspec.structs.replace(tuning, objectives=objectives))}
        self._store = Store()
        self._put(status={}, version=1)
        for one in pods:
            self._store.put_pod(KEY, one)
        self.events: list[dict[str, Any]] = []
        self._start()

    def kill(self) -> None:
        """End the tuner without a word, and start another with what the first one left in the status."""
        self._task.cancel()
        self._put(status={"tuning": dict(self._tuner.status(KEY) or {})}, version=2)
        self._note("killed", "the tuner was ended, and another one started")
        self._start()

    async def close(self) -> dict[str, Any]:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        return dict(self._tuner.status(KEY) or {})

    def _start(self) -> None:
        self._tuner = ClusterTuner(
            self._store,
            token_of=lambda _: TOKEN,
            session=self._session,
            metrics=TunerMetrics(CollectorRegistry()),
            changed=lambda _: None,
            event=lambda _, type, reason, message: self._note(reason, message),
        )
        self._task = asyncio.create_task(self._tuner.run())

    def _put(self, status: dict[str, Any], version: int) -> None:
        self._store.put_resource(
            Resource(
                key=KEY,
                uid="1",
                generation=1,
                resource_version=f"{version}",
                spec=self._spec,
                status=status,
                deleting=False,
            )
        )

    def _note(self, reason: str, message: str) -> None:
        at_s = round(time.monotonic() - self._started_s, 1)
        self.events.append({"at_s": at_s, "reason": reason, "message": message})
        print(f"  {at_s:6.0f} s  {reason}: {message}", flush=True)


async def contend(
    name: str, host: int, model: Path, load: Sequence[Ask], objectives: Objectives, folder: Path
) -> tuple[dict[str, Any], list[Answer]]:
    pods = [pod(number, host) for number in range(NUM_REPLICAS)]
    async with contextlib.AsyncExitStack() as stack:
        logs = (folder / f"{name}-{one.name}.log" for one in pods)
        pids = [
            await stack.enter_async_context(replica(one, model, CONTENDERS[name], log))
            for one, log in zip(pods, logs, strict=True)
        ]
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=None)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector, timeout=timeout))
        before = sum(map(resident_bytes, pids))
        tuned = Tuned(session, pods, objectives) if name == "auto" else None
        if tuned is not None:
            asyncio.get_running_loop().call_later(load[-1].at_s / 2, tuned.kill)
        answers = await Balancer(session, pods).run(load)
        status = None if tuned is None else await tuned.close()
        found = await AdminClient(session, TOKEN).gather([target(one) for one in pods])
        limits = [msgspec.to_builtins(one.evidence.effective) for one in found if one.evidence is not None]
        memory = {"resident_bytes_before": before, "resident_bytes_after": sum(map(resident_bytes, pids))}
    result = summary(answers, objectives) | {"start_limits": CONTENDERS[name], "final_limits": limits} | memory
    if tuned is not None:
        result |= {"events": tuned.events, "status": status}
    return result, answers


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    pages = (int(Path(f"/proc/{one}/statm").read_text().split()[1]) for one in (pid, *children))
    return sum(pages) * os.sysconf("SC_PAGE_SIZE")


def summary(answers: Sequence[Answer], objectives: Objectives) -> dict[str, Any]:
    """Return the figures of one contender; those of slices of time are by the time at which requests came."""

    def share(chosen: Sequence[Answer]) -> float | None:
        return round(sum(one.is_good(objectives) for one in chosen) / len(chosen), 4) if chosen else None

    def p95(values: Iterator[float | None]) -> float | None:
        found = quantile([value for value in values if value is not None], 0.95)
        return None if found is None else round(found, 4)

    last_s = answers[-1].ask.at_s
    slices = [
        [one for one in answers if start * SLICE_S <= one.ask.at_s < (start + 1) * SLICE_S]
        for start in range(int(last_s / SLICE_S) + 1)
    ]
    return {
        "requests": len(answers),
        "failed": sum(bool(one.problem) for one in answers),
        "share_good": share(answers),
        "goodput_per_s": round(sum(one.is_good(objectives) for one in answers) / last_s, 3),
        "ttft_p95_s": p95(one.ttft_s for one in answers),
        "itl_p95_s": p95(one.itl_p95_s for one in answers),
        "share_good_by_phase": {
            phase: share([one for one in answers if one.ask.phase == phase])
            for phase in dict.fromkeys(one.ask.phase for one in answers)
        },
        "share_good_by_slice": [share(one) for one in slices],
    }


def digest(answers: Sequence[Answer]) -> str:
    return hashlib.sha256("\0".join(one.text for one in answers).encode()).hexdigest()[:16]


async def run(arguments: argparse.Namespace, model: Path, folder: Path) -> dict[str, Any]:
    rng = random.Random(arguments.seed)
    async with replica(pod(0, 1), model, (256, 2048), folder / "speed.log"), aiohttp.ClientSession() as session:
        speed = await measure_speed(session, pod(0, 1), rng)
    objectives = Objectives(
        ttft_p95_milliseconds=round(1000 * TTFT_OF_ALONE * speed.long_prompt_s),
        inter_token_latency_p95_milliseconds=max(1, round(1000 * ITL_OF_ALONE * speed.gap_s)),
    )
    load = make_load(speed, arguments.load, 60 * arguments.minutes / 3, rng)
    print(f"{speed}\n{objectives}\n{len(load)} requests", flush=True)
    contenders: dict[str, Any] = {}
    first: list[Answer] = []
    for host, name in enumerate(arguments.contender or CONTENDERS, start=2):
        contenders[name], answers = await contend(name, host, model, load, objectives, folder)
        first = first or answers
        changed = sum(one.text != other.text for one, other in zip(answers, first, strict=True) if not one.problem)
        contenders[name] |= {"answers_digest": digest(answers), "answers_unlike_the_first_contenders": changed}
        told = ("share_good", "goodput_per_s", "failed", "ttft_p95_s", "itl_p95_s", "share_good_by_phase")
        print(name, {key: contenders[name][key] for key in told}, flush=True)
    return {
        "settings": {"minutes": arguments.minutes, "load": arguments.load, "seed": arguments.seed, "flags": FLAGS},
        "speed_of_a_replica": msgspec.to_builtins(speed),
        "objectives": msgspec.to_builtins(objectives),
        "slice_s": SLICE_S,
        "contenders": contenders,
    }


def draw(result: dict[str, Any], path: str) -> None:
    """Draw each contender's share of good requests over time. Needs matplotlib (the `bench` extra)."""
    from flyball_simulation.chart import BLUE, GREEN, GREY, ORANGE, RED, new_figure
    from flyball_simulation.chart import save as save_figure

    figure = new_figure(9, 4)
    axes = figure.subplots()
    colors = dict(zip(CONTENDERS, (RED, GREY, BLUE, ORANGE, GREEN), strict=True))
    for name, one in result["contenders"].items():
        good = one["share_good_by_slice"]
        known = [(index * SLICE_S / 60, 100 * share) for index, share in enumerate(good) if share is not None]
        label = f"{name}: {one['share_good']:.0%}"
        axes.plot(*zip(*known, strict=True), color=colors[name], label=label, linewidth=2.5 if name == "auto" else 1)
    for boundary in (1, 2):
        axes.axvline(boundary * result["settings"]["minutes"] / 3, color=GREY, linestyle=":")
    axes.set(
        xlabel="minutes",
        ylabel="good requests, %",
        ylim=(0, 102),
        title="chat | chat and long prompts | chat and batches",
    )
    axes.legend(loc="lower left")
    axes.grid(alpha=0.3)
    save_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0, help="for each contender")
    parser.add_argument("--load", type=float, default=0.6, help="share of what the replicas can compute")
    parser.add_argument("--contender", action="append", choices=CONTENDERS, help="default: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--chart", metavar="FILE.svg")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_checkpoint(Path(folder), "small")
        result = asyncio.run(run(arguments, model, Path(folder)))
    print(json.dumps({name: one["share_good"] for name, one in result["contenders"].items()}))
    save("closed_loop", result)
    if arguments.chart:
        draw(result, arguments.chart)


if __name__ == "__main__":
    main()
