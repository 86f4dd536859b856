import io

import pytest
from rich.console import Console

from flyball_runtime.bench.progress import ProgressBar
from flyball_runtime.bench.record import RequestRecord


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
