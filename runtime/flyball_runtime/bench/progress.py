"""A line on stderr that shows how a run is going."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn

from flyball_runtime.bench.load import LoadObserver
from flyball_runtime.bench.record import RequestRecord


class ProgressBar(LoadObserver):
    """Context manager; draws only when ``console`` is a terminal."""

    def __init__(self, console: Console) -> None:
        columns: list[ProgressColumn | str] = [
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("[cyan]{task.fields[in_flight]}[/] in flight"),
            TextColumn("[cyan]{task.fields[rate]:,.0f}[/] tok/s"),
            TextColumn("[red]{task.fields[failed]}"),
        ]
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
        self._task = self._progress.add_task("", total=None, in_flight=0, rate=0.0, failed="")
        self._started: float | None = None
        self._in_flight = self._failed = self._tokens = 0

    def __enter__(self) -> "ProgressBar":
        self._progress.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._progress.disable:  # rich before 14.3 would end even what it never drew with a newline
            self._progress.stop()

    def planned(self, total: int) -> None:
        self._progress.update(self._task, total=total)

    def sent(self) -> None:
        if self._started is None:
            self._started = time.perf_counter()
        self._in_flight += 1
        self._progress.update(self._task, in_flight=self._in_flight)

    def ended(self, record: RequestRecord) -> None:
        self._in_flight -= 1
        self._failed += not record.ok
        self._tokens += record.output_tokens
        elapsed_s = time.perf_counter() - (self._started or 0.0)
        self._progress.update(
            self._task,
            advance=1,
            in_flight=self._in_flight,
            rate=self._tokens / elapsed_s,
            failed=f"{self._failed} failed" if self._failed else "",
        )
