"""A whole benchmark run, as a library call."""

from datetime import UTC, datetime

import aiohttp

from flyball_runtime.bench.client_health import ClientMonitor
from flyball_runtime.bench.load import LoadGenerator, LoadObserver
from flyball_runtime.bench.probe import make_prompts
from flyball_runtime.bench.record import RequestRecord
from flyball_runtime.bench.result import BenchResult, ServerFacts, build_result
from flyball_runtime.bench.sender import Sender
from flyball_runtime.bench.settings import BenchSettings
from flyball_runtime.bench.workload import RequestPlan, RequestWriter, plan_requests, plan_warmup
from flyball_runtime.client.endpoint import Endpoint
from flyball_runtime.client.errors import EndpointError
from flyball_runtime.client.models import find_model
from flyball_runtime.client.stream import open_session


class WarmupFailed(EndpointError):
    """No warm-up request was answered, so there is nothing to measure."""

    kind = "warmup"


async def run_benchmark(settings: BenchSettings, observer: LoadObserver | None = None) -> BenchResult:
    """Find the model, warm up, send the load, sum up. Failed requests are counted and not raised.

    Raises:
        ConfigError: a bad trace, dataset, tokenizer or key.
        EndpointError: the server does not answer before the load begins.
    """
    plans = plan_requests(settings)
    observer = observer or LoadObserver()
    endpoint = Endpoint.resolve(settings.base_url, settings.api_key_env)
    async with open_session(endpoint, settings.timeout_s) as session:
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
            f"all {len(load.records)} warm-up requests failed; the first: {load.records[0].error_message}"
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
