"""Tuning on real replicas under a load that shifts: requests within their objectives, beside limits that stay as they are.

    python benchmarks/closed_loop.py [--minutes 15] [--load 0.7] [--contender NAME ...] [--chart FILE.svg] [--result NAME]

Each contender has two replicas (`flyball serve` of an 88M model, one thread each), and gets the same requests at the same
times. Each request goes to the replica with the fewest unfinished ones. Three phases of equal length: chat alone, chat beside
long prompts, chat beside bursts of batch work. The rate is a share of what one replica was measured to compute just before, the
objectives are four times what one request takes alone; both are the same for all contenders. Chats are a fifth as long as those
of Azure's conversation trace (1155 tokens in, 211 out). With so much more to read than to write, more than one step in twenty
has a prompt in it, so a request's own 95th percentile notices how long such steps are; see prompt_share().

The contenders take turns on the machine, 15 seconds each, in an order that rotates. Meanwhile the others are stopped, with
their clients, and their clocks stand still (own_time.py). So each contender serves a load without pauses, and when the machine
gets slower, it does for all of them. Before each turn a fixed piece of work is timed, to tell how fast the machine was.

`auto` starts with vLLM's defaults, and an operator is given the objectives. In the middle it is killed; another one goes on
from what the status of the resource held. The other contenders serve with fixed limits and no objectives: vLLM's defaults;
`by-hand`, whose token budget is what the inter-token objective leaves time for, by the measured speed; `careful`, which has 0.6
of that, since contexts get long; and a budget of 512 tokens. A request is good if its first token came in time and the 95th
percentile of its own gaps is within the objective.

Takes about six times --minutes. Writes results/NAME.json and prints, for each of the others, whether `auto` is ahead.
"""

import argparse
import asyncio
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from closed_loop_report import AUTO, draw, show, slices, summary, verdicts
from common import make_checkpoint, save
from contender import (
    FLAGS,
    KV_CACHE,
    LAST_S,
    NUM_REPLICAS,
    VOCABULARY,
    Ask,
    Outcome,
    Task,
    new_session,
    pods_of,
    replica,
    send,
    warm_up,
)
from flyball_operator.spec import Objectives, Tuning, plain
from flyball_operator.spec.schema import with_defaults
from flyball_protocol.endpoints import API_PORT
from own_time import OwnTime

CONTENDERS = ("vllm-defaults", "by-hand", AUTO, "careful", "fixed-64-512")
VLLM_DEFAULTS = (256, 2048)
"""Max sequences and token budget: vLLM's defaults on a CPU."""
CHAT, LONG, BATCH = (64, 400, 16, 68), (768, 2048, 16, 48), (64, 192, 96, 96)
"""Fewest and most prompt tokens, fewest and most output tokens."""
PHASES = {"chat": {"chat": 1.0}, "long prompts": {"chat": 0.5, "long": 0.5}, "batch": {"chat": 0.5, "batch": 0.5}}
BURST_S = 15.0
OF_ALONE = 4.0
SLICE_S = 15.0
END_S = LAST_S + 60.0
"""How long a contender may take after its last slice."""
MAX_PARTED = 20
"""Answers of a contender that are looked at closely because they differ."""


@dataclass(frozen=True)
class Speed:
    """What one replica does, measured with nothing beside it: seconds."""

    long_prompt_s: float
    gap_s: float
    prompt_token_s: float
    output_token_s: float

    def cost_s(self, kind: Sequence[int]) -> float:
        """Return the seconds of a replica that a request of this kind takes on average."""
        return (kind[0] + kind[1]) / 2 * self.prompt_token_s + (kind[2] + kind[3]) / 2 * self.output_token_s


async def measure_speed(model: Path, folder: Path, rng: random.Random) -> Speed:
    def ask(num_prompt: int, num_output: int) -> tuple[list[int], int]:
        return rng.choices(VOCABULARY, k=num_prompt), num_output

    one = pods_of(1)[0]
    async with replica(one, model, VLLM_DEFAULTS, folder / "speed.log"), new_session() as session:
        await warm_up(session, one)
        alone = [await send(session, one, *ask(LONG[1], 32)) for _ in range(5)]
        started_s = time.perf_counter()
        await asyncio.gather(*(send(session, one, *ask(16, 128)) for _ in range(16)))
        output_token_s = (time.perf_counter() - started_s) / (16 * 128)
    long_prompt_s = statistics.median(answer.ttft_s or 0.0 for answer in alone)
    gap_s = statistics.median(gap for answer in alone for gap in answer.gaps_s)
    return Speed(long_prompt_s, gap_s, long_prompt_s / LONG[1], output_token_s)


def objectives_at(speed: Speed) -> Objectives:
    return Objectives(
        ttft_p95_milliseconds=round(1000 * OF_ALONE * speed.long_prompt_s),
        inter_token_latency_p95_milliseconds=max(1, round(1000 * OF_ALONE * speed.gap_s)),
    )


def tuning_for(objectives: Objectives) -> Tuning:
    """Return spec.tuning with the defaults of the CRD."""
    given = {"model": {"uri": "hf://one/model"}, "tuning": {"mode": "Auto", "objectives": plain(objectives)}}
    return msgspec.convert(with_defaults(given)["tuning"], Tuning)


def prompt_share(speed: Speed, share: float) -> float:
    """Return what share of a replica's steps compute a whole chat prompt at this load, at least, if nothing cuts prompts.

    Below 0.05, most requests would meet an objective for the 95th percentile of their own gaps however long such steps were.
    The others are taken to be as short as that of one sequence alone, so there are not more of them.
    """
    rate, prompt_s = share / speed.cost_s(CHAT), (CHAT[0] + CHAT[1]) / 2 * speed.prompt_token_s
    others_per_s = max(0.0, 1.0 - rate * prompt_s) / speed.gap_s
    return rate / (rate + others_per_s)


def limits_of(name: str, speed: Speed) -> tuple[int, int]:
    """Return the max sequences and the token budget that a contender starts with."""
    num_in_time = (OF_ALONE - 1) * speed.gap_s / speed.prompt_token_s
    fixed = {
        "by-hand": (64, max(64, round(num_in_time))),
        "careful": (48, max(48, round(0.6 * num_in_time))),
        "fixed-64-512": (64, 512),
    }
    return fixed.get(name, VLLM_DEFAULTS)


def make_load(speed: Speed, share: float, phase_s: float, rng: random.Random) -> list[Ask]:
    """Return the requests of the three phases in order of time: ``share`` of what the replicas can compute."""
    kinds = {"chat": CHAT, "long": LONG, "batch": BATCH}
    found = []
    for index, (phase, mix) in enumerate(PHASES.items()):
        for name, part in mix.items():
            rate = NUM_REPLICAS * share * part / speed.cost_s(kinds[name])
            times = bursts(rate, phase_s) if name == "batch" else arrivals(rate, phase_s, rng)
            for at_s in times:
                least, most, fewest, longest = kinds[name]
                prompt = rng.choices(VOCABULARY, k=rng.randint(least, most))
                found.append(Ask(index * phase_s + at_s, phase, prompt, rng.randint(fewest, longest)))
    return sorted(found, key=lambda ask: ask.at_s)


def arrivals(rate: float, phase_s: float, rng: random.Random) -> Iterator[float]:
    at_s = rng.expovariate(rate)
    while at_s < phase_s:
        yield at_s
        at_s += rng.expovariate(rate)


def bursts(rate: float, phase_s: float) -> Iterator[float]:
    for number in range(int(phase_s / BURST_S)):
        yield from [number * BURST_S] * round(rate * BURST_S)


class Machine:
    """Times a fixed piece of work: bf16 products of 64 rows with weights of 128 MiB, on all cores."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self._rows = torch.randn(64, 2048, dtype=torch.bfloat16)
        self._weights = torch.randn(16, 2048, 2048, dtype=torch.bfloat16)
        self.seconds()

    def seconds(self) -> float:
        return statistics.median(self._once() for _ in range(7))

    def _once(self) -> float:
        started_s = time.perf_counter()
        for weight in self._weights:
            torch.mm(self._rows, weight)
        return time.perf_counter() - started_s


class Contender:
    """Two replicas and their clients, stopped unless it is their turn."""

    def __init__(self, name: str, task: Task, folder: Path) -> None:
        self._name, self._folder = name, folder
        folder.mkdir()
        (folder / "task.json").write_bytes(msgspec.json.encode(task))
        with (folder / "contender.log").open("wb") as log:
            words = ("contender", "serve", str(folder))
            self._own_time = OwnTime(*words, clock=folder / "paused", errors=log)

    def until_ready(self) -> None:
        assert self._own_time.process.stdout is not None and self._own_time.process.stdin is not None
        if self._own_time.process.stdout.readline() != b"ready\n":
            raise SystemExit(f"{self._name} did not start:\n{(self._folder / 'contender.log').read_text()[-2000:]}")
        self._own_time.process.stdin.write(b"go\n")
        self._own_time.stop()
        self._own_time.process.stdin.flush()

    def serve_for(self, seconds: float) -> None:
        self._own_time.go_on()
        time.sleep(seconds)
        self._own_time.stop()

    def finish(self) -> Outcome:
        """Wait until all requests have ended. Raises SystemExit if they do not."""
        self._own_time.go_on()
        code = self._own_time.process.wait(timeout=END_S)
        if code:
            raise SystemExit(f"{self._name} failed:\n{(self._folder / 'contender.log').read_text()[-2000:]}")
        return msgspec.json.decode((self._folder / "outcome.json").read_bytes(), type=Outcome)

    def kill(self) -> None:
        self._own_time.kill()


def take_turns(contenders: Mapping[str, Contender], num_slices: int) -> list[dict[str, float]]:
    """Give each contender its slices; return how long the fixed work took before each, by contender."""
    machine, names, found = Machine(), list(contenders), []
    for number in range(num_slices):
        first = number % len(names)
        found.append({})
        for name in names[first:] + names[:first]:
            found[-1][name] = round(machine.seconds(), 5)
            contenders[name].serve_for(SLICE_S)
        print(
            f"slice {number + 1} of {num_slices}: work {min(found[-1].values()):.3f} to "
            f"{max(found[-1].values()):.3f} s",
            flush=True,
        )
    return found


def run(arguments: argparse.Namespace, model: Path, folder: Path) -> dict[str, Any]:
    rng = random.Random(arguments.seed)
    speed = asyncio.run(measure_speed(model, folder, rng))
    objectives = objectives_at(speed)
    num_slices = len(PHASES) * max(1, round(60 * arguments.minutes / len(PHASES) / SLICE_S))
    load = make_load(speed, arguments.load, num_slices * SLICE_S / len(PHASES), rng)
    print(f"{speed}\n{objectives}\n{len(load)} requests", flush=True)
    print(
        f"at least {prompt_share(speed, arguments.load):.1%} of steps have a whole prompt, if nothing cuts it",
        flush=True,
    )
    tuning = tuning_for(objectives)
    names = arguments.contender or CONTENDERS
    contenders: dict[str, Contender] = {}
    try:
        for host, name in enumerate(names, start=2):
            task = Task(
                host=host,
                model=str(model),
                limits=limits_of(name, speed),
                objectives=objectives,
                tuning=tuning if name == AUTO else None,
                kill_at_s=num_slices * SLICE_S / 2,
                load=load,
            )
            contenders[name] = Contender(name, task, folder / name)
            contenders[name].until_ready()
        work_s = take_turns(contenders, num_slices)
        outcomes = {name: one.finish() for name, one in contenders.items()}
    finally:
        for one in contenders.values():
            one.kill()
    return {
        "settings": {
            **{name: getattr(arguments, name) for name in ("minutes", "load", "seed")},
            "flags": (*FLAGS, KV_CACHE),
            "slice_s": SLICE_S,
            "tuning": msgspec.to_builtins(tuning),
        },
        "speed_of_a_replica": asdict(speed),
        "steps_with_a_whole_prompt": round(prompt_share(speed, arguments.load), 4),
        "objectives": msgspec.to_builtins(objectives),
        "contenders": {
            name: {"start_limits": limits_of(name, speed)} | summary(load, one, objectives)
            for name, one in outcomes.items()
        },
        "outputs": outputs(load, outcomes, model, folder),
        "slices": slices(load, outcomes, objectives, work_s, SLICE_S),
    }


def outputs(load: Sequence[Ask], outcomes: Mapping[str, Outcome], model: Path, folder: Path) -> dict[str, Any]:
    """Compare the tokens of all contenders with the first one's. Where they part, both tokens must be as likely."""
    first = next(iter(outcomes))
    parted = {
        name: [
            (ask.prompt, one.token_ids, other.token_ids)
            for ask, one, other in zip(load, outcome.answers, outcomes[first].answers, strict=True)
            if not one.problem and not other.problem and one.token_ids != other.token_ids
        ]
        for name, outcome in outcomes.items()
        if name != first
    }
    chosen = [one for pairs in parted.values() for one in pairs[:MAX_PARTED]]
    gaps = asyncio.run(gaps_where_they_part(chosen, model, folder)) if chosen else []
    return {
        "compared_with": first,
        "answers_that_differ": {name: len(pairs) for name, pairs in parted.items()},
        "looked_at": len(chosen),
        "largest_logprob_difference_where_they_part": max(gaps, default=None),
    }


async def gaps_where_they_part(
    pairs: Sequence[tuple[list[int], list[int], list[int]]], model: Path, folder: Path
) -> list[float]:
    """Return how far apart the log probabilities of the two tokens are at which two answers part, for an idle replica.

    With bf16, sums depend on what else is in a batch; so of two tokens that are as likely, either may come first.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    one, found = pods_of(1)[0], []
    async with replica(one, model, VLLM_DEFAULTS, folder / "outputs.log"), new_session() as session:
        for prompt, left, right in pairs:
            same = next(index for index, both in enumerate(zip(left, right, strict=True)) if len(set(both)) > 1)
            asked = {"model": "m", "prompt": [*prompt, *left[:same]], "max_tokens": 1, "temperature": 0, "logprobs": 5}
            async with session.post(f"http://{one.ip}:{API_PORT}/v1/completions", json=asked) as response:
                (top,) = (await response.json())["choices"][0]["logprobs"]["top_logprobs"]
            chances = [top.get(tokenizer.decode([ids[same]]), min(top.values()) - 1) for ids in (left, right)]
            found.append(round(abs(chances[0] - chances[1]), 4))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15.0, help="of load, for each contender")
    parser.add_argument("--load", type=float, default=0.7, help="share of what the replicas can compute")
    parser.add_argument("--contender", action="append", choices=CONTENDERS, help="default: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--chart", metavar="FILE.svg")
    parser.add_argument("--result", default="closed_loop", metavar="NAME", help="(default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="for logs and recorded decisions; default: a temporary one")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no stopped process is left behind
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        result = run(arguments, make_checkpoint(folder, "small"), folder)
    result["verdicts"] = verdicts(result)
    show(result)
    save(arguments.result, result)
    if arguments.chart:
        draw(result, arguments.chart)


if __name__ == "__main__":
    main()
