"""The command line: ``flyball chat | bench | batch``. It imports no heavy package, so that help and completion are fast."""

import argparse
import sys
from pathlib import Path
from typing import Any, get_args

import msgspec

from flyball_clients.batch.settings import ENGINE_CONCURRENCY, SERVER_CONCURRENCY, BatchSettings
from flyball_clients.bench.settings import DEFAULT_CONCURRENCY, DEFAULT_NUM_REQUESTS, Arrival, BenchSettings, parse_slo
from flyball_clients.endpoint import Api
from flyball_clients.errors import ConfigError, EndpointError
from flyball_protocol import endpoints, installed_version

_DEFAULTS = BenchSettings()
_EXIT_NO_ANSWER = 1
"""No server answered, or an answer was incomplete."""
_EXIT_INTERRUPTED = 130


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="flyball", description="Talk to a served model; measure it.")
    parser.add_argument("--version", action="version", version=f"flyball {installed_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chat = commands.add_parser("chat", help="talk to a served model in the terminal")
    add_chat_arguments(chat)
    chat.set_defaults(run=run_chat)
    bench = commands.add_parser("bench", help="measure a served model: latency, throughput, goodput")
    add_bench_arguments(bench)
    bench.set_defaults(run=run_bench)
    batch = commands.add_parser("batch", help="answer the requests of a file in OpenAI's batch format")
    add_batch_arguments(batch)
    batch.set_defaults(run=run_batch)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit code. Errors go to stderr."""
    parser = build_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown and args.command != "batch":  # which hands them to its engine
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    args.engine_flags = tuple(unknown)
    try:
        return int(args.run(args))
    except ConfigError as error:
        return _complain(args.command, error, endpoints.EXIT_CONFIG_ERROR)
    except EndpointError as error:
        return _complain(args.command, error, _EXIT_NO_ANSWER)
    except KeyboardInterrupt:
        return _complain(args.command, "interrupted", _EXIT_INTERRUPTED)


def _complain(command: str, reason: object, exit_code: int) -> int:
    print(f"flyball {command}: {reason}", file=sys.stderr)
    return exit_code


def run_chat(args: argparse.Namespace) -> int:
    from flyball_clients.chat import run_command  # here: it loads aiohttp and rich

    run_command(args)
    return endpoints.EXIT_OK


def run_bench(args: argparse.Namespace) -> int:
    settings = settings_from(args)
    from flyball_clients.bench.benchmark import run_command  # here: it loads aiohttp, numpy and rich

    return endpoints.EXIT_OK if run_command(settings, args).requests.succeeded else _EXIT_NO_ANSWER


def run_batch(args: argparse.Namespace) -> int:
    settings = BatchSettings(
        source=args.input,
        target=args.output,
        base_url=args.base_url,
        api_key_env=args.api_key_env,
        model=args.model,
        engine_flags=args.engine_flags,
        concurrency=args.concurrency,
        timeout_s=args.timeout,
        max_retries=args.max_retries,
        give_up_after_s=args.give_up_after,
        max_body_bytes=args.max_body_bytes,
    )
    from flyball_clients.batch.command import run_command  # here: it loads aiohttp and rich

    return _EXIT_NO_ANSWER if run_command(settings).num_failed else endpoints.EXIT_OK


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags of ``flyball chat``."""
    parser.description = (
        "Chat with any OpenAI-compatible server. With a prompt, or with text on stdin, print one answer and exit."
    )
    parser.add_argument(
        "prompt",
        nargs="?",
        help="question to ask once; without it, start a conversation, or read stdin if it is not a terminal",
    )
    add_server_arguments(parser, _DEFAULTS.timeout_s)
    _add_model(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message (default: none is sent)")
    parser.add_argument("--temperature", type=float, metavar="T", help="sampling temperature (default: the server's)")
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="maximum tokens of an answer (default: the server's)"
    )


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags of ``flyball bench``."""
    parser.description = (
        "Send load to an OpenAI-compatible server and report TTFT, ITL, TPOT, E2E, throughput and goodput. --concurrency "
        "keeps that many requests in flight (closed loop). With --request-rate or --trace, requests do not wait for answers "
        "(open loop)."
    )
    _add_server(parser.add_argument_group("server"))
    _add_load(parser.add_argument_group("load"))
    _add_requests(parser.add_argument_group("requests"))
    _add_output(parser.add_argument_group("output"))


def _add_server(group: argparse._ArgumentGroup) -> None:
    add_server_arguments(group, _DEFAULTS.timeout_s)
    _add_model(group)
    group.add_argument(
        "--endpoint", choices=get_args(Api), default=_DEFAULTS.endpoint, help="API to measure (default: %(default)s)"
    )


def add_server_arguments(group: argparse._ActionsContainer, timeout_s: float) -> None:
    """Define the flags that say which server is asked, and for how long an answer is waited for."""
    group.add_argument(
        *("--base-url", "--url"),
        default=endpoints.DEFAULT_BASE_URL,
        metavar="URL",
        help="address of the server, with or without /v1 (default: %(default)s)",
    )
    group.add_argument(
        "--api-key-env", metavar="NAME", help="environment variable that holds the API key (default: no key is sent)"
    )
    group.add_argument(
        "--timeout",
        type=float,
        default=timeout_s,
        metavar="S",
        help="seconds that an answer may take (default: %(default)g)",
    )


def _add_model(group: argparse._ActionsContainer) -> None:
    group.add_argument("--model", metavar="NAME", help="model to ask for (default: the first that the server lists)")


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--concurrency", type=int, metavar="N", help=f"closed loop: requests in flight (default: {DEFAULT_CONCURRENCY})"
    )
    group.add_argument(
        "--request-rate", type=float, metavar="R", help="open loop: mean arrivals per second; inf sends all at once"
    )
    group.add_argument(
        "--arrival",
        choices=get_args(Arrival),
        default=_DEFAULTS.arrival,
        help="gaps between arrivals (default: %(default)s)",
    )
    group.add_argument(
        "--burstiness",
        type=float,
        default=_DEFAULTS.burstiness,
        metavar="K",
        help="shape of gamma gaps, whose coefficient of variation is 1/sqrt(K); less is burstier "
        "(default: %(default)g, which is poisson)",
    )
    group.add_argument("--trace", metavar="FILE", help="open loop: Azure .csv[.gz] or Mooncake .jsonl[.gz]")
    group.add_argument(
        "--trace-speed",
        type=float,
        default=1.0,
        metavar="X",
        help="speed of the replay; 2 takes half the time (default: %(default)g)",
    )
    group.add_argument("--trace-limit", type=int, metavar="N", help="only the first N requests (default: all)")
    group.add_argument(
        "--trace-max-tokens",
        type=int,
        metavar="N",
        help="leave out requests with more input plus output tokens (default: none is left out)",
    )
    group.add_argument(
        "--num-requests",
        type=int,
        metavar="N",
        help=f"requests to measure (default: {DEFAULT_NUM_REQUESTS}, or as many as the dataset has)",
    )
    group.add_argument(
        "--warmup",
        type=int,
        default=0,
        metavar="N",
        help="requests sent before the measurement, not counted (default: %(default)s)",
    )
    group.add_argument(
        "--max-duration", type=float, metavar="S", help="start no request after S seconds (default: no limit)"
    )


def _add_requests(group: argparse._ArgumentGroup) -> None:
    forms = "N, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA[:MAX] or zipf:ALPHA:LOW:HIGH (default: %(default)s)"
    group.add_argument("--input-len", default=_DEFAULTS.input_len, metavar="DIST", help=f"prompt tokens: {forms}")
    group.add_argument(
        "--output-len",
        default=_DEFAULTS.output_len,
        metavar="DIST",
        help="output tokens: the same forms (default: %(default)s)",
    )
    group.add_argument(
        "--dataset", metavar="FILE", help='JSONL of {"prompt" or "messages", "max_tokens"} instead of random prompts'
    )
    group.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="tokenizer.json or its folder: prompts become token ids of exactly the length of --input-len",
    )
    group.add_argument(
        "--ignore-eos", action="store_true", help="ask for full-length answers; not every server accepts this"
    )
    group.add_argument(
        "--no-keep-alive",
        action="store_true",
        help="open a connection for each request, for servers that close theirs without saying so, such as llama.cpp's",
    )
    group.add_argument(
        "--temperature",
        type=float,
        default=_DEFAULTS.temperature,
        metavar="T",
        help="sampling temperature; 0 is greedy (default: %(default)g)",
    )
    group.add_argument("--extra-body", metavar="JSON", help='further fields of every request, like {"top_p": 0.9}')
    group.add_argument(
        "--seed",
        type=int,
        default=_DEFAULTS.seed,
        metavar="N",
        help="seed of lengths, arrivals and texts (default: %(default)s)",
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--slo",
        metavar="BOUNDS",
        help="bounds for goodput, like ttft=500ms,tpot=50ms; also itl (p99 of a request's gaps) and e2e",
    )
    group.add_argument("--output", metavar="FILE", help="write the result as JSON")
    group.add_argument("--save-requests", action="store_true", help="include the record of every request in the JSON")
    group.add_argument(
        "--chart", metavar="FILE", help="draw a chart to a .png or .svg file; needs pip install 'flyball[bench]'"
    )
    group.add_argument("--json", action="store_true", help="print JSON instead of the table")


def add_batch_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags of ``flyball batch``."""
    parser.description = (
        "Answer the requests of a file in OpenAI's batch format. A running server answers them, or with --model an engine that "
        "is started for them. The output is also the record of what is done: the same command goes on where the last one ended."
    )
    parser.epilog = (
        "With --model, the flags of `flyball serve` that are about the model, the engine and bounds on requests may follow; "
        "--scheduling-policy is dpr then. The exit code is 0 if all requests succeeded, 1 if some failed."
    )
    defaults = BatchSettings(source=Path(), target=Path())
    parser.add_argument(
        "input", type=Path, metavar="INPUT", help="file with one request a line: custom_id, method, url, body"
    )
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="file to append the answers to, as they come")
    add_server_arguments(parser, defaults.timeout_s)
    parser.add_argument(
        "--model",
        metavar="CHECKPOINT",
        help="start an engine instead of asking a server: a checkpoint's folder or a Hugging Face id",
    )
    parser.add_argument(
        "--concurrency",
        type=int,
        metavar="N",
        help=f"requests in flight (default: {SERVER_CONCURRENCY} at a server, {ENGINE_CONCURRENCY} with --model)",
    )
    parser.add_argument(
        "--max-retries",
        type=int,
        default=defaults.max_retries,
        metavar="N",
        help="how often a request whose connection broke is sent again (default: %(default)s)",
    )
    parser.add_argument(
        "--give-up-after",
        type=float,
        default=defaults.give_up_after_s,
        metavar="S",
        help="end the batch when the server has refused everything for S seconds; until then, requests that get 429 or 503 "
        "wait and come again (default: %(default)g)",
    )
    parser.add_argument(
        "--max-body-bytes",
        type=int,
        default=defaults.max_body_bytes,
        metavar="BYTES",
        help="longest line of the input (default: %(default)s)",
    )


def settings_from(args: argparse.Namespace) -> BenchSettings:
    """Return the settings that the flags describe. Raises ConfigError, which names the first wrong flag."""
    return BenchSettings(
        base_url=args.base_url,
        model=args.model,
        endpoint=args.endpoint,
        api_key_env=args.api_key_env,
        num_requests=args.num_requests,
        concurrency=args.concurrency,
        request_rate=args.request_rate,
        arrival=args.arrival,
        burstiness=args.burstiness,
        trace=args.trace,
        trace_speed=args.trace_speed,
        trace_limit=args.trace_limit,
        trace_max_tokens=args.trace_max_tokens,
        dataset=args.dataset,
        input_len=args.input_len,
        output_len=args.output_len,
        tokenizer=args.tokenizer,
        ignore_eos=args.ignore_eos,
        keep_alive=not args.no_keep_alive,
        temperature=args.temperature,
        extra_body=_parse_extra_body(args.extra_body),
        seed=args.seed,
        num_warmup=args.warmup,
        slo=None if args.slo is None else parse_slo(args.slo),
        timeout_s=args.timeout,
        max_duration_s=args.max_duration,
    )


def _parse_extra_body(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as exc:
        raise ConfigError(f"--extra-body is {text!r}, not a JSON object: {exc}.") from exc


if __name__ == "__main__":
    sys.exit(main())
