"""Soak of one `flyball serve`: 500 streams at once, then 5,000 requests, half of whose clients mean to leave early.

    python benchmarks/soak.py [--streams 500] [--requests 5000]

Asked for at the end: no errors; every stream whole and every token accounted for; nothing running, waiting or holding a
KV block; the server's files and threads back at where they were; a drain that finds nothing to wait for; and flat memory
over the last 2,000 requests. Flat: a least-squares line through the resident size of either process rises by less than
2 MiB, about 1 KiB a request, some times the allocator's noise. What is wrong is listed, and the exit code is 1.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from common import make_checkpoint, save

sys.path.append(str(Path(__file__).parent.parent / "tests"))  # the server and the traffic are the tests' own

from replicas import Replica, replica
from traffic import Traffic, plain_stream, random_ask

MIB = 2**20
TAIL = 2000
# 500 streams need 5000 of these 6144 blocks, and the second phase has touched them all long before its tail.
FLAGS = ("--kv-cache-memory-bytes", "96MiB", "--max-num-seqs", "512", "--max-model-len", "1024")
MAX_GROWTH_BYTES = 2 * MIB
SAMPLE_S = 0.2


class Watch:
    """What the server's two processes hold, sampled while requests come and go."""

    def __init__(self, server: Replica) -> None:
        self._pids = {"api": server.process.pid, "engine": server.engine_pid()}
        self.samples: list[dict[str, int]] = []

    @asynccontextmanager
    async def watching(self, traffic: Traffic):  # type: ignore[no-untyped-def]
        task = asyncio.create_task(self._sample(traffic))
        try:
            yield
        finally:
            task.cancel()

    def growth_bytes(self, process: str, since: int) -> float:
        """Rise of the line fitted to the resident size, from request ``since`` to the last one."""
        tail = [(sample["requests"], sample[process]) for sample in self.samples if sample["requests"] >= since]
        requests, sizes = np.array(tail, dtype=float).T
        slope = np.polyfit(requests - requests[0], sizes, 1)[0]
        return float(slope * (requests[-1] - requests[0]))

    def held(self) -> dict[str, int]:
        """Open files and threads of each process."""
        return {
            f"{process} {what}": len(list(Path(f"/proc/{pid}/{folder}").iterdir()))
            for process, pid in self._pids.items()
            for what, folder in (("files", "fd"), ("threads", "task"))
        }

    async def _sample(self, traffic: Traffic) -> None:
        while True:
            sizes = {process: resident_bytes(pid) for process, pid in self._pids.items()}
            self.samples.append({"requests": traffic.num_finished + traffic.num_left} | sizes)
            await asyncio.sleep(SAMPLE_S)


def resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def cpu_s(pid: int) -> float:
    """User and system seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


class Soak:
    """The two phases against one server; ``wrong`` collects every violation."""

    def __init__(self, server: Replica) -> None:
        self._server = server
        self._watch = Watch(server)
        self.wrong: list[str] = []

    def expect(self, holds: bool, complaint: str) -> None:
        if not holds:
            self.wrong.append(complaint)

    async def streams(self, num_streams: int, max_tokens: int) -> dict[str, Any]:
        """All at once, each read to its end."""
        generated = self._server.metric("flyball_generation_tokens_total")
        api_cpu_s, start_s = cpu_s(self._server.process.pid), time.perf_counter()
        async with Traffic.opened(self._server.url) as traffic:
            await traffic.send_all([plain_stream(index, max_tokens) for index in range(num_streams)], num_streams)
        seconds, api_cpu_s = time.perf_counter() - start_s, cpu_s(self._server.process.pid) - api_cpu_s
        num_tokens, most = traffic.num_output_tokens, traffic.most_streaming
        generated = self._server.metric("flyball_generation_tokens_total") - generated
        self.wrong += traffic.errors
        self.expect(most == num_streams, f"at most {most} of {num_streams} streams ran at once")
        self.expect(generated == num_tokens, f"the server counted {generated:g} tokens, the clients {num_tokens}")
        return {
            "streams": num_streams,
            "tokens": num_tokens,
            "errors": len(traffic.errors),
            "most_at_once": most,
            "seconds": round(seconds, 2),
            "tokens_per_s": round(num_tokens / seconds),
            "api_cpu_us_per_token": round(api_cpu_s / num_tokens * 1e6, 1),
        }

    async def cancels(self, num_requests: int, concurrency: int) -> dict[str, Any]:
        """Clients that leave at random moments among clients that stay; then nothing may be left of any."""
        rng = random.Random(0)
        asks = [random_ask(rng, max_tokens=48, patience_s=1.0) for _ in range(num_requests)]
        outcomes = self._outcomes()
        held, start_s = self._watch.held(), time.perf_counter()
        self._watch.samples.clear()
        async with Traffic.opened(self._server.url) as traffic, self._watch.watching(traffic):
            await traffic.send_all(asks, concurrency)
        seconds = time.perf_counter() - start_s
        await self._idle()
        outcomes = {name: count - outcomes[name] for name, count in self._outcomes().items()}
        self.wrong += traffic.errors
        self._check_outcomes(outcomes, traffic.num_choices, sum(ask.num_choices for ask in asks))
        self._check_blocks()
        self._check_held(held)
        return {
            "requests": num_requests,
            "left": traffic.num_left,
            "errors": len(traffic.errors),
            "outcomes": outcomes,
            "seconds": round(seconds, 2),
            "kv_blocks": self._evidence()["kv_blocks"],
            "memory": {process: self._check_memory(process, num_requests) for process in ("api", "engine")},
        }

    def _check_outcomes(self, outcomes: dict[str, float], num_complete: int, num_asked: int) -> None:
        """A client that leaves at once may never have been heard, so not every choice asked for has an outcome."""
        ended_well, ended = outcomes["stop"] + outcomes["length"], sum(outcomes.values())
        self.expect(outcomes["error"] == 0, f"{outcomes['error']:g} requests ended in an error")
        self.expect(
            num_complete <= ended_well <= ended <= num_asked,
            f"of {num_asked} choices {ended:g} ended, {ended_well:g} well; clients saw {num_complete} complete",
        )

    def _check_blocks(self) -> None:
        blocks = self._evidence()["kv_blocks"]
        self.expect(blocks["free"] + blocks["cached"] == blocks["total"], f"KV blocks are still held: {blocks}")

    def _check_held(self, before: dict[str, int]) -> None:
        """Our own polling's connections come and go; 20 more is a leak."""
        for what, count in self._watch.held().items():
            self.expect(count <= before[what] + 20, f"{what} grew from {before[what]} to {count}")

    def _check_memory(self, process: str, num_requests: int) -> dict[str, float]:
        since = max(num_requests - TAIL, num_requests // 2)
        sizes = [one[process] for one in self._watch.samples]
        growth_bytes = self._watch.growth_bytes(process, since)
        self.expect(
            growth_bytes < MAX_GROWTH_BYTES,
            f"{process} grew by {growth_bytes / MIB:.2f} MiB over the last {num_requests - since} requests; "
            f"{MAX_GROWTH_BYTES / MIB:g} are allowed",
        )
        return {
            "start_mib": round(sizes[0] / MIB, 1),
            "end_mib": round(sizes[-1] / MIB, 1),
            "tail_growth_mib": round(growth_bytes / MIB, 2),
        }

    async def _idle(self) -> None:
        try:
            async with asyncio.timeout(20):
                while self._server.load() != (0, 0, 0):
                    await asyncio.sleep(0.1)
        except TimeoutError:
            self.wrong.append(f"running, waiting and used blocks stayed at {self._server.load()}")

    def _outcomes(self) -> dict[str, float]:
        names = ("stop", "length", "abort", "error")
        return {name: self._server.metric(f'flyball_requests_total{{outcome="{name}"}}') for name in names}

    def _evidence(self) -> dict[str, Any]:
        evidence: dict[str, Any] = self._server.admin.get("/admin/evidence").json()
        return evidence


async def run(args: argparse.Namespace, server: Replica) -> tuple[dict[str, Any], list[str]]:
    soak = Soak(server)
    result = {
        "streams": await soak.streams(args.streams, args.max_tokens),
        "cancels": await soak.cancels(args.requests, args.concurrency),
    }
    start_s = time.perf_counter()
    exit_code = await asyncio.to_thread(server.stop)
    soak.expect(exit_code == 0, f"the drain ended with exit code {exit_code}")
    return result | {"drain_s": round(time.perf_counter() - start_s, 2), "wrong": soak.wrong[:20]}, soak.wrong


def show(result: dict[str, Any]) -> None:
    for phase in ("streams", "cancels"):
        for name, value in result[phase].items():
            print(f"{phase:8} {name:22} {value}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=Path, default=Path("out/checkpoints"))
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--max-tokens", type=int, default=128, help="of each stream of the first phase")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--concurrency", type=int, default=64, help="of the second phase")
    args = parser.parse_args()
    model = make_checkpoint(args.checkpoints, "tiny", dtype="float32")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with replica(model, *FLAGS, log=log) as server:
            result, wrong = asyncio.run(run(args, server))
        wrong += [line for line in log.read_text().splitlines() if "Traceback" in line or "never retrieved" in line]
    show(result)
    save("soak", result)
    if wrong:
        sys.exit("\n".join(["wrong:", *wrong[:20]]))


if __name__ == "__main__":
    main()
