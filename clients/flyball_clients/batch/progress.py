"""How far a batch is: a bar on a terminal, else a line now and then; and the sum at the end."""

import sys
import threading
import time
from collections import Counter
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from flyball_clients.batch.output import Row
from flyball_clients.stream import ReportedUsage

LINE_INTERVAL_S = 10.0


class Counts:
    """The requests of a batch, by how they ended.

    Attributes:
        total: requests of the input.
        num_before, num_failed_before: those that the output had at the start, and those of them that had failed.
        succeeded: requests that were answered now. failures: the others, by the code of their error.
        prompt_tokens, completion_tokens: of the answers of now, as the server counts them.
    """

    def __init__(self) -> None:
        self.total = self.num_before = self.num_failed_before = 0
        self.succeeded = self.prompt_tokens = self.completion_tokens = 0
        self.failures: Counter[str] = Counter()
        self._start_s: float | None = None
        self._end_s: float | None = None

    def resume(self, total: int, num_before: int, num_failed_before: int) -> None:
        self.total, self.num_before, self.num_failed_before = total, num_before, num_failed_before

    def start_clock(self) -> None:
        self._start_s = time.monotonic()

    def stop_clock(self) -> None:
        self._end_s = time.monotonic()

    def note(self, row: Row, usage: ReportedUsage | None) -> None:
        if row.error is not None:
            self.failures[row.error.code] += 1
            return
        self.succeeded += 1
        if usage is not None:
            self.prompt_tokens += usage.prompt_tokens
            self.completion_tokens += usage.completion_tokens

    @property
    def num_failed(self) -> int:
        return self.num_failed_before + self.failures.total()

    @property
    def num_done(self) -> int:
        return self.num_before + self.succeeded + self.failures.total()

    @property
    def num_left(self) -> int:
        return self.total - self.num_done

    @property
    def started(self) -> bool:
        """Whether requests were sent."""
        return self._start_s is not None

    @property
    def elapsed_s(self) -> float:
        """Time since the first request was sent, until the last one ended."""
        end_s = time.monotonic() if self._end_s is None else self._end_s
        return 0.0 if self._start_s is None else end_s - self._start_s

    @property
    def rates(self) -> str:
        elapsed_s = max(self.elapsed_s, 1e-9)
        now = self.succeeded + self.failures.total()
        return f"{now / elapsed_s:.3g} requests/s, {self.completion_tokens / elapsed_s:.4g} output tokens/s"

    def summary(self) -> str:
        """Return a few lines: how many requests ended how, and how fast."""
        lines = [f"{self.num_done} of {self.total} requests done, {self.num_failed} failed"]
        if self.failures:
            kinds = ", ".join(f"{count} {code}" for code, count in self.failures.most_common())
            lines.append(f"failed now: {kinds}")
        if self.num_before:
            lines.append(f"done before: {self.num_before}, of which {self.num_failed_before} failed")
        if self.succeeded or self.failures:
            tokens = f"{self.prompt_tokens} prompt and {self.completion_tokens} output tokens"
            lines.append(f"{self.elapsed_s:.1f} s: {self.rates}; {tokens}")
        return "\n".join(lines)


class Progress:
    """Shows counts on stderr while a batch runs. Use as ``with Progress(counts)``; ``start`` begins it."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._console = Console(stderr=True)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._show, name="progress", daemon=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def start(self) -> None:
        """Begin to show, and to measure: what came before, loading a model say, is not part of the rate."""
        self._counts.start_clock()
        self._thread.start()

    def _show(self) -> None:
        if self._console.is_terminal:
            self._show_bar()
        else:
            self._show_lines()

    def _show_bar(self) -> None:
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        with Bar(*columns, console=self._console) as bar:
            task = bar.add_task("", total=self._counts.total, completed=self._counts.num_before)
            while not self._ended.wait(0.25):
                self._update(bar, task)
            self._update(bar, task)

    def _update(self, bar: Bar, task: TaskID) -> None:
        failed = f"{self._counts.num_failed} failed, " if self._counts.num_failed else ""
        bar.update(task, completed=self._counts.num_done, description=failed + self._counts.rates)

    def _show_lines(self) -> None:
        while not self._ended.wait(LINE_INTERVAL_S):
            counts = self._counts
            line = f"{counts.num_done} of {counts.total} done, {counts.num_failed} failed; {counts.rates}"
            print(f"flyball batch: {line}", file=sys.stderr, flush=True)
