"""Who takes part, and what is kept of a run."""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import msgspec
from msgspec import Struct, structs

import flyball_operator
import flyball_protocol
import flyball_runtime
import flyball_simulation
from flyball_operator.spec import Tuning
from flyball_operator.spec.manifest import parse
from flyball_simulation import oracle
from flyball_simulation.controllers import Aimd, Auto, Controller, Rules, Static
from flyball_simulation.plant import PROFILES
from flyball_simulation.proof.cells import Cell
from flyball_simulation.result import Bin, Bounds, Change, Result
from flyball_simulation.world import Setup, simulate

TUNERS: dict[str, Callable[[Tuning], Controller]] = {
    "auto": lambda tuning: Auto(tuning, "proof"),
    "rules": Rules,
    "aimd": Aimd,
}

SINGLES: tuple[oracle.Limits, ...] = tuple(
    (seqs, tokens) for seqs in (64, 256) for tokens in (128, 192, 256, 384, 512, 768) if tokens >= seqs
)
"""Candidates for the best single fixed limits over the suite."""

_MANIFEST = """
apiVersion: flyball.dev/v1alpha1
kind: LLMDeployment
metadata: {{name: proof}}
spec:
  model: {{uri: "hf://proof/model"}}
  tuning:
    mode: Auto
    objectives: {{ttftP95Milliseconds: {ttft_ms}, interTokenLatencyP95Milliseconds: {itl_ms}}}
"""


class Run(Struct, frozen=True, kw_only=True):
    """What is kept of a run."""

    cell: str
    contender: str
    seed: int
    limits: oracle.Limits | None = None
    share_good: float
    goodput_per_s: float
    num_requests: int
    num_failed: int
    num_changes: int
    num_decisions: int
    num_replayed: int
    ttft_p95_s: float | None
    itl_p95_s: float | None
    changes: list[Change]
    timeline: list[Bin]


def tuning_for(objectives: Bounds) -> Tuning:
    """Return ``spec.tuning`` as a manifest that says nothing but the objectives has it."""
    ttft_ms, itl_ms = (round(1000 * (value or 1e6)) for value in (objectives.ttft_s, objectives.itl_s))
    text = _MANIFEST.format(ttft_ms=ttft_ms, itl_ms=itl_ms)
    return parse(text, source="the proof", base=Path("/"))[0].spec.tuning


def run(cell: Cell, contender: str, seed: int, limits: oracle.Limits | None = None) -> Run:
    """Run a contender on a cell: a tuner by name, ``vllm-default``, or anything else under fixed limits."""
    workload = cell.workload(seed)
    setup, controller = _start(cell.setup, contender, limits)
    result = simulate(setup, workload, controller, label=contender, seed=seed, duration_s=cell.seconds)
    return kept(cell, contender, seed, result, limits)


def find_best(cell: Cell, seed: int) -> oracle.Limits:
    """Return the best fixed limits of the cell's grid."""
    tried = oracle.sweep(
        cell.setup, cell.workload(seed), cell.grid or oracle.grid(), seed=seed, duration_s=cell.seconds, num_processes=1
    )
    return oracle.best(tried)


def kept(cell: Cell, contender: str, seed: int, result: Result, limits: oracle.Limits | None) -> Run:
    return Run(
        cell=cell.name,
        contender=contender,
        seed=seed,
        limits=limits,
        **{
            name: getattr(result, name)
            for name in Run.__struct_fields__
            if name not in ("cell", "contender", "seed", "limits")
        },
    )


def _start(setup: Setup, contender: str, limits: oracle.Limits | None) -> tuple[Setup, Controller]:
    if limits is not None:
        fixed = structs.replace(setup, max_num_seqs=limits[0], max_num_batched_tokens=limits[1], prior=None)
        return fixed, Static()
    if contender == "vllm-default":
        profile = PROFILES[setup.name]
        fixed = structs.replace(
            setup,
            max_num_seqs=profile.vllm_max_num_seqs,
            max_num_batched_tokens=profile.vllm_max_num_batched_tokens,
            prior=None,
        )
        return fixed, Static()
    return setup, TUNERS[contender](tuning_for(setup.objectives))


@cache
def code_version() -> str:
    """Return a digest of all code that a run depends on: what was computed by other code is computed again."""
    digest = hashlib.sha256()
    for package in (flyball_protocol, flyball_runtime, flyball_operator, flyball_simulation):
        folder = Path(package.__file__ or "").parent
        for path in sorted(folder.rglob("*.py")):
            if "proof" not in path.parts:
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def key(cell: Cell, contender: str, seed: int, limits: oracle.Limits | None) -> str:
    """Return the name under which a run is cached."""
    content = msgspec.json.encode((code_version(), cell, contender, seed, limits))
    return hashlib.sha256(content).hexdigest()[:24]
