"""``flyball local``: run a deployment here, or hand a changed manifest to the instance that already does."""

import argparse
import asyncio
import logging
import os
import signal
import sys
from pathlib import Path

from rich.console import Console
from rich.live import Live

from flyball_operator.errors import LocalError
from flyball_operator.local.control import Handover, InstanceFolder, hand_over
from flyball_operator.local.reports import to_log
from flyball_operator.local.runner import LocalOptions, LocalRunner, select
from flyball_operator.local.snapshot import render
from flyball_operator.spec import manifest
from flyball_protocol import endpoints

log = logging.getLogger(__name__)

EXIT_KILLED = 128 + signal.SIGINT
TABLE_PERIOD_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``flyball local``."""
    parser.description = (
        "Run an LLMDeployment as processes on this machine. Run it again, or edit the file, to change what runs."
    )
    manifest.add_file_argument(parser)
    parser.add_argument("--name", help="metadata.name of the deployment to run, if the file has several")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port",
        type=int,
        default=endpoints.API_PORT,
        help="port of the API, which balances over the replicas; 0 takes a free one (default: %(default)s)",
    )
    parser.add_argument(
        "--log-dir",
        type=Path,
        metavar="DIR",
        help="where the replicas' logs and decisions.jsonl go (default: in the state folder)",
    )
    add_state_argument(parser)
    parser.add_argument(
        "--flyball", type=Path, metavar="FILE", help="the flyball command to run (default: this environment's)"
    )
    parser.add_argument("--show-table", action="store_true", help="show a live table instead of log lines")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="show the replicas' own logs and each probe and hold too"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run until Ctrl-C or SIGTERM; returns the exit code. Raises OperatorError when it cannot start."""
    return asyncio.run(_run(arguments))


def add_state_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--state-dir``, for ``instance_folder``."""
    parser.add_argument(
        "--state-dir",
        type=Path,
        metavar="DIR",
        help="state folder (default: $XDG_STATE_HOME/flyball or ~/.local/state/flyball)",
    )


def instance_folder(arguments: argparse.Namespace) -> InstanceFolder:
    """Return the folder of the instance that ``name`` and ``state_dir`` of the arguments mean."""
    return InstanceFolder(arguments.state_dir or default_state_dir(), arguments.name)


async def _run(arguments: argparse.Namespace) -> int:
    content = manifest.read_content(arguments.file)
    source: Path = arguments.file.absolute()
    deployment = select(manifest.parse_content(content, source), arguments.name)
    folder = InstanceFolder(arguments.state_dir or default_state_dir(), deployment.name)
    if not folder.acquire():
        return await _hand_over(folder, source, content.decode())
    try:
        options = LocalOptions(
            executable=(str(arguments.flyball or installed_flyball()),),
            log_dir=arguments.log_dir or folder.log_dir,
            host=arguments.host,
            port=arguments.port,
            evidence_period_s=1.0,
            echo=_echo if arguments.verbose else None,
        )
        on_event = (lambda _: None) if arguments.show_table else to_log
        return await _serve(LocalRunner(deployment, source, folder, options, on_event), show_table=arguments.show_table)
    finally:
        folder.release()


async def _hand_over(folder: InstanceFolder, source: Path, text: str) -> int:
    answer = await hand_over(folder, Handover(manifest=text, source=str(source)))
    if answer.error is not None:
        raise LocalError(f"the instance at {answer.url} goes on as it was: {answer.error}")
    print(f"handed to the instance at {answer.url}:")
    for line in answer.plan:
        print(f"  {line}")
    return endpoints.EXIT_OK


async def _serve(runner: LocalRunner, *, show_table: bool) -> int:
    stop = asyncio.Event()
    killed = False

    def on_signal() -> None:
        nonlocal killed
        if stop.is_set():
            killed = True
            runner.kill()
        else:
            log.info("draining; once more to end at once")
            stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    await runner.start()
    log.info("once a replica is ready, try: %s", runner.first_request())
    loop.add_signal_handler(signal.SIGHUP, runner.reload)
    try:
        await _until(stop, runner, show_table=show_table)
    finally:
        drained = await runner.drain()
    if killed:
        return EXIT_KILLED
    return endpoints.EXIT_OK if drained else endpoints.EXIT_DRAIN_TIMEOUT


async def _until(stop: asyncio.Event, runner: LocalRunner, *, show_table: bool) -> None:
    """Wait for ``stop``; raises what ended a background task of the runner."""
    tasks = [asyncio.create_task(stop.wait()), asyncio.create_task(runner.failed())]
    if show_table:
        tasks.append(asyncio.create_task(_show(runner)))
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    for task in done:
        task.result()


async def _show(runner: LocalRunner) -> None:
    with Live(render(runner.snapshot()), console=Console(stderr=True), auto_refresh=False) as live:
        while True:
            live.update(render(runner.snapshot()), refresh=True)
            await asyncio.sleep(TABLE_PERIOD_S)


def _echo(name: str, line: str) -> None:
    log.info("[%s] %s", name, line)


def default_state_dir() -> Path:
    """Return the folder for locks, sockets and logs, after the XDG base directory specification."""
    home = os.environ.get("XDG_STATE_HOME")
    return (Path(home) if home else Path.home() / ".local" / "state") / "flyball"


def installed_flyball() -> Path:
    """Return the ``flyball`` command of the Python environment that runs this. Raises LocalError when it has none."""
    path = Path(sys.executable).with_name("flyball")
    if not path.is_file():
        raise LocalError(
            f"there is no {path}; install the runtime here (pip install 'flyball[runtime]') or give --flyball FILE"
        )
    return path
