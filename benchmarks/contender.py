"""One contender of closed_loop.py, in a time of its own: two replicas, their clients and, for `auto`, an operator.

    python benchmarks/own_time.py contender serve FOLDER       replicas and clients; FOLDER/task.json says what to do
    python benchmarks/own_time.py contender operate FOLDER     the tuner of a cluster, over objects made by hand

`serve` prints "ready", waits for a line, sends the requests at their times and writes FOLDER/outcome.json. In the middle it
kills the operator and starts another one, which goes on from FOLDER/status.json, as from the status of the LLMDeployment.
"""

import asyncio
import contextlib
import logging
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from msgspec import Struct, field
from prometheus_client import CollectorRegistry

from flyball_operator.cluster import tuner as tuner_module
from flyball_operator.cluster.store import Store
from flyball_operator.cluster.tuner import ClusterTuner, target
from flyball_operator.cluster.tuner_metrics import TunerMetrics
from flyball_operator.observed import Key, Pod, Resource
from flyball_operator.spec import Objectives, Tuning
from flyball_operator.tuning.admin import AdminClient
from flyball_operator.tuning.record import from_line
from flyball_protocol import Limits
from flyball_protocol.endpoints import ADMIN_PORT, ADMIN_TOKEN_ENV, API_PORT, READYZ_PATH

KEY, TOKEN = Key("default", "demo"), "a-benchmark-token"
FLAGS = ("--served-model-name=m", "--dtype=bfloat16", "--max-model-len=4096", "--num-threads=1", "--drain-timeout=5")
KV_CACHE = "--kv-cache-memory-bytes=256MiB"
NUM_REPLICAS = 2
OWN_TIME = "own_time.py"
START_S = 180.0
LAST_S = 300.0
"""How long requests may take after the last one was sent; what has not ended then has failed."""
VOCABULARY = range(300, 8000)


class Ask(Struct, frozen=True):
    """A request: when it is sent, and what it asks for."""

    at_s: float
    phase: str
    prompt: list[int]
    max_tokens: int


class Answer(Struct):
    """What came of a request. ``problem`` is "" unless it failed."""

    ttft_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    problem: str = ""

    def is_good(self, objectives: Objectives) -> bool:
        """Return whether the first token came in time, and the 95th percentile of the gaps is within the objective."""
        ttft_ms, itl_ms = objectives.ttft_p95_milliseconds, objectives.inter_token_latency_p95_milliseconds
        assert ttft_ms is not None and itl_ms is not None
        in_time = self.ttft_s is not None and self.ttft_s * 1000 <= ttft_ms
        return not self.problem and in_time and (self.itl_p95_s or 0.0) * 1000 <= itl_ms

    @property
    def itl_p95_s(self) -> float | None:
        return quantile(self.gaps_s, 0.95)


class Task(Struct, frozen=True, kw_only=True):
    """What a contender does.

    Attributes:
        host: of its addresses, 127.99.HOST.
        limits: max sequences and token budget of the start.
        tuning: None: the limits stay.
        kill_at_s: when the operator is killed.
    """

    host: int
    model: str
    limits: tuple[int, int]
    objectives: Objectives
    tuning: Tuning | None
    kill_at_s: float
    load: list[Ask]


class Told(Struct, frozen=True):
    """A decision of the tuner, or its end. ``limits`` are those that most replicas should have from now on."""

    at_s: float
    action: str
    reason: str
    why: str
    limits: Limits | None = None


class Outcome(Struct, frozen=True, kw_only=True):
    answers: list[Answer]
    final_limits: list[Limits]
    resident_bytes_before: int
    resident_bytes_after: int
    decisions: list[Told]
    num_decisions: int
    num_replayed: int
    status: dict[str, Any]


def quantile(values: Sequence[float], share: float) -> float | None:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def pods_of(host: int) -> list[Pod]:
    return [_pod(number, host) for number in range(NUM_REPLICAS)]


def _pod(number: int, host: int) -> Pod:
    metadata = {"namespace": KEY.namespace, "name": f"demo-{number}", "uid": f"{number}", "resourceVersion": "1"}
    status = {"podIP": f"127.99.{host}.{number + 1}", "conditions": [{"type": "Ready", "status": "True"}]}
    return Pod.of({"metadata": metadata, "status": status})


def run_by(script: str, *words: str) -> tuple[str, ...]:
    """Return the command line of a module that one of the scripts here runs; by OWN_TIME, it has this process's time."""
    return (sys.executable, str(Path(__file__).with_name(script)), *words)


@contextlib.asynccontextmanager
async def replica(
    one: Pod, model: Path, limits: tuple[int, int], log: Path, script: str = OWN_TIME
) -> AsyncIterator[int]:
    """One replica at the pod's address, ready. Yields the id of its process."""
    addresses = (f"--host={one.ip}", f"--port={API_PORT}", f"--admin-host={one.ip}", f"--admin-port={ADMIN_PORT}")
    envelope = (f"--max-num-seqs={limits[0]}", f"--max-num-batched-tokens={limits[1]}", KV_CACHE)
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *run_by(script, "flyball_runtime.cli", "serve", str(model), *FLAGS, *addresses, *envelope),
            env={**os.environ, ADMIN_TOKEN_ENV: TOKEN},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        await _until_ready(one, process, log)
        yield process.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def _until_ready(one: Pod, process: asyncio.subprocess.Process, log: Path) -> None:
    deadline_s = time.monotonic() + START_S
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < deadline_s and process.returncode is None:
            with contextlib.suppress(aiohttp.ClientConnectionError):
                async with session.get(f"http://{one.ip}:{API_PORT}{READYZ_PATH}") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.2)
    raise SystemExit(f"{one.name} did not become ready:\n{log.read_text()[-2000:]}")


def new_session() -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))


async def send(session: aiohttp.ClientSession, one: Pod, prompt: Sequence[int], max_tokens: int) -> Answer:
    answer, sent_s, last_s = Answer(), time.perf_counter(), 0.0
    asked = {"model": "m", "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
    try:
        async with session.post(
            f"http://{one.ip}:{API_PORT}/v1/completions", json={**asked, "prompt": prompt, "max_tokens": max_tokens}
        ) as response:
            if response.status != 200:
                answer.problem = f"status {response.status}"
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event, now_s = msgspec.json.decode(line[6:]), time.perf_counter()
                if "error" in event:
                    answer.problem = str(event["error"])[:200]
                elif event["choices"] and (token_ids := event["choices"][0].get("token_ids")):
                    gap_s = None if answer.ttft_s is None else now_s - last_s
                    _take(answer, token_ids, now_s - sent_s, gap_s)
                    last_s = now_s
    except aiohttp.ClientError as error:
        answer.problem = type(error).__name__
    if not answer.problem and len(answer.token_ids) != max_tokens:
        answer.problem = f"{len(answer.token_ids)} of {max_tokens} tokens"
    return answer


def _take(answer: Answer, token_ids: list[int], since_sent_s: float, gap_s: float | None) -> None:
    """Add the tokens of one event; those behind the first one had no gap."""
    gaps_s = [gap_s or 0.0, *[0.0] * (len(token_ids) - 1)]
    if answer.ttft_s is None:
        answer.ttft_s = since_sent_s
        gaps_s.pop(0)
    answer.gaps_s += gaps_s
    answer.token_ids += token_ids


class Balancer:
    """Sends each request when it is due, to the replica with the fewest unfinished ones."""

    def __init__(self, session: aiohttp.ClientSession, pods: Sequence[Pod]) -> None:
        self._session = session
        self._unfinished = {one.name: 0 for one in pods}
        self._pods = pods

    async def run(self, load: Sequence[Ask]) -> list[Answer]:
        started_s, sent = time.monotonic(), []
        for ask in load:
            await asyncio.sleep(ask.at_s - (time.monotonic() - started_s))
            sent.append(asyncio.create_task(self._send(ask)))
        _, late = await asyncio.wait(sent, timeout=LAST_S)
        for one in late:
            one.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        return [Answer(problem=f"no end after {LAST_S:.0f} s") if one in late else one.result() for one in sent]

    async def _send(self, ask: Ask) -> Answer:
        one = min(self._pods, key=lambda one: self._unfinished[one.name])
        self._unfinished[one.name] += 1
        try:
            return await send(self._session, one, ask.prompt, ask.max_tokens)
        finally:
            self._unfinished[one.name] -= 1


class Operator:
    """A process that tunes. It can be killed at any moment, and another one started."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.killed_s: list[float] = []

    async def start(self) -> None:
        with (self._folder / "operator.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *run_by(OWN_TIME, "contender", "operate", str(self._folder)), stdout=log, stderr=log
            )

    async def until_it_decides(self) -> None:
        """Wait for its first decision, which posts the objectives. Raises SystemExit if it ends before."""
        while not (self._folder / "status.json").exists():
            self._check()
            await asyncio.sleep(0.1)

    async def kill(self) -> None:
        """Raises SystemExit if it has ended before."""
        self._check()
        self._process.kill()
        await self._process.wait()

    def _check(self) -> None:
        if self._process.returncode is not None:
            raise SystemExit(f"the operator ended:\n{(self._folder / 'operator.log').read_text()[-2000:]}")

    async def replace_at(self, at_s: float) -> None:
        """Kill it ``at_s`` from now, and start another one."""
        await asyncio.sleep(at_s)
        await self.kill()
        self.killed_s.append(time.monotonic())
        await self.start()


async def serve(folder: Path) -> None:
    task = msgspec.json.decode((folder / "task.json").read_bytes(), type=Task)
    pods, operator = pods_of(task.host), Operator(folder)
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(new_session())
        pids = [
            await stack.enter_async_context(replica(one, Path(task.model), task.limits, folder / f"{one.name}.log"))
            for one in pods
        ]
        await asyncio.gather(*(warm_up(session, one) for one in pods))
        before = sum(map(resident_bytes, pids))
        if task.tuning is not None:
            await operator.start()
            await operator.until_it_decides()
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        started_s = time.monotonic()
        if task.tuning is not None:
            replacing = asyncio.create_task(operator.replace_at(task.kill_at_s))
        answers = await Balancer(session, pods).run(task.load)
        if task.tuning is not None:
            await replacing
            await operator.kill()
        found = await AdminClient(session, TOKEN).gather([target(one) for one in pods])
        after = sum(map(resident_bytes, pids))
    told, num_replayed = decisions(folder, started_s)
    killed = [Told(round(at_s - started_s, 1), "killed", "killed", "") for at_s in operator.killed_s]
    status = folder / "status.json"
    outcome = Outcome(
        answers=answers,
        final_limits=[one.evidence.effective for one in found if one.evidence is not None],
        resident_bytes_before=before,
        resident_bytes_after=after,
        decisions=sorted([*told, *killed], key=lambda one: one.at_s),
        num_decisions=len(told),
        num_replayed=num_replayed,
        status=msgspec.json.decode(status.read_bytes()) if status.exists() else {},
    )
    (folder / "outcome.json").write_bytes(msgspec.json.encode(outcome))


async def warm_up(session: aiohttp.ClientSession, one: Pod) -> None:
    """Touch what a first request is slow for."""
    rng = random.Random(0)
    for num_prompt in (512, 2048):
        await send(session, one, rng.choices(VOCABULARY, k=num_prompt), 16)


def decisions(folder: Path, started_s: float) -> tuple[list[Told], int]:
    """Return what the operators decided, and how many of the decisions come out the same when they are made again."""
    path = folder / "decisions.jsonl"
    records = [from_line(line) for line in path.read_bytes().splitlines()] if path.exists() else []
    told = [
        Told(
            round(one.now_s - started_s, 1),
            one.decision.action,
            one.decision.reason,
            one.decision.why,
            one.decision.limits,
        )
        for one in records
    ]
    return told, sum(one.replay() == one.decision for one in records)


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    pages = (int(Path(f"/proc/{one}/statm").read_text().split()[1]) for one in (pid, *children))
    return sum(pages) * os.sysconf("SC_PAGE_SIZE")


async def operate(folder: Path) -> None:
    """Tune until the process is killed."""
    task = msgspec.json.decode((folder / "task.json").read_bytes(), type=Task)
    status = folder / "status.json"
    tuner_module.decisions_log.addHandler(logging.FileHandler(folder / "decisions.jsonl"))
    tuner_module.decisions_log.setLevel(logging.DEBUG)
    store = Store()
    store.put_resource(
        Resource(
            key=KEY,
            uid="1",
            generation=1,
            resource_version="1",
            spec={"tuning": msgspec.to_builtins(task.tuning)},
            status={"tuning": msgspec.json.decode(status.read_bytes())} if status.exists() else {},
            deleting=False,
        )
    )
    for one in pods_of(task.host):
        store.put_pod(KEY, one)

    def write_status(_: Key) -> None:
        written = status.with_suffix(".new")
        written.write_bytes(msgspec.json.encode(tuner.status(KEY) or {}))
        written.replace(status)

    async with aiohttp.ClientSession() as session:
        tuner = ClusterTuner(
            store,
            token_of=lambda _: TOKEN,
            session=session,
            metrics=TunerMetrics(CollectorRegistry()),
            changed=write_status,
            event=lambda _, type, reason, message: print(f"{type} {reason}: {message}", flush=True),
            now=lambda: datetime.fromtimestamp(time.monotonic(), UTC),  # a time of day that stands still too
        )
        await tuner.run()


def main(words: Sequence[str]) -> None:
    role, folder = words
    asyncio.run({"serve": serve, "operate": operate}[role](Path(folder)))
