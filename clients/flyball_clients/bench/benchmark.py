"""A whole benchmark run: as a library call, and as `flyball bench`."""

import argparse
import asyncio
import sys
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
from rich.console import Console

from flyball_clients.bench.load import LoadGenerator, LoadObserver, RequestRecord, Sender
from flyball_clients.bench.prompts import make_prompts
from flyball_clients.bench.report import ProgressBar, check_chart_path, print_report, write_chart
from flyball_clients.bench.result import BenchResult, ServerFacts, build_result
from flyball_clients.bench.settings import BenchSettings
from flyball_clients.bench.statistics import ClientMonitor
from flyball_clients.bench.workload import RequestPlan, RequestWriter, plan_requests, plan_warmup
from flyball_clients.endpoint import Endpoint
from flyball_clients.errors import ConfigError, EndpointError
from flyball_clients.stream import find_model, open_session


class WarmupFailed(EndpointError):
    """No warm-up request was answered, so there is nothing to measure."""

    kind = "warmup"


async def run_benchmark(settings: BenchSettings, observer: LoadObserver | None = None) -> BenchResult:
    """Find the model, warm up, send the load and summarise the results. Failed requests are counted, not raised.

    Raises:
        ConfigError: a bad trace, dataset, tokenizer or key.
        EndpointError: the server does not answer before the load begins.
    """
    plans = plan_requests(settings)
    observer = observer or LoadObserver()
    endpoint = Endpoint.resolve(settings.base_url, settings.api_key_env)
    async with open_session(endpoint, settings.timeout_s, keep_alive=settings.keep_alive) as session:
        card = await find_model(session, endpoint, settings.model)
        prompts, warnings = await make_prompts(session, endpoint, settings, card.id)
        writer = RequestWriter(settings, card.id, prompts)
        await _warm_up(Sender(session, endpoint, settings.endpoint), writer, settings, plans)
        observer.planned(len(plans))
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        records, monitor = await _measure(session, endpoint, writer, settings, plans, observer)
    return build_result(
        settings,
        ServerFacts(base_url=endpoint.base_url, model=card.id, max_model_len=card.max_model_len),
        records,
        started_at=started_at,
        num_planned=len(plans),
        asked_output_tokens=0 if settings.dataset else _asked_output_tokens(plans, records),
        monitor=monitor,
        warnings=warnings,
    )


async def _warm_up(sender: Sender, writer: RequestWriter, settings: BenchSettings, plans: list[RequestPlan]) -> None:
    load = LoadGenerator(sender, writer, LoadObserver())
    await load.run_closed(plan_warmup(settings, plans), settings.max_in_flight)
    if load.records and not any(record.ok for record in load.records):
        raise WarmupFailed(
            f"all {len(load.records)} warm-up requests failed; the error of the first: {load.records[0].error_message}"
        )


async def _measure(
    session: aiohttp.ClientSession,
    endpoint: Endpoint,
    writer: RequestWriter,
    settings: BenchSettings,
    plans: list[RequestPlan],
    observer: LoadObserver,
) -> tuple[list[RequestRecord], ClientMonitor]:
    async with ClientMonitor() as monitor:
        sender = Sender(session, endpoint, settings.endpoint)  # its clock starts here
        load = LoadGenerator(sender, writer, observer, settings.max_duration_s)
        if settings.closed_loop:
            await load.run_closed(plans, settings.max_in_flight)
        else:
            await load.run_open(plans)
    return load.records, monitor


def _asked_output_tokens(plans: list[RequestPlan], records: list[RequestRecord]) -> int:
    return sum(plans[record.index].output_len for record in records if record.ok)


def run_command(settings: BenchSettings, args: argparse.Namespace) -> BenchResult:
    """Measure, and write what the flags of ``flyball bench`` ask for: a table or JSON, and a chart."""
    _check_outputs(args)
    with ProgressBar(Console(stderr=True)) as progress:
        result = asyncio.run(run_benchmark(settings, progress))
    _write(result, args)
    return result


def _check_outputs(args: argparse.Namespace) -> None:
    """Check before the load that the results can be written after it."""
    if args.chart is not None:
        check_chart_path(args.chart)
    for flag, path in (("--output", args.output), ("--chart", args.chart)):
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise ConfigError(f"{flag} is {path}, in a folder that does not exist; create the folder first.")


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
        raise ConfigError(f"cannot write {exc.filename}: {exc.strerror}. The measurement itself is complete.") from exc
