"""Another client whose stream runs during an attack, and the judgement of its longest pause.

Wall time alone says how busy the machine is. So a pause is judged after three corrections:

- The time for which the server's main threads and the witness were ready to run, but others had the CPUs, is subtracted. What
  the event loop computed in the pause is not: it would be a pause on an idle machine too.
- The bound grows with the CPU time of a fixed piece of work, for machines that are slower than the one it was set on.
- An attack that seems to exceed the bound is repeated. A server that stops under it does so every time; noise does not.
"""

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LONGEST_PAUSE_S = 0.1
FIXED_WORK_S = 0.00015
"""CPU time of the clock's fixed work on the machine on which LONGEST_PAUSE_S was set."""

MOST_ROUNDS = 3
_PROGRAM = Path(__file__).with_name("witness_process.py")
STREAM_OF_REAL = {"prompt": [5, 6, 7], "temperature": 0, "ignore_eos": True, "max_tokens": 2000, "stream": True}


@dataclass
class Seen:
    """What the witness and the clock saw.

    Attributes:
        raw_pause_s: longest time between two events of the stream.
        waited_s: how long server and witness, together, waited for a CPU in it.
        pause_s: longest time between two events that such waiting does not explain.
        slowness: this machine's CPU time for a fixed piece of work, relative to FIXED_WORK_S; at least 1.
        latest_tick_s: how late a process was that only sleeps 5 ms at a time.
        livez_longest_s: longest answer of /livez, not corrected.
        texts: of its streams, the last one cut.
        problems: its failed requests, and answers of /livez that were not 200.
    """

    raw_pause_s: float = 0.0
    waited_s: float = 0.0
    pause_s: float = 0.0
    slowness: float = 1.0
    latest_tick_s: float = 0.0
    livez_longest_s: float = 0.0
    num_events: int = 0
    texts: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def is_undisturbed(self) -> bool:
        return self.pause_s <= LONGEST_PAUSE_S * self.slowness

    def take(self, stream: dict[str, Any], clock: dict[str, Any]) -> None:
        """Take in the reports of both programs."""
        self.raw_pause_s, self.waited_s = stream["longest"]["wall_s"], stream["longest"]["waited_s"]
        self.pause_s = stream["longest_unexplained_s"]
        self.slowness = max(1.0, clock["fixed_work_s"] / FIXED_WORK_S)
        self.latest_tick_s, self.livez_longest_s = clock["latest_tick_s"], stream["livez_longest_s"]
        self.num_events, self.texts = stream["num_events"], stream["texts"]
        livez = [f"/livez was {status}" for status in stream["livez_statuses"] if status != 200]
        self.problems = stream["errors"] + livez

    def check_answers(self, before: list[str]) -> None:
        """Hold its answers to earlier ones, which begin alike, and add them to those. Raises AssertionError."""
        assert not self.problems, self.problems
        for text in self.texts:
            assert all(one.startswith(text[: len(one)]) for one in before), "another client got another answer"
        before += self.texts

    def figures(self) -> dict[str, float]:
        """Return the raw figures, in milliseconds."""
        return {
            "longest_pause_ms": round(1000 * self.raw_pause_s, 1),
            "of_it_waiting_for_a_cpu_ms": round(1000 * self.waited_s, 1),
            "judged_ms": round(1000 * self.pause_s, 1),
            "latest_tick_ms": round(1000 * self.latest_tick_s, 1),
            "livez_longest_ms": round(1000 * self.livez_longest_s, 1),
            "slowness": round(self.slowness, 2),
            "events": self.num_events,
        }


class Program:
    """A running witness_process.py: stopped by closing its standard input, then it prints a report."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-I", str(_PROGRAM), *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def wait_started(self) -> None:
        assert self._process.stdout is not None
        if (line := self._process.stdout.readline()) != "started\n":
            raise AssertionError(f"the witness could not start: {line}")

    def stop(self) -> dict[str, Any]:
        output, _ = self._process.communicate(timeout=120)
        report: dict[str, Any] = json.loads(output)
        return report

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def witness(port: int, pids: Sequence[int], body: dict[str, Any] | None = None) -> Iterator[Seen]:
    """Let another client stream from ``port`` while the block runs; what it saw is in the value after the block.

    Args:
        pids: the processes whose main threads the stream passes through, the one with the event loop of ``port`` first.
        body: of its requests, in the place of a long greedy completion.
    """
    seen = Seen()
    with contextlib.ExitStack() as programs:
        clock = Program("clock")
        programs.callback(clock.close)
        stream = Program("stream", str(port), json.dumps(body or STREAM_OF_REAL), *map(str, pids))
        programs.callback(stream.close)
        clock.wait_started()
        stream.wait_started()
        yield seen
        seen.take(stream.stop(), clock.stop())


def least_disturbed(watch: Callable[[], Seen]) -> Seen:
    """Return the round with the shortest pause: the first one within the bound, or the best of MOST_ROUNDS."""
    rounds: list[Seen] = []
    for _ in range(MOST_ROUNDS):
        rounds.append(watch())
        if rounds[-1].is_undisturbed:
            break
    return min(rounds, key=lambda seen: seen.pause_s / seen.slowness)
