"""``flyball batch``: runs a batch and says how it went."""

import sys

from flyball_clients.batch.progress import Counts, Progress
from flyball_clients.batch.run import run_batch
from flyball_clients.batch.settings import BatchSettings


def run_command(settings: BatchSettings) -> Counts:
    """Run the batch, and print a summary also if it is interrupted. Raises what ``run_batch`` does, and KeyboardInterrupt."""
    counts = Counts()
    try:
        with Progress(counts) as progress:
            run_batch(settings, counts, progress)
    finally:
        if counts.started or counts.num_before:
            print(counts.summary())
        if counts.started and counts.num_left:
            print(f"Requests left: {counts.num_left}. The same command goes on with them.", file=sys.stderr)
    return counts
