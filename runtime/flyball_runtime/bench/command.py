"""`flyball bench` from parsed flags to exit code: table, JSON and chart out."""

import argparse
import asyncio
import sys
from pathlib import Path

from rich.console import Console

from flyball_runtime.bench.arguments import settings_from
from flyball_runtime.bench.benchmark import run_benchmark
from flyball_runtime.bench.chart import check_chart_path, write_chart
from flyball_runtime.bench.progress import ProgressBar
from flyball_runtime.bench.report import print_report
from flyball_runtime.bench.result import BenchResult
from flyball_runtime.client.errors import EndpointError
from flyball_runtime.core.errors import ConfigError

EXIT_OK = 0
EXIT_NO_ANSWER = 1
"""The server was not there, or every request failed."""
EXIT_CONFIG_ERROR = 2
EXIT_INTERRUPTED = 130


def run_command(args: argparse.Namespace) -> int:
    """Measure, write what was asked for, and return the exit code. Errors go to stderr."""
    try:
        result = _measure(args)
    except ConfigError as exc:
        return _complain(exc, EXIT_CONFIG_ERROR)
    except EndpointError as exc:
        return _complain(exc, EXIT_NO_ANSWER)
    except KeyboardInterrupt:
        return _complain("interrupted; nothing was written.", EXIT_INTERRUPTED)
    return EXIT_OK if result.requests.succeeded else EXIT_NO_ANSWER


def _measure(args: argparse.Namespace) -> BenchResult:
    settings = settings_from(args)
    _check_outputs(args)
    with ProgressBar(Console(stderr=True)) as progress:
        result = asyncio.run(run_benchmark(settings, progress))
    _write(result, args)
    return result


def _check_outputs(args: argparse.Namespace) -> None:
    """Find out before the load what would spoil its end."""
    if args.chart is not None:
        check_chart_path(args.chart)
    for flag, path in (("--output", args.output), ("--chart", args.chart)):
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise ConfigError(f"{flag} is {path}, in a folder that does not exist; make it first.")


def _write(result: BenchResult, args: argparse.Namespace) -> None:
    text = result.to_json(save_requests=args.save_requests)
    if args.json:
        sys.stdout.write(text.decode())
    else:
        print_report(result, Console())
    try:
        if args.output is not None:
            Path(args.output).write_bytes(text)
        if args.chart is not None:
            write_chart(result, args.chart)
    except OSError as exc:
        raise ConfigError(f"cannot write {exc.filename}: {exc.strerror}. The run itself went well.") from exc


def _complain(reason: object, exit_code: int) -> int:
    print(f"flyball bench: {reason}", file=sys.stderr)
    return exit_code
