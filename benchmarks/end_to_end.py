"""What a Kubernetes node saw: every test of tests/e2e, each disturbance in full number, with its figures. About half an hour.

    python benchmarks/end_to_end.py

It does what ``make e2e E2E=--full`` does (root and Debian packages), and keeps what the tests measured: requests that failed or
changed their answer while replicas were updated, scaled, drained and killed, times of scaling, and the parts of the time from
``helm install`` to the first token. Nothing is written unless every test passed.
"""

import json
import sys
import tempfile
from pathlib import Path

from common import save

sys.path.append(str(Path(__file__).parent.parent / "tests"))  # the node is the tests' own

from e2e_kit.__main__ import main as run_tests


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        if status := run_tests(("--full", f"--figures={file}")):
            return status
        save("end_to_end", {"figures": json.loads(file.read_text())})
    return 0


if __name__ == "__main__":
    sys.exit(main())
