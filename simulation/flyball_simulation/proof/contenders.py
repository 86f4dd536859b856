"""Who takes part, and what is kept of a run."""

import hashlib
import os
import time
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

FIXED = "fixed"
"""The contender of a run under fixed limits, whatever they stand for: one run serves all that take these limits."""

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
    """What is kept of a run.

    Attributes:
        cpu_s: that it took to simulate.
    """

    cell: str
    contender: str
    seed: int
    limits: oracle.Limits | None = None
    share_good: float
    goodput_per_s: float
    num_requests: int
    num_failed: int
    num_changes: int
    num_steps: int
    cpu_s: float
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
    started_s = time.process_time()
    result = simulate(setup, workload, controller, label=contender, seed=seed, duration_s=cell.seconds)
    return kept(cell, contender, seed, result, limits, time.process_time() - started_s)


def cached(cell: Cell, contender: str, seed: int, limits: oracle.Limits | None, folder: Path) -> Run:
    """Run a contender on a cell, or take the run from ``folder``."""
    found = known(cell, contender, seed, limits, folder)
    if found is None:
        found = run(cell, contender, seed, limits)
        keep(folder / f"{key(cell, contender, seed, limits)}.json", found)
    return found


def share_unless_worse(cell: Cell, limits: oracle.Limits, seed: int, than: float) -> float:
    """Return the share of good requests under fixed limits; a run that is worse than others is given up."""
    workload = cell.workload(seed)
    most = round((1.0 - than) * len(workload))
    result = oracle.run_static(cell.setup, workload, limits, seed, cell.seconds, most)
    return min(result.share_good, than) if result.num_requests < len(workload) else result.share_good


def known(cell: Cell, contender: str, seed: int, limits: oracle.Limits | None, folder: Path) -> Run | None:
    """Return a run that ``folder`` has, else None."""
    path = folder / f"{key(cell, contender, seed, limits)}.json"
    return msgspec.json.decode(path.read_bytes(), type=Run) if path.exists() else None


def keep(path: Path, value: Struct) -> None:
    """Write a file that is whole or not there."""
    half = path.with_suffix(f".{os.getpid()}")
    half.write_bytes(msgspec.json.encode(value))
    half.replace(path)


def kept(cell: Cell, contender: str, seed: int, result: Result, limits: oracle.Limits | None, cpu_s: float) -> Run:
    return Run(
        cell=cell.name,
        contender=contender,
        seed=seed,
        limits=limits,
        cpu_s=round(cpu_s, 2),
        **{
            name: getattr(result, name)
            for name in Run.__struct_fields__
            if name not in ("cell", "contender", "seed", "limits", "cpu_s")
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


_PROTOCOL, _RUNTIME, _OPERATOR, _SIMULATION = (
    Path(one.__file__ or "").parent for one in (flyball_protocol, flyball_runtime, flyball_operator, flyball_simulation)
)
_PARTS = ("core", "engine", "governor", "kv_cache", "scheduler")
SERVING = (_PROTOCOL, _SIMULATION, *(_RUNTIME / part for part in _PARTS))
TUNING = (_OPERATOR / "spec", _OPERATOR / "tuning")


@cache
def code_version(fixed: bool = False) -> str:
    """Return a digest of all code that a run depends on: what was computed by other code is computed again.

    The cells are part of each run's key; how a proof is put together from runs changes none of them.

    Args:
        fixed: of a run in which the operator's tuner has no part.
    """
    digest = hashlib.sha256()
    for folder in (*SERVING, *(() if fixed else TUNING)):
        for path in sorted(folder.rglob("*.py")):
            if "proof" not in path.parts:
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def key(cell: Cell, contender: str, seed: int, limits: oracle.Limits | None) -> str:
    """Return the name under which a run is cached."""
    version = code_version(contender != "auto")
    content = msgspec.json.encode((version, cell, contender, seed, limits))
    return hashlib.sha256(content).hexdigest()[:24]
