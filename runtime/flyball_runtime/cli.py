"""The command line: ``flyball serve | doctor | listener``."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from flyball_protocol import endpoints
from flyball_protocol.quoting import quoted
from flyball_runtime import __version__
from flyball_runtime.core import config as settings
from flyball_runtime.core import embedder, generation_config
from flyball_runtime.core.clock import MonotonicClock
from flyball_runtime.core.config import EngineConfig, read_boot_prior
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.lora import LoraConfig, LoraModule
from flyball_runtime.core.speculation import SpeculativeConfig
from flyball_runtime.text.parsing.message import AUTO, CALL_PARSERS, NONE, REASONING_PARSERS

if TYPE_CHECKING:
    from flyball_runtime.api.cors import Cors
    from flyball_runtime.api.keys import ApiKeys
    from flyball_runtime.offline import OfflineApi


def build_parser() -> argparse.ArgumentParser:
    from flyball_runtime import doctor, listener  # here, so that `import flyball_runtime.cli` stays light

    parser = argparse.ArgumentParser(prog="flyball", description="Serve a language model.")
    parser.add_argument("--version", action="version", version=f"flyball {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="serve a model with an OpenAI-compatible API")
    add_serve_arguments(serve)
    serve.set_defaults(run=run_serve)
    doctor_command = commands.add_parser("doctor", help="say what this machine has for serving, and should reach")
    doctor.add_arguments(doctor_command)
    doctor_command.set_defaults(run=doctor.run)
    listener_command = commands.add_parser("listener")  # no help: the operator runs it, users do not
    listener.add_arguments(listener_command)
    listener_command.set_defaults(run=listener.run)
    return parser


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Adds each default to the help. Where the default is None, the help itself says what is in effect."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``flyball serve``; names and meanings follow ``vllm serve`` where both have them."""
    parser.formatter_class = HelpFormatter
    add_engine_arguments(parser)
    add_chat_arguments(parser)
    add_server_arguments(parser)
    add_bound_arguments(parser.add_argument_group("bounds on requests"))


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the model and of the engine."""
    on_off = argparse.BooleanOptionalAction
    parser.add_argument("model", help="directory of a Hugging Face checkpoint, or a Hugging Face id")

    model = parser.add_argument_group("model")
    model.add_argument(
        "--served-model-name", nargs="+", metavar="NAME", help="names that requests may use (default: MODEL as written)"
    )
    model.add_argument(
        "--revision", metavar="NAME", help="branch, tag or commit of a Hugging Face id (default: its main branch)"
    )
    model.add_argument(
        "--model-impl",
        default="auto",
        choices=settings.MODEL_IMPLS,
        help="auto leaves architectures that Flyball does not implement to transformers",
    )
    model.add_argument("--dtype", default="auto", choices=settings.DTYPES, help="auto uses the checkpoint's type")
    model.add_argument(
        "--quantization",
        default="none",
        choices=settings.QUANTIZATIONS,
        help="what linear layers are rounded to: int8 weights and inputs (half the memory, on CPUs up to 1.8 times as fast), "
        "w8a16 weights alone, int4 weights alone to 4 bits (a third of the memory, faster for few requests at a time), "
        "w4a8 weights to 4 bits and inputs to 8, on GPUs fp8 weights alone to e4m3",
    )
    model.add_argument(
        "--max-model-len", type=int, metavar="TOKENS", help="longest prompt plus output (default: the checkpoint's)"
    )
    model.add_argument(
        "--generation-config",
        default=generation_config.AUTO,
        metavar="SOURCE",
        help="sampling defaults: auto (the checkpoint's generation_config.json), none (vllm means the same), or a folder",
    )
    model.add_argument(
        "--pooling-type",
        type=str.lower,
        default=embedder.AUTO,
        choices=[embedder.AUTO, *embedder.POOLING_TYPES],
        help="how a prompt becomes an embedding: its last token or the mean; auto does what the checkpoint says, or last",
    )
    model.add_argument(
        "--seed", type=int, metavar="N", help="seed for requests that have none (default: a random one at each start)"
    )

    engine = parser.add_argument_group("engine (these flags set the envelope inside which live limits move)")
    engine.add_argument("--device", default="auto", choices=settings.DEVICES, help="auto uses CUDA if there is a GPU")
    engine.add_argument(
        "--max-num-seqs", type=int, default=256, metavar="N", help="maximum number of sequences that run at once"
    )
    engine.add_argument(
        "--max-num-batched-tokens",
        type=int,
        metavar="TOKENS",
        help="maximum number of tokens that one step computes "
        f"(default: {settings.CPU_BATCHED_TOKENS} on a CPU, {settings.GPU_BATCHED_TOKENS} on a GPU, "
        "or --max-num-seqs if that is more)",
    )
    engine.add_argument(
        "--gpu-memory-utilization", type=float, default=0.9, metavar="SHARE", help="share of the GPU's memory to use"
    )
    engine.add_argument(
        "--kv-cache-memory-bytes",
        metavar="SIZE",
        help="size of the KV cache at the start, e.g. 2GiB (default: what --gpu-memory-utilization leaves; "
        "on a CPU half of the free memory, at most 4GiB)",
    )
    engine.add_argument(
        "--kv-cache-memory-max",
        metavar="SIZE",
        help="size up to which live limits may raise the KV cache, on CPUs under Linux (default: its size at the start)",
    )
    engine.add_argument(
        "--kv-cache-dtype",
        default="auto",
        choices=settings.KV_CACHE_DTYPES,
        help="auto keeps keys and values in the dtype of the weights; int8_per_token_head and, on GPUs, fp8_per_token_head "
        "round them to 8 bits: nearly twice the tokens in the same memory",
    )
    engine.add_argument(
        "--swap-space",
        default="0",
        metavar="SIZE",
        help="host memory that keeps evicted KV blocks, e.g. 4GiB; 0 keeps none",
    )
    engine.add_argument(
        "--kv-drain-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds to wait for running sequences when the KV limit is lowered; then some are preempted",
    )
    engine.add_argument("--block-size", type=int, default=16, choices=settings.BLOCK_SIZES, help="tokens per KV block")
    engine.add_argument(
        "--enable-prefix-caching", default=True, action=on_off, help="reuse the KV blocks of prompts that begin alike"
    )
    engine.add_argument("--enable-chunked-prefill", default=True, action=on_off, help="split long prompts over steps")
    engine.add_argument(
        "--scheduling-policy",
        default="fcfs",
        choices=settings.SCHEDULING_POLICIES,
        help="the order of requests: by arrival, priority, output length, prompt length or deadline; dpr is for batches",
    )
    engine.add_argument(
        "--async-scheduling",
        default=False,
        action=on_off,
        help="plan the next step while the present one runs; on a CPU, a separate thread computes the steps",
    )
    engine.add_argument(
        "--speculative-config",
        metavar="JSON",
        help='have several tokens verified in one step, e.g. {"method": "ngram", "num_speculative_tokens": 4}, '
        'or with a draft model {"model": "Qwen/Qwen3-0.6B", "num_speculative_tokens": 4} '
        "(default: one token of a sequence per step)",
    )
    engine.add_argument("--fair-share", default=True, action=on_off, help="clients take turns, measured in tokens")
    engine.add_argument(
        *("--max-queued-requests", "--max-num-queued-reqs"),
        type=int,
        default=1024,
        metavar="N",
        help="requests that may wait; more get 429",
    )
    engine.add_argument(
        *("--max-queued-tokens", "--max-num-queued-tokens"),
        type=int,
        default=4 * 1024 * 1024,
        metavar="TOKENS",
        help="prompt tokens that may wait, counted for each choice; more get 429",
    )
    engine.add_argument(
        "--boot-prior",
        type=Path,
        metavar="FILE",
        help="JSON file with the live limits to start with; it may be missing (default: the limits of these flags)",
    )
    engine.add_argument(
        "--kernel-backend",
        default="auto",
        choices=settings.KERNEL_BACKENDS,
        help="auto uses triton on CUDA and cpp on a CPU",
    )
    engine.add_argument(
        "--attention-backend",
        default="auto",
        type=str.lower,
        choices=settings.ATTENTION_BACKENDS,
        help="flash_attn has FlashAttention 3 attend, on Hopper GPUs, if it is installed (auto: flyball)",
    )
    engine.add_argument(
        "--num-threads",
        type=int,
        metavar="N",
        help="CPU threads of the engine (default: all cores, or as many as a container's CPU limit keeps busy; fewer while "
        "other processes use the cores)",
    )
    engine.add_argument(
        "--numa-node",
        type=int,
        metavar="N",
        help="run the engine on the cores of NUMA node N, with memory of that node (default: on all cores)",
    )
    add_lora_arguments(parser.add_argument_group("LoRA adapters"))


def add_lora_arguments(lora: argparse._ArgumentGroup) -> None:
    """Declare the flags of LoRA adapters; ``lora_from`` reads them."""
    lora.add_argument(
        "--enable-lora",
        default=False,
        action=argparse.BooleanOptionalAction,
        help="serve LoRA adapters, which requests name as their model",
    )
    lora.add_argument(
        "--lora-modules",
        nargs="+",
        metavar="NAME=PATH",
        help='adapters to load, each NAME=PATH or JSON like {"name": "sql", "path": "/adapters/sql"} (default: none)',
    )
    lora.add_argument(
        "--max-loras", type=int, default=1, metavar="N", help="maximum number of adapters among running sequences"
    )
    lora.add_argument("--max-lora-rank", type=int, default=16, metavar="N", help="highest rank of an adapter")
    lora.add_argument(
        "--max-cpu-loras", type=int, default=32, metavar="N", help="maximum number of adapters that are loaded at once"
    )
    lora.add_argument(
        "--runtime-lora-dir",
        type=Path,
        metavar="DIR",
        help="folder from which clients may load adapters while the server runs (default: they may load none)",
    )


def lora_from(args: argparse.Namespace) -> LoraConfig | None:
    """The settings of LoRA; None without --enable-lora. Adapters on the Hugging Face Hub are downloaded. Raises ConfigError."""
    if not args.enable_lora:
        for flag, value in (("--lora-modules", args.lora_modules), ("--runtime-lora-dir", args.runtime_lora_dir)):
            if value is not None:
                raise ConfigError(f"{flag} is given without --enable-lora. Add that, or leave {flag} out.")
        return None
    modules = tuple(LoraModule.parse(one) for one in args.lora_modules or ())
    for module in modules:
        if module.name in (args.served_model_name or [args.model]):
            raise ConfigError(
                f"--lora-modules has {quoted(module.name)}, which is the served model. Rename one of them."
            )
    return LoraConfig(
        max_loras=args.max_loras,
        max_lora_rank=args.max_lora_rank,
        max_cpu_loras=args.max_cpu_loras,
        modules=tuple(msgspec.structs.replace(one, path=_local_path(one.path)) for one in modules),
    )


def _local_path(path: str) -> str:
    """Return the folder of an adapter; what reads like owner/name and is no folder is one on the Hub. Raises ConfigError."""
    if path.count("/") != 1 or path.startswith(("/", ".", "~")) or Path(path).is_dir():
        return str(Path(path).expanduser())
    from flyball_runtime.model.hub import (
        resolve_model_path,
    )  # imports the Hub's client, which other commands do not need

    return str(resolve_model_path(path))


def runtime_lora_dir_from(args: argparse.Namespace) -> Path | None:
    """The folder from which clients may load adapters. Raises ConfigError if it is none."""
    folder: Path | None = args.runtime_lora_dir
    if folder is not None and not folder.is_dir():
        raise ConfigError(
            f"--runtime-lora-dir is {quoted(str(folder))}, which is not a folder. Make it, or correct the flag."
        )
    return None if folder is None else folder.resolve()


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of tool calls and reasoning; ``chats_from`` reads them."""
    chats = parser.add_argument_group("chats")
    chats.add_argument(
        "--tool-call-parser",
        default=AUTO,
        choices=[AUTO, NONE, *CALL_PARSERS],
        help="format of the model's tool calls; auto looks at the chat template",
    )
    chats.add_argument(
        "--enable-auto-tool-choice",
        default=True,
        action=argparse.BooleanOptionalAction,
        help="let the model decide whether to call tools; if off, requests with tools that leave it to the model get 400",
    )
    chats.add_argument(
        "--reasoning-parser",
        default=AUTO,
        choices=[AUTO, NONE, *REASONING_PARSERS],
        help="format of the model's reasoning; auto looks at the chat template",
    )


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ports, signals and the log."""
    server = parser.add_argument_group("server")
    server.add_argument("--host", default="0.0.0.0", help="address to listen on")
    server.add_argument("--port", type=int, default=endpoints.API_PORT, help="port of the API")
    server.add_argument(
        "--forwarded-allow-ips",
        default=settings.LOOPBACK_PROXIES,
        metavar="LIST",
        help="addresses and networks of proxies whose X-Forwarded-For names the client; * for all",
    )
    server.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help=f"keys of which requests must have one, one per line (default: ${endpoints.API_KEY_ENV}; without keys, "
        "every request is served)",
    )
    server.add_argument(
        "--api-key",
        nargs="*",
        action=_RefusedKey,
        metavar="KEY",
        help="refused, because other users can list arguments (default: not given)",
    )
    server.add_argument("--disable-fastapi-docs", action="store_true", help="leave out /docs and /openapi.json")
    any_one = ["*"]
    server.add_argument(
        "--allowed-origins",
        type=_texts,
        metavar="JSON",
        help='list of origins whose web pages may read answers, or ["*"] for all (default: none may)',
    )
    server.add_argument(
        "--allowed-methods",
        type=_texts,
        default=any_one,
        metavar="JSON",
        help="list of methods that such pages may use",
    )
    server.add_argument(
        "--allowed-headers",
        type=_texts,
        default=any_one,
        metavar="JSON",
        help="list of headers that such pages may send",
    )
    server.add_argument("--allow-credentials", action="store_true", help="such pages may have cookies sent along")
    server.add_argument("--admin-host", default="127.0.0.1", metavar="HOST", help="address of the admin port")
    server.add_argument(
        "--admin-port", type=int, default=endpoints.ADMIN_PORT, metavar="PORT", help="port of the admin API"
    )
    server.add_argument(
        "--admin-token-file",
        type=Path,
        metavar="FILE",
        help=f"token of the admin port (default: ${endpoints.ADMIN_TOKEN_ENV}; without a token the port is closed)",
    )
    server.add_argument(
        *("--drain-timeout", "--shutdown-timeout"),
        type=float,
        default=120.0,
        metavar="S",
        help="seconds that running requests get after SIGTERM",
    )
    server.add_argument(
        "--drain-quiet",
        type=float,
        default=0.0,
        metavar="S",
        help="after SIGTERM accept requests until none has come for S seconds, at most for half of --drain-timeout",
    )
    server.add_argument(
        "--stream-interval",
        type=int,
        default=1,
        metavar="N",
        help="tokens of a stream from one event to the next; with more, clients and server have less work",
    )
    server.add_argument(
        "--max-heartbeat-age",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds without progress, in a step or between two, after which /livez fails; raised if a step needs longer",
    )
    add_log_level(server)


def add_log_level(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        *("--log-level", "--uvicorn-log-level"),
        default="info",
        choices=settings.LOG_LEVELS,
        help="lowest level to log",
    )


def _texts(value: str) -> list[str]:
    """A JSON list of texts."""
    try:
        return msgspec.json.decode(value, type=list[str])
    except msgspec.DecodeError:
        raise argparse.ArgumentTypeError(f'{quoted(value)} is not a JSON list of texts, like \'["a", "b"]\'') from None


class _RefusedKey(argparse.Action):
    """Ends with a usage error that does not repeat the key."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser.error(
            "--api-key would show the key to everyone who can list the processes of this machine. "
            f"Put it into the environment variable {endpoints.API_KEY_ENV}, or into a file for --api-key-file."
        )


def add_bound_arguments(bounds: argparse._ArgumentGroup) -> None:
    """Declare the flags of ``ApiSettings``' bounds; ``bounds_from`` reads them."""

    def add(*names: str, default: float, unit: str, text: str) -> None:
        bounds.add_argument(*names, type=type(default), default=default, metavar=unit, help=text)

    add("--max-body-bytes", default=4 * 1024 * 1024, unit="BYTES", text="longest request body; longer ones get 413")
    add(
        "--max-total-body-bytes",
        default=64 * 1024 * 1024,
        unit="BYTES",
        text="bytes of all bodies that are being received; beyond that, the slowest get 503",
    )
    add("--max-messages", default=2048, unit="N", text="maximum number of messages in a chat")
    add("--max-prompts", default=256, unit="N", text="maximum number of prompts in a request")
    add(
        "--max-choices",
        default=256,
        unit="N",
        text="maximum number of choices of a request: prompts times n or best_of",
    )
    add(
        *("--max-header-bytes", "--h11-max-incomplete-event-size"),
        default=16 * 1024,
        unit="BYTES",
        text="longest request line plus headers",
    )
    add("--header-timeout", default=10.0, unit="S", text="seconds for a request line and headers to be complete")
    add("--body-timeout", default=30.0, unit="S", text="seconds for a body to be complete; later ones get 408")
    add("--write-timeout", default=60.0, unit="S", text="seconds in which a client must read some of its answer")
    add(
        "--structured-outputs-timeout",
        default=5.0,
        unit="S",
        text="seconds of CPU time to compile a schema, regex or grammar; those that take more get 400",
    )
    add("--keep-alive", default=75, unit="S", text="seconds that an idle connection stays open")


def cors_from(args: argparse.Namespace) -> "Cors":
    """The CORS settings. Raises ConfigError."""
    from flyball_runtime.api.cors import Cors

    return Cors(
        allowed_origins=None if args.allowed_origins is None else tuple(args.allowed_origins),
        allowed_methods=tuple(args.allowed_methods),
        allowed_headers=tuple(args.allowed_headers),
        allow_credentials=args.allow_credentials,
    )


def bounds_from(args: argparse.Namespace) -> dict[str, Any]:
    """The bounds among the fields of ``ApiSettings``."""
    return {
        "max_body_bytes": args.max_body_bytes,
        "max_total_body_bytes": args.max_total_body_bytes,
        "max_messages": args.max_messages,
        "max_prompts": args.max_prompts,
        "max_choices": args.max_choices,
        "max_header_bytes": args.max_header_bytes,
        "header_timeout_s": args.header_timeout,
        "body_timeout_s": args.body_timeout,
        "write_timeout_s": args.write_timeout,
        "keep_alive_s": args.keep_alive,
        "structured_outputs_timeout_s": args.structured_outputs_timeout,
    }


def chats_from(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of ``ApiSettings`` about tool calls and reasoning."""
    return {
        "tool_call_parser": args.tool_call_parser,
        "reasoning_parser": args.reasoning_parser,
        "enable_auto_tool_choice": args.enable_auto_tool_choice,
    }


def requests_from(args: argparse.Namespace, path: Path) -> dict[str, Any]:
    """The fields of ``ApiSettings`` that are about requests, however they come."""
    return {
        "served_model_names": tuple(args.served_model_name or [args.model]),
        "default_sampling": generation_config.default_sampling(args.generation_config, path),
        "embedder": embedder.Embedder.of_checkpoint(args.pooling_type, path),
        "lora_dir": runtime_lora_dir_from(args),
        **bounds_from(args),
        **chats_from(args),
    }


def run_serve(args: argparse.Namespace) -> int:
    # Here, because the other commands need none of it.
    from flyball_runtime.api.settings import ApiSettings
    from flyball_runtime.model.hub import find_checkpoint
    from flyball_runtime.serve import ServeConfig, run_replica
    from flyball_runtime.text.tokenizer import load_tokenizer

    _log_to_stderr(args.log_level)
    api_keys = api_keys_from(args)
    path = find_checkpoint(args.model, args.revision, args.model_impl)
    engine_config = engine_config_from(args, path)
    listener = os.environ.get(endpoints.LISTENER_ENV)
    config = ServeConfig(
        host=args.host,
        port=args.port,
        listener=None if listener is None else Path(listener),
        admin_host=args.admin_host,
        admin_port=args.admin_port,
        admin_token=admin_token_from(args),
        api_keys=api_keys,
        api=ApiSettings(
            max_heartbeat_age_s=args.max_heartbeat_age,
            stream_interval=args.stream_interval,
            forwarded_allow_ips=args.forwarded_allow_ips,
            cors=cors_from(args),
            disable_docs=args.disable_fastapi_docs,
            **requests_from(args, path),
        ),
        drain_timeout_s=args.drain_timeout,
        drain_quiet_s=args.drain_quiet,
    )
    return run_replica(config, engine_config, load_tokenizer(path))


def _log_to_stderr(level: str) -> None:
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)


def open_offline_api(
    model: str, flags: Sequence[str], *, num_in_flight: int, max_body_bytes: int
) -> AbstractAsyncContextManager["OfflineApi"]:
    """Return the API of an engine that is for one batch alone, as ``flyball batch --model`` uses it.

    Args:
        flags: those of ``flyball serve`` that are about the model, the engine and the bounds. The others end the program.
        num_in_flight: most requests at once, all of which are accepted.
        max_body_bytes: longest request.
    Raises:
        ConfigError: a flag is out of range, or the checkpoint is not there.
    """
    from flyball_runtime.api.settings import ApiSettings
    from flyball_runtime.model.hub import find_checkpoint
    from flyball_runtime.offline import open_api
    from flyball_runtime.text.tokenizer import load_tokenizer

    args = _offline_parser().parse_args([model, *_OFFLINE_DEFAULTS, *flags])
    _log_to_stderr(args.log_level)
    if args.log_level == "info":  # of which the API writes a line per request
        logging.getLogger("flyball_runtime.api").setLevel(logging.WARNING)
    path = find_checkpoint(args.model, args.revision, args.model_impl)
    room = {
        "max_body_bytes": max_body_bytes,
        "max_inline_bytes": max_body_bytes,  # nobody waits for the event loop, and lanes would refuse some
        "max_total_body_bytes": num_in_flight * max_body_bytes,
    }
    settings = ApiSettings(**(requests_from(args, path) | room))
    return open_api(engine_config_from(args, path), settings, load_tokenizer(path))


_OFFLINE_DEFAULTS = (
    "--scheduling-policy=dpr",
    f"--max-num-batched-tokens={settings.OFFLINE_BATCHED_TOKENS}",
    f"--max-queued-requests={2**20}",
    f"--max-queued-tokens={2**40}",
)
"""A batch knows its requests, has as many in flight as it wants to, and nobody waits for a first token."""


def _offline_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="flyball batch --model", allow_abbrev=False, formatter_class=HelpFormatter)
    add_engine_arguments(parser)
    add_chat_arguments(parser)
    add_log_level(parser.add_argument_group("log"))
    add_bound_arguments(parser.add_argument_group("bounds on requests"))
    return parser


def engine_config_from(args: argparse.Namespace, path: Path) -> EngineConfig:
    names = args.served_model_name or [args.model]
    kv_bytes, max_kv_bytes = (
        None if size is None else settings.parse_bytes(size)
        for size in (args.kv_cache_memory_bytes, args.kv_cache_memory_max)
    )
    return EngineConfig(
        model=str(path),
        served_model_name=names[0],
        model_impl=args.model_impl,
        dtype=args.dtype,
        quantization=args.quantization,
        device=args.device,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        gpu_memory_utilization=args.gpu_memory_utilization,
        kv_cache_memory_bytes=kv_bytes,
        kv_cache_memory_max_bytes=max_kv_bytes,
        swap_space_bytes=settings.parse_bytes(args.swap_space),
        kv_cache_dtype=args.kv_cache_dtype,
        kv_drain_timeout_s=args.kv_drain_timeout,
        block_size=args.block_size,
        enable_prefix_caching=args.enable_prefix_caching,
        enable_chunked_prefill=args.enable_chunked_prefill,
        scheduling_policy=args.scheduling_policy,
        async_scheduling=args.async_scheduling,
        fair_share=args.fair_share,
        max_queued_requests=args.max_queued_requests,
        max_queued_tokens=args.max_queued_tokens,
        kernel_backend=args.kernel_backend,
        attention_backend=args.attention_backend,
        num_threads=args.num_threads,
        numa_node=args.numa_node,
        seed=args.seed,
        log_level=args.log_level,
        speculative_config=None
        if args.speculative_config is None
        else SpeculativeConfig.parse(args.speculative_config),
        lora=lora_from(args),
        boot_prior=None if args.boot_prior is None else read_boot_prior(args.boot_prior),
    )


def admin_token_from(args: argparse.Namespace) -> str | None:
    """The token from the file or the environment; None when neither is given. Raises ConfigError for an empty one."""
    if args.admin_token_file is not None:
        source = str(args.admin_token_file)
        try:
            token = args.admin_token_file.read_text().strip()
        except OSError as error:
            raise ConfigError(f"cannot read --admin-token-file {source}: {error.strerror}.") from None
    else:
        source = endpoints.ADMIN_TOKEN_ENV
        token = os.environ.get(endpoints.ADMIN_TOKEN_ENV)
    if token is not None and len(token) < 8:
        raise ConfigError(f"the admin token in {source} has {len(token)} characters; use 8 or more, or leave it out.")
    return token


def api_keys_from(args: argparse.Namespace) -> "ApiKeys | None":
    """The keys of the file and of the environment; None when neither is given. Raises ConfigError when either is unusable."""
    from flyball_runtime.api.keys import ApiKeys

    variable = os.environ.get(endpoints.API_KEY_ENV)
    if args.api_key_file is None and variable is None:
        return None
    return ApiKeys(args.api_key_file, variable, MonotonicClock())


def main(argv: list[str] | None = None) -> int:
    """Entry point. Bad settings end with one line on stderr and EXIT_CONFIG_ERROR."""
    args = build_parser().parse_args(argv)
    try:
        return int(args.run(args))
    except ConfigError as error:
        print(f"flyball {args.command}: {error}", file=sys.stderr)
        return endpoints.EXIT_CONFIG_ERROR
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
