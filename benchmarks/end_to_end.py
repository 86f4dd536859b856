"""What a Kubernetes node saw: every test of tests/e2e, each disturbance in full number, with its figures. About 50 minutes.

    python benchmarks/end_to_end.py

It does what ``make e2e E2E=--full`` does (root and Debian packages), and keeps what the tests measured: streams in flight when
replicas were updated, scaled, drained and killed, requests that failed or changed their answer, times of scaling, the parts of
the time from ``helm install`` to the first token, and the image's speed beside the checkout's. Nothing is written unless every
test passed. ``--table`` prints the disturbances of the kept result as a table.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import RESULTS, save

sys.path.append(str(Path(__file__).parent.parent / "tests"))  # the node is the tests' own

from e2e_kit.__main__ import main as run_tests

NAME = "end_to_end"
COLUMNS = {
    "disturbances": "Times",
    "requests": "Requests",
    "streams": "Streams",
    "in_flight_min": "In flight, least",
    "in_flight_median": "Median",
    "stream_s": "A stream, s",
    "failed": "Failed",
    "changed": "Changed",
    "slowest_first_token_s": "Slowest first token, s",
    "longest_gap_s": "Longest gap, s",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the kept result, run nothing")
    if parser.parse_args().table:
        print(*table(json.loads((RESULTS / f"{NAME}.json").read_text())["figures"]), sep="\n")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        if status := run_tests(("--full", f"--figures={file}")):
            return status
        save(NAME, {"figures": json.loads(file.read_text())})
    return 0


def table(figures: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a Markdown table of what was disturbed under load."""
    yield f"| Disturbance | {' | '.join(COLUMNS.values())} |"
    yield "| --- " * (len(COLUMNS) + 1) + "|"
    for test, found in figures.items():
        if "in_flight_min" in found:
            yield f"| {test.replace('_', ' ')} | {' | '.join(f'{found[column]:.3g}' for column in COLUMNS)} |"


if __name__ == "__main__":
    sys.exit(main())
