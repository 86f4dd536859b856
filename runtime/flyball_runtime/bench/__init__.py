"""Measure any OpenAI-compatible server.

From a shell: ``flyball bench``. From a script: ``await flyball_runtime.bench.benchmark.run_benchmark(BenchSettings(...))``.
"""

import argparse

from flyball_runtime.bench.arguments import add_arguments
from flyball_runtime.bench.settings import BenchSettings
from flyball_runtime.bench.slo import Slo, parse_slo

__all__ = ["BenchSettings", "Slo", "add_arguments", "parse_slo", "run"]


def run(args: argparse.Namespace) -> int:
    """Run ``flyball bench`` with parsed flags; returns the exit code. Errors go to stderr."""
    from flyball_runtime.bench.command import (
        run_command,  # here: it loads aiohttp, numpy and rich; other commands need none
    )

    return run_command(args)
