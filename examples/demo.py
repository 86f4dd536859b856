"""The demo: one manifest, two replicas, traffic that shifts, a limit that follows it, a drain.

It takes about a minute, two if tuning needs them.

    make demo

It runs `flyball local -f demo.yaml` as you would, talks to its one address with the `openai` client, and asks
`flyball status` for the table. Half-way it sends long prompts, which make the streams of the others stutter, and then
writes a latency objective into its copy of the manifest, between the latency before and that of now. It waits until tuning
meets that objective, and says whether it did. Exits 0 when every request was answered, a limit was changed and the drain
lost nothing.
"""

import asyncio
import contextlib
import itertools
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import openai
import yaml
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from flyball_operator.errors import LocalError
from flyball_operator.local.control import InstanceFolder, ask_status
from flyball_operator.local.snapshot import Snapshot, render

EXAMPLES = Path(__file__).parent
MANIFEST = EXAMPLES / "demo.yaml"
NAME = "demo"

CALM_S, BUSY_S, START_S, DRAIN_S = 12, 10, 90, 30
SHOW_S, MEET_S = 15, 60
"""How long tuning is shown at least, and given at most, to meet the objective."""

BUDGET, ENOUGH_GAPS = 0.05, 500
NUM_CHATTERS, NUM_READERS = 6, 6
NUM_QUESTIONS_IN_LONG_PROMPT = 150
SHOWN_ANSWERS = 3
LINES_OF_ANSWER = 3
PANEL_HEIGHT = LINES_OF_ANSWER + 2

QUESTIONS = (
    "What is continuous batching?",
    "What is a KV cache?",
    "Why is prefix caching useful?",
    "What is chunked prefill?",
    "Explain preemption in detail",
    "What is time to first token?",
    "What is a flyball governor?",
    "What is queue depth?",
    "Tell me a story about a robot",
    "Count from 3 to 17",
    "What is an SLO?",
    "What is backpressure?",
)


@dataclass
class Answer:
    question: str
    text: str = ""
    done: bool = False


@dataclass(frozen=True)
class Phase:
    """What the clients saw for a while: p95 of the gaps between tokens, and of the time to first token."""

    name: str
    itl_ms: float
    ttft_ms: float


@dataclass
class Tally:
    """What the clients saw."""

    answers: deque[Answer] = field(default_factory=lambda: deque(maxlen=SHOWN_ANSWERS))
    num_answered: int = 0
    num_tokens: int = 0
    failures: list[str] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    objective: str = "no objective was set"
    _start: tuple[int, int] = (0, 0)

    def begin(self) -> None:
        """Leave out of the next phase what was seen up to now."""
        self._start = len(self.ttft_s), len(self.gaps_s)

    def end(self, name: str) -> None:
        """Note a phase; the next one begins."""
        first_s, gaps_s = self.ttft_s[self._start[0] :], self.gaps_s[self._start[1] :]
        self.phases.append(Phase(name, 1000 * percentile(gaps_s, 95), 1000 * percentile(first_s, 95)))
        self.begin()


class Client:
    """Asks through the balanced address, streaming, with the real `openai` client."""

    def __init__(self, url: str, tally: Tally) -> None:
        # No retries: a request that fails shall be seen.
        self._openai = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self._tally = tally
        self.stopping = False

    async def ask(self, question: str, *, context: str = "", max_tokens: int = 300, shown: bool = True) -> None:
        answer = Answer(question)
        if shown:
            self._tally.answers.append(answer)
        try:
            await self._stream(answer, f"{context}{question}", max_tokens)
            self._tally.num_answered += 1
        except openai.OpenAIError as error:
            self._tally.failures.append(f"{question}: {error}")
        answer.done = True

    async def _stream(self, answer: Answer, prompt: str, max_tokens: int) -> None:
        last_s = start_s = time.perf_counter()
        stream = await self._openai.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
        )
        first = True
        async for chunk in stream:
            if not chunk.choices or not (text := chunk.choices[0].delta.content):
                continue
            now_s = time.perf_counter()
            (self._tally.ttft_s if first else self._tally.gaps_s).append(now_s - (start_s if first else last_s))
            first, last_s = False, now_s
            answer.text += text
            self._tally.num_tokens += 1

    async def chat(self, questions: Iterator[str], pause_s: float) -> None:
        while not self.stopping:
            await self.ask(next(questions))
            await asyncio.sleep(pause_s)

    async def read(self, rng: random.Random) -> None:
        """Long prompts with a short answer: the traffic that makes other people's streams stutter."""
        while not self.stopping:
            words = " ".join(rng.choice(QUESTIONS) for _ in range(NUM_QUESTIONS_IN_LONG_PROMPT))
            await self.ask("What is a KV cache?", context=f"{words} ", max_tokens=8, shown=False)


class Operator:
    """`flyball local` as a process."""

    def __init__(self, folder: Path) -> None:
        self._state = folder / "state"
        self._manifest = folder / "demo.yaml"
        self._instance = InstanceFolder(self._state, NAME)
        document = yaml.safe_load(MANIFEST.read_text())
        uri = document["spec"]["model"]["uri"].removeprefix("file:")
        document["spec"]["model"]["uri"] = f"file:{(EXAMPLES / uri).resolve()}"
        self._document = document
        self._draining = False
        self._write()

    async def start(self) -> None:
        command = Path(sys.executable).with_name("flyball")
        arguments = ["local", "-f", str(self._manifest), "--port", "0", "--state-dir", str(self._state)]
        with (self._manifest.parent / "operator.log").open("wb") as log:
            # A session of its own: Ctrl-C reaches the demo alone, which then drains.
            self._process = await asyncio.create_subprocess_exec(
                command, *arguments, stdout=log, stderr=log, start_new_session=True
            )

    async def snapshot(self) -> Snapshot | None:
        if self._process.returncode is not None and not self._draining:
            raise SystemExit(f"flyball local ended with exit code {self._process.returncode}:\n{self.log()}")
        try:
            return await ask_status(self._instance)
        except LocalError:
            return None  # it is starting

    def set_objective(self, milliseconds: int) -> None:
        objectives = self._document["spec"]["tuning"].setdefault("objectives", {})
        objectives["interTokenLatencyP95Milliseconds"] = milliseconds
        self._write()

    async def drain(self) -> int:
        self._draining = True
        self._process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(DRAIN_S):
            return await self._process.wait()

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()

    def log(self) -> str:
        return (self._manifest.parent / "operator.log").read_text()

    def _write(self) -> None:
        new = self._manifest.with_suffix(".new")
        new.write_text(yaml.safe_dump(self._document))
        new.replace(self._manifest)


class Screen:
    """The live picture on a terminal, cut to its size; elsewhere the same, now and then."""

    def __init__(self, console: Console, operator: Operator, tally: Tally) -> None:
        self._console, self._operator, self._tally = console, operator, tally
        self.snapshot: Snapshot | None = None
        self.phase = ""

    async def run(self) -> None:
        if not self._console.is_terminal:
            return await self._lines()
        with Live(console=self._console, auto_refresh=False) as live:
            try:
                while True:
                    self.snapshot = await self._operator.snapshot() or self.snapshot
                    live.update(self._picture(), refresh=True)
                    await asyncio.sleep(0.25)
            finally:  # what stays on the terminal: no answers cut off in the middle
                live.update(self._status(), refresh=True)

    async def _lines(self) -> None:
        for tick in itertools.count():
            self.snapshot = await self._operator.snapshot() or self.snapshot
            if self.snapshot is not None and tick % 16 == 12:
                self._console.print(self._picture())
            await asyncio.sleep(0.5)

    def _picture(self) -> RenderableType:
        """The status, and below it as many of the latest answers as there is room for."""
        status = self._status()
        room = self._console.height - 1 - self._num_lines(status)
        answers = list(self._tally.answers)[-(room // PANEL_HEIGHT) :] if room >= PANEL_HEIGHT else []
        return Group(status, *map(self._panel, answers))

    def _status(self) -> RenderableType:
        """Phase, table and the latest events; of those as many as leave room for one answer."""
        phase = Text(self.phase, style="bold cyan", no_wrap=True, overflow="ellipsis")
        if self.snapshot is None:
            return phase
        events = self.snapshot.events
        for start in range(len(events)):
            status = Group(phase, render(replace(self.snapshot, events=events[start:])))
            if self._num_lines(status) < self._console.height - PANEL_HEIGHT:
                return status
        return Group(phase, render(replace(self.snapshot, events=())))

    def _panel(self, answer: Answer) -> Panel:
        """The last lines of an answer, as they would stand on a page."""
        text = Text(answer.text.replace("\n", " ") + ("" if answer.done else " ▌"))
        lines = text.wrap(self._console, self._console.width - 4)[-LINES_OF_ANSWER:]
        return Panel(Text("\n").join(lines), title=answer.question, title_align="left", height=PANEL_HEIGHT)

    def _num_lines(self, part: RenderableType) -> int:
        return len(self._console.render_lines(part, pad=False))


@asynccontextmanager
async def background(coroutine: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(coroutine)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def wait_ready(operator: Operator) -> Snapshot:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        snapshot = await operator.snapshot()
        if snapshot is not None and snapshot.num_ready == snapshot.wanted:
            return snapshot
        await asyncio.sleep(0.2)
    raise SystemExit(f"the replicas were not ready within {START_S} s:\n{operator.log()}")


def percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1] if len(values) > 1 else 0.0


def changes(snapshot: Snapshot) -> list[str]:
    return [event.text for event in snapshot.events if event.text.startswith("tuning, revision")]


async def session(console: Console, folder: Path) -> int:
    operator, tally = Operator(folder), Tally()
    screen = Screen(console, operator, tally)
    screen.phase = f"1/5  flyball local -f {MANIFEST.relative_to(EXAMPLES.parent)}: starting the replicas"
    await operator.start()
    try:
        async with background(screen.run()):
            ready = await wait_ready(operator)
            client = Client(ready.url, tally)
            async with asyncio.TaskGroup() as traffic:
                await send_traffic(traffic, client, operator, screen, tally)
                client.stopping = True
                await asyncio.sleep(0.3)  # whoever is about to ask has asked
                final = await operator.snapshot() or ready
                exit_code = await operator.drain()  # answers under way are finished first
            screen.phase = "5/5  drained; the replicas as they were before"
    finally:
        operator.kill()
    return report(console, tally, changes(final), exit_code)


def seen_itl_ms(snapshot: Snapshot | None) -> float:
    """Return the p95 of the gaps that the slowest replica sees, in ms."""
    evidence = [replica.evidence.evidence for replica in snapshot.replicas if replica.evidence] if snapshot else []
    seen_s = [one.itl.p95_s for one in evidence if one is not None and one.itl.p95_s is not None]
    if not seen_s:
        raise SystemExit("the replicas reported no inter-token latency")
    return 1000 * max(seen_s)


def gaps_within(snapshot: Snapshot | None, objective_ms: int) -> tuple[int, int]:
    """Return how many gaps the replicas counted under the limits in force, and how many were within the objective."""
    evidence = [replica.evidence.evidence for replica in snapshot.replicas if replica.evidence] if snapshot else []
    counted = [one.objective_counts for one in evidence if one is not None and one.objective_counts is not None]
    gaps = [one.gaps for one in counted if one.objectives.itl_s == objective_ms / 1000]
    return sum(one.num for one in gaps), sum(one.num - one.num_over for one in gaps)


async def send_traffic(
    traffic: asyncio.TaskGroup, client: Client, operator: Operator, screen: Screen, tally: Tally
) -> None:
    """Chats, then chats beside long prompts, then the same under an objective."""
    questions = itertools.cycle(QUESTIONS)
    screen.phase = f"2/5  {NUM_CHATTERS} people chat through one address"
    for _ in range(NUM_CHATTERS):
        traffic.create_task(client.chat(questions, pause_s=0.2))
    await asyncio.sleep(CALM_S)
    calm_ms = seen_itl_ms(screen.snapshot)
    tally.end("while people chat")
    for index in range(NUM_READERS):
        traffic.create_task(client.read(random.Random(index)))
    screen.phase = "3/5  long prompts arrive, and the streams of the others stutter"
    await asyncio.sleep(BUSY_S)
    tally.end("beside long prompts")
    objective_ms = math.ceil(math.sqrt(calm_ms * seen_itl_ms(screen.snapshot)))
    operator.set_objective(objective_ms)
    screen.phase = f"4/5  the manifest now asks for an inter-token latency p95 of {objective_ms} ms"
    await until_met(screen, tally, objective_ms)
    tally.end("under the objective")
    screen.phase = "5/5  draining: answers under way are finished"


async def until_met(screen: Screen, tally: Tally, objective_ms: int) -> None:
    """Wait until the replicas' counts meet the objective. The clients' phase begins when the replicas begin to count."""
    start_s, asked, num = time.monotonic(), screen.phase, 0
    while (after_s := time.monotonic() - start_s) < MEET_S:
        await asyncio.sleep(0.5)
        if not num:
            tally.begin()
        num, num_within = gaps_within(screen.snapshot, objective_ms)
        is_met = num >= ENOUGH_GAPS and num_within >= (1 - BUDGET) * num
        within = f"{num_within / max(1, num):.1%} of {num} gaps"
        tally.objective = f"As the replicas count, {within} are within the objective of {objective_ms} ms"
        tally.objective += f": met after {after_s:.0f} s" if is_met else f": not met in {after_s:.0f} s"
        screen.phase = f"{asked}: {within} since then are shorter" if num else asked
        if is_met and after_s >= SHOW_S:
            break


def story(phases: list[Phase]) -> Iterator[str]:
    """Yield what the clients saw in each phase, and why; p95 of the time between two tokens, and to the first one."""
    causes = (
        "A step computes one token for each answer under way.",
        "The same steps compute long prompts too, piece by piece, so they take longer.",
        "Tuning limits how long a step takes, so the pieces are smaller, and long prompts wait a little longer.",
    )
    for phase, cause in zip(phases, causes, strict=False):
        seen = f"{phase.itl_ms:.1f} ms between tokens, {phase.ttft_ms:.0f} ms to the first one (p95, at the clients)"
        yield f"  {phase.name}: {seen}. {cause}"


def report(console: Console, tally: Tally, moves: list[str], exit_code: int) -> int:
    console.rule("Summary")
    console.print(f"{tally.num_answered} answers, {tally.num_tokens} tokens, {len(tally.failures)} failures")
    for line in story(tally.phases):
        console.print(line, highlight=False)
    console.print(f"{tally.objective}. What tuning did:", highlight=False)
    for move in moves:
        console.print(f"  {move}", highlight=False)
    console.print(f"drained, exit code {exit_code}")
    problems = [*tally.failures[:5]]
    if not moves:
        problems.append("the tuner changed no limit")
    if exit_code:
        problems.append(f"flyball local ended with exit code {exit_code}")
    for problem in problems:
        console.print(f"  problem: {problem}", style="red")
    console.print("Demo failed." if problems else "Every request was answered and every replica drained.", style="bold")
    return 1 if problems else 0


def main() -> int:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the demo brings its model
    console = Console()
    with tempfile.TemporaryDirectory(prefix="flyball-demo-") as folder:
        try:
            return asyncio.run(session(console, Path(folder)))
        except KeyboardInterrupt:
            return 130


if __name__ == "__main__":
    sys.exit(main())
