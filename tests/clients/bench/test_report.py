import asyncio
import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from fake_openai import FakeServer, Reply, answer_in_full
from flyball_clients.bench.benchmark import run_benchmark
from flyball_clients.bench.load import RequestRecord
from flyball_clients.bench.report import ProgressBar, check_chart_path, write_chart
from flyball_clients.bench.result import BenchResult
from flyball_clients.bench.settings import BenchSettings, Slo
from flyball_clients.errors import ConfigError


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_drawn_on_a_terminal_only(terminal: bool) -> None:
    screen = io.StringIO()
    with ProgressBar(Console(file=screen, force_terminal=terminal, width=100)) as bar:
        bar.planned(3)
        for error in (None, "timeout"):
            bar.sent()
            bar.ended(RequestRecord(index=0, arrival_s=0.0, sent_s=0.0, output_tokens=5, error=error))
        bar.sent()
    drawn = screen.getvalue()
    if terminal:
        assert "2/3" in drawn
        assert "1 failed" in drawn
    else:
        assert drawn == ""


SIGNATURES = {".png": b"\x89PNG", ".svg": b"<?xml"}


def measured(server: FakeServer) -> BenchResult:
    settings = BenchSettings(base_url=server.url, num_requests=4, output_len="uniform:1:5", slo=Slo(ttft_s=1.0))
    return asyncio.run(run_benchmark(settings))


@pytest.mark.parametrize("suffix", SIGNATURES)
@pytest.mark.parametrize("failing", [False, True])
def test_a_chart_is_drawn_also_of_failures(server: FakeServer, tmp_path: Path, suffix: str, failing: bool) -> None:
    pytest.importorskip("matplotlib", reason="charts need matplotlib, the `bench` extra")
    if failing:
        refusal = Reply(status=500, body={})
        server.script = lambda request: refusal if "temperature" in request else answer_in_full(request)
    path = tmp_path / f"chart{suffix}"
    write_chart(measured(server), str(path))
    assert path.read_bytes().startswith(SIGNATURES[suffix])


def test_without_matplotlib_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'flyball\[bench\]'"):
        check_chart_path("chart.png")


def test_only_two_kinds_of_picture() -> None:
    with pytest.raises(ConfigError, match=r"--chart is c\.pdf; it must end in \.png or \.svg"):
        check_chart_path("c.pdf")
