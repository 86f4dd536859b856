"""A client whose streams run while a server is attacked, and a clock that shows the machine's own noise.

Run as processes of their own, with the standard library alone: what a test does to build its attack then delays neither.

    witness_process.py stream PORT BODY PID...   streams until stdin is closed, then prints what it saw as JSON
    witness_process.py clock                     ticks until stdin is closed, then prints how late its ticks were as JSON
"""

import http.client
import json
import os
import select
import socket
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

NUM_EVENTS_BEFORE_START = 5
LIVEZ_PERIOD_S = 0.05
TICK_S = 0.005
TICKS_PER_SPEED = 20


class Times(NamedTuple):
    """What a thread has had so far: CPU time, and time for which it was ready but others had the CPUs."""

    ran_s: float
    waited_s: float


class Pause(NamedTuple):
    """The time between two events.

    Attributes:
        waited_s: how long the threads together waited for a CPU in it.
        ran_s: how long the event loop, the first of them, had a CPU in it. An engine may go on meanwhile.
    """

    wall_s: float
    waited_s: float
    ran_s: float

    @property
    def unexplained_s(self) -> float:
        """What is not the other load of this machine. An event loop that was busy throughout is the cause, however slowly."""
        return max(self.wall_s - self.waited_s, self.ran_s)


def times_of(schedstat: Path) -> Times:
    """Read proc(5)'s schedstat; zero for a thread that has ended."""
    try:
        ran_ns, waited_ns, _ = schedstat.read_text().split()
    except OSError:
        return Times(0.0, 0.0)
    return Times(int(ran_ns) / 1e9, int(waited_ns) / 1e9)


class Stream:
    """Requests one stream after another, and notes the time between two events and what the server's threads did in it.

    HTTP/1.0, so that the answer comes without chunks and ends with the connection.
    """

    def __init__(self, port: int, body: bytes, pids: list[str]) -> None:
        self.port = port
        head = "POST /v1/completions HTTP/1.0\r\nHost: witness\r\nContent-Type: application/json\r\n"
        self.request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        # The main thread of a process: the event loop of an API process, the loop of an engine.
        self.schedstats = [Path(f"/proc/{pid}/task/{pid}/schedstat") for pid in [*pids, str(os.getpid())]]
        self.texts: list[str] = []
        self.errors: list[str] = []
        self.pauses: list[Pause] = []
        self.num_events = 0
        self.mark()

    def mark(self) -> None:
        self.last_s, self.last_times = time.monotonic(), [times_of(path) for path in self.schedstats]

    def run(self) -> None:
        while self.one_stream():
            pass

    def one_stream(self) -> bool:
        """Read one stream to its end; False when told to stop meanwhile."""
        text: list[str] = []
        self.mark()
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            connection.sendall(self.request)
            stopped = self.read(connection, text)
        self.texts.append("".join(text))
        return not stopped and not self.errors

    def read(self, connection: socket.socket, text: list[str]) -> bool:
        received, ended = b"", False
        while True:
            readable, _, _ = select.select([connection, sys.stdin], [], [])
            if sys.stdin in readable:
                self.note_pause()  # the one under way
                return True
            if not (packet := connection.recv(65536)):
                if not ended:
                    self.errors.append(f"a stream broke off; its last bytes: {received[-300:]!r}")
                return False
            *lines, received = (received + packet).split(b"\n")
            ended |= self.take(lines, text)

    def take(self, lines: list[bytes], text: list[str]) -> bool:
        for line in lines:
            if line.startswith(b"data: {"):
                self.note_pause()
                event = json.loads(line[6:])
                if "error" in event:
                    self.errors.append(str(event))
                else:
                    text.append(event["choices"][0]["text"] if "choices" in event else f"{event['token']} ")
                self.num_events += 1
                if self.num_events == NUM_EVENTS_BEFORE_START:
                    print("started", flush=True)
            elif line.startswith(b"HTTP/") and b" 200 " not in line:
                self.errors.append(line.decode(errors="replace"))
        return b"data: [DONE]" in lines

    def note_pause(self) -> None:
        before_s, times_before = self.last_s, self.last_times
        self.mark()
        pairs = list(zip(self.last_times, times_before, strict=True))
        pause = Pause(
            wall_s=self.last_s - before_s,
            waited_s=sum(now.waited_s - before.waited_s for now, before in pairs),
            ran_s=pairs[0][0].ran_s - pairs[0][1].ran_s,
        )
        if self.num_events >= NUM_EVENTS_BEFORE_START:
            self.pauses.append(pause)


class Livez(threading.Thread):
    """Asks /livez all the time."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.port = port
        self.statuses: set[int] = set()
        self.longest_s = 0.0
        self.asked_s = 0.0

    def run(self) -> None:
        while True:
            self.asked_s = time.monotonic()
            connection = http.client.HTTPConnection("127.0.0.1", self.port)
            connection.request("GET", "/livez")
            self.statuses.add(connection.getresponse().status)
            connection.close()
            self.longest_s = max(self.longest_s, time.monotonic() - self.asked_s)
            time.sleep(LIVEZ_PERIOD_S)


def stream(port: int, body: bytes, pids: list[str]) -> dict[str, object]:
    seen, livez = Stream(port, body, pids), Livez(port)
    livez.start()
    seen.run()
    return {
        "num_events": seen.num_events,
        "longest": max(seen.pauses)._asdict(),
        "longest_unexplained_s": max(pause.unexplained_s for pause in seen.pauses),
        "texts": seen.texts,
        "errors": seen.errors,
        "livez_statuses": sorted(livez.statuses),
        "livez_longest_s": livez.longest_s,
    }


def clock() -> dict[str, object]:
    print("started", flush=True)
    latest_s, speeds_s, due_s = 0.0, [], time.monotonic()
    while not select.select([sys.stdin], [], [], max(0.0, due_s - time.monotonic()))[0]:
        latest_s = max(latest_s, time.monotonic() - due_s)
        if not speeds_s or time.monotonic() // (TICK_S * TICKS_PER_SPEED) != due_s // (TICK_S * TICKS_PER_SPEED):
            speeds_s.append(cpu_time_of_fixed_work_s())
        due_s = max(due_s + TICK_S, time.monotonic())
    return {"latest_tick_s": latest_s, "fixed_work_s": statistics.median(speeds_s)}


def cpu_time_of_fixed_work_s() -> float:
    begin_s = time.thread_time()
    sum(number * number for number in range(4000))
    return time.thread_time() - begin_s


if __name__ == "__main__":
    if sys.argv[1] == "clock":
        print(json.dumps(clock()))
    else:
        print(json.dumps(stream(int(sys.argv[2]), sys.argv[3].encode(), sys.argv[4:])))
