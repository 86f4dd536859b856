"""``flyball simulate``: flags in, OUT.json out."""

import argparse
import math
import sys
from pathlib import Path
from typing import get_args

from msgspec import structs

from flyball_operator.spec import LLMDeployment
from flyball_operator.spec.manifest import read_file
from flyball_protocol.quoting import quoted
from flyball_runtime.core.config import default_step_tokens
from flyball_runtime.core.errors import ConfigError
from flyball_simulation import oracle
from flyball_simulation.controllers import Aimd, Auto, Controller, Rules, Static
from flyball_simulation.plant import PROFILES, Disturbances, Profile, Shape, SlowDown, shaped
from flyball_simulation.result import Bounds, Result
from flyball_simulation.workload import MIXES, Phase, Workload, from_trace, generate, until
from flyball_simulation.world import Setup, simulate

CONTROLLERS = ("auto", "static", "vllm-default", "oracle", "aimd", "rules")
LIMITS = ("max_num_seqs", "max_num_batched_tokens")
MAX_MINUTES = 7 * 24 * 60
MAX_REPLICAS = 256
DEFAULT_MINUTES = 20.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags of ``flyball simulate``."""
    parser.description = (
        "Run traffic through the real scheduler, KV cache and tuner, with a clock and a device that are simulated. An hour "
        "takes about a minute. Answers which objectives are feasible, with how many replicas and which limits."
    )
    world = parser.add_argument_group("world")
    world.add_argument(
        *("-f", "--file", "--manifest"),
        dest="manifest",
        type=Path,
        required=True,
        metavar="FILE",
        help="a YAML file with one LLMDeployment, whose objectives are to be met (required)",
    )
    world.add_argument(
        "--plant", required=True, choices=tuple(PROFILES), help="device that serves the model (required)"
    )
    world.add_argument("--plant-shape", choices=get_args(Shape), help="form of the step time (default: the device's)")
    world.add_argument(
        "--noise", type=float, default=0.05, metavar="SHARE", help="random part of step times (default: %(default)g)"
    )
    world.add_argument(
        "--hiccups",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="share of steps that take 4 times as long (default: %(default)g)",
    )
    world.add_argument(
        "--slow-down",
        metavar="FACTOR:FROM:TO",
        help="steps take FACTOR times as long from minute FROM to minute TO: a co-tenant",
    )
    world.add_argument(
        "--kv-tokens", type=int, metavar="N", help="tokens that a KV cache holds (default: the device's)"
    )
    world.add_argument("--replicas", type=int, metavar="N", help="replicas (default: the manifest's)")
    load = parser.add_argument_group("load: a trace or a workload")
    load.add_argument(
        "--trace", metavar="FILE", help="Azure .csv[.gz] or Mooncake .jsonl[.gz], as flyball bench reads them"
    )
    load.add_argument(
        "--trace-speed",
        type=float,
        default=1.0,
        metavar="X",
        help="speed of the replay; 2 takes half the time (default: %(default)g)",
    )
    load.add_argument("--trace-limit", type=int, metavar="N", help="only the first N requests (default: all)")
    load.add_argument(
        "--workload", choices=tuple(MIXES), help="requests with lengths drawn from recorded ones, instead of a trace"
    )
    load.add_argument("--request-rate", type=float, metavar="R", help="mean arrivals per second of a --workload")
    load.add_argument(
        "--minutes",
        type=float,
        metavar="M",
        help=f"minutes in which requests arrive (default: the whole trace, {DEFAULT_MINUTES:g} for a workload)",
    )
    load.add_argument(
        "--seed", type=int, default=0, metavar="N", help="the same seed gives the same run (default: %(default)s)"
    )
    world.add_argument(
        "--compile",
        action="store_true",
        help="compile what a step runs with mypyc first, once: 1.6 to 2 times as fast, with the same result",
    )
    control = parser.add_argument_group("control")
    control.add_argument(
        "--controller", choices=CONTROLLERS, default="auto", help="what sets the limits (default: %(default)s)"
    )
    control.add_argument(
        "--limits",
        metavar="LIMITS",
        help="limits of --controller static: max_num_seqs=N,max_num_batched_tokens=T (default: the manifest's)",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="write the result as JSON (required)"
    )
    output.add_argument(
        "--chart", metavar="FILE", help="draw to a .png or .svg file: the run over time, or what is feasible (oracle)"
    )


def run(args: argparse.Namespace) -> int:
    """Run ``flyball simulate``; returns the exit code. Raises ConfigError or SpecError for bad input."""
    _check(args)
    deployment = _deployment(args.manifest)
    profile: Profile = PROFILES[args.plant]
    setup = _setup(args, deployment, profile)
    workload, duration_s = _workload(args)
    result = _run(args, deployment, profile, setup, workload, duration_s)
    if args.chart is not None:
        _draw(args, setup, workload, result)
    args.output.write_bytes(result.to_json())
    print(_summary(result), file=sys.stderr)
    return 0


def _draw(args: argparse.Namespace, setup: Setup, workload: Workload, result: Result) -> None:
    """Draw the run, or of an oracle what is feasible, which the result then says too."""
    if args.controller != "oracle":
        from flyball_simulation.chart import write_chart  # here: it loads matplotlib, which is optional

        write_chart(result, args.chart)
        return
    from flyball_simulation import feasibility

    explored = feasibility.explore(setup, workload, seed=args.seed)
    result.feasible = feasibility.feasible(explored, setup)
    feasibility.write_chart(explored, setup, args.chart)


def _run(
    args: argparse.Namespace,
    deployment: LLMDeployment,
    profile: Profile,
    setup: Setup,
    workload: Workload,
    duration_s: float,
) -> Result:
    if args.controller == "oracle":
        return oracle.best_static(setup, workload, seed=args.seed, duration_s=duration_s)
    controller: Controller
    if args.controller == "static":
        setup = structs.replace(setup, **_limits(args.limits)) if args.limits else setup
        controller = Static()
    elif args.controller == "vllm-default":
        setup = structs.replace(
            setup,
            max_num_seqs=profile.vllm_max_num_seqs,
            max_num_batched_tokens=profile.vllm_max_num_batched_tokens,
        )
        controller = Static()
    elif args.controller == "aimd":
        controller = Aimd(deployment.spec.tuning)
    elif args.controller == "rules":
        controller = Rules(deployment.spec.tuning)
    else:
        controller = Auto(deployment.spec.tuning, deployment.name)
    return simulate(setup, workload, controller, label=args.controller, seed=args.seed, duration_s=duration_s)


def _check(args: argparse.Namespace) -> None:
    """Raise ConfigError naming the first flag that is wrong."""
    _check_range("--trace-speed", args.trace_speed, 0, math.inf, open_low=True)
    _check_range("--trace-limit", args.trace_limit, 1, math.inf)
    _check_range("--request-rate", args.request_rate, 0, 1e6, open_low=True)
    _check_range("--minutes", args.minutes, 0, MAX_MINUTES, open_low=True)
    _check_range("--replicas", args.replicas, 1, MAX_REPLICAS)
    _check_range("--kv-tokens", args.kv_tokens, 1, 2**31)
    _check_range("--seed", args.seed, 0, 2**31)
    _check_range("--noise", args.noise, 0, 1)
    _check_range("--hiccups", args.hiccups, 0, 1)
    if (args.trace is None) == (args.workload is None):
        given = "both" if args.trace is not None else "neither"
        raise ConfigError(f"{given} of --trace and --workload are given; say by one of them what is asked.")
    if (args.workload is None) != (args.request_rate is None):
        raise ConfigError("--workload and --request-rate go together; give both, or --trace.")
    if args.trace is None and (args.trace_speed != 1.0 or args.trace_limit is not None):
        raise ConfigError("--trace-speed and --trace-limit are for a trace; add --trace FILE.")
    if args.limits is not None and args.controller != "static":
        raise ConfigError(
            f"--limits is {quoted(args.limits)}; only --controller static takes limits. Drop one of the two."
        )
    if args.chart is not None:
        from flyball_clients.bench.report import check_chart_path  # here: it loads rich; most runs draw nothing

        check_chart_path(args.chart)
    for flag, path in (("--output", args.output), ("--chart", args.chart and Path(args.chart))):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(
                f"{flag} is {quoted(str(path))}; there is no folder {quoted(str(path.parent))}. Make it first."
            )
        if path is not None and path.is_dir():
            raise ConfigError(f"{flag} is {quoted(str(path))}, a folder; name a file.")


def _check_range(flag: str, value: float | None, low: float, high: float, *, open_low: bool = False) -> None:
    if value is None:
        return
    if math.isfinite(value) and low <= value <= high and not (open_low and value == low):
        return
    least = f"above {low:g}" if open_low else f"at least {low:g}"
    raise ConfigError(
        f"{flag} is {value:g}; it must be {least}" + (f" and at most {high:g}." if high < math.inf else ".")
    )


def _deployment(path: Path) -> LLMDeployment:
    found = read_file(path)
    if len(found) != 1:
        raise ConfigError(
            f"{quoted(str(path))} has {len(found)} LLMDeployments; a simulation is of one. Split the file."
        )
    return found[0]


def objectives_of(deployment: LLMDeployment) -> Bounds:
    """Return what requests are held to. Raises ConfigError without any."""
    wanted = deployment.spec.tuning.objectives
    ttft_ms, itl_ms = wanted.ttft_p95_milliseconds, wanted.inter_token_latency_p95_milliseconds
    if ttft_ms is None and itl_ms is None:
        raise ConfigError(
            f"the LLMDeployment {deployment.name} has no objectives, so no request can be called good. Set "
            "spec.tuning.objectives.ttftP95Milliseconds, interTokenLatencyP95Milliseconds or both."
        )
    return Bounds(ttft_s=None if ttft_ms is None else ttft_ms / 1000, itl_s=None if itl_ms is None else itl_ms / 1000)


def _setup(args: argparse.Namespace, deployment: LLMDeployment, profile: Profile) -> Setup:
    runtime = deployment.spec.runtime
    kv_tokens = args.kv_tokens or profile.kv_tokens
    return Setup(
        name=args.plant,
        plant=shaped(profile.plant, args.plant_shape),
        disturbances=Disturbances(noise=args.noise, hiccup_share=args.hiccups, slow_downs=_slow_downs(args.slow_down)),
        replicas=args.replicas or max(1, deployment.spec.replicas),
        kv_tokens=kv_tokens,
        max_model_len=runtime.max_model_len or min(profile.max_model_len, kv_tokens // 16 * 16),
        max_num_seqs=runtime.max_num_seqs,
        max_num_batched_tokens=runtime.max_num_batched_tokens
        or max(default_step_tokens(args.plant), runtime.max_num_seqs),
        objectives=objectives_of(deployment),
        model=deployment.served_name,
    )


def _slow_downs(text: str | None) -> tuple[SlowDown, ...]:
    if text is None:
        return ()
    try:
        factor, start, end = (float(part) for part in text.split(":"))
    except ValueError:
        raise ConfigError(f"--slow-down is {quoted(text)}; write FACTOR:FROM:TO, such as 1.6:5:15.") from None
    if not (math.isfinite(factor) and factor > 0 and 0 <= start < end):
        raise ConfigError(f"--slow-down is {quoted(text)}; FACTOR must be above 0, and FROM from 0 to below TO.")
    return (SlowDown(factor=factor, start_s=60 * start, end_s=60 * end),)


def _workload(args: argparse.Namespace) -> tuple[Workload, float]:
    """Return the requests, and for how long they come."""
    if args.trace is None:
        seconds = 60 * (args.minutes or DEFAULT_MINUTES)
        return generate([Phase(mix=args.workload, rate=args.request_rate, seconds=seconds)], args.seed), seconds
    whole = from_trace(args.trace, speed=args.trace_speed, limit=args.trace_limit, seed=args.seed)
    if args.minutes is None:
        return whole, max(1.0, whole[-1].at_s)
    return until(whole, 60 * args.minutes), 60 * args.minutes


def _limits(text: str) -> dict[str, int]:
    """Parse ``max_num_seqs=N,max_num_batched_tokens=T``. Raises ConfigError; the engine's settings check the values."""
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = (word.strip() for word in part.partition("="))
        if name not in LIMITS:
            raise ConfigError(f"--limits has {quoted(part)}; the limits are {' and '.join(LIMITS)}.")
        if name in found:
            raise ConfigError(f"--limits has {name} twice; give it once.")
        if not value.isascii() or not value.isdigit():
            raise ConfigError(f"--limits has {quoted(part)}; {name} must be a whole number of at least 1.")
        found[name] = min(int(value[:20]), 2**62)
    return found


def _summary(result: Result) -> str:
    limits = next(iter(result.final_limits.values()), None)
    at = f", at {limits.max_num_seqs} sequences and {limits.max_num_batched_tokens} tokens a step" if limits else ""
    told = [
        f"{result.controller}: {result.share_good:.1%} of {result.num_requests} requests good "
        f"(TTFT p95 {_ms(result.ttft_p95_s)}, ITL p95 {_ms(result.itl_p95_s)}), {result.num_changes} changes{at}"
    ]
    told += [
        f"{one.replicas} replicas: {'feasible' if one.is_feasible else 'not feasible'}, {one.share_good:.1%} good "
        f"with {one.max_num_seqs} sequences and {one.max_num_batched_tokens} tokens a step"
        for one in result.feasible
    ]
    return "\n".join(told)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.0f} ms"
