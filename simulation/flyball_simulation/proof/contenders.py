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

SEARCH = "search"
"""What stands for the contender in the key of a search for the best fixed limits."""

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


def known(cell: Cell, contender: str, seed: int, limits: oracle.Limits | None, folder: Path) -> Run | None:
    """Return a run that ``folder`` has, else None."""
    path = folder / f"{key(cell, contender, seed, limits)}.json"
    if not path.exists():
        return None
    return structs.replace(msgspec.json.decode(path.read_bytes(), type=Run), cell=cell.name)


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
    if contender == "vllm-default":
        profile = PROFILES[setup.name]
        limits = profile.vllm_max_num_seqs, profile.vllm_max_num_batched_tokens
    if limits is not None:
        return oracle.fixed(setup, limits), Static()
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
            if "proof" not in path.relative_to(folder).parts:
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def key(cell: Cell, contender: str, seed: int, limits: oracle.Limits | None) -> str:
    """Return the name under which a run is cached. Cells that differ by name or prior alone are one under fixed limits."""
    version = code_version(contender != "auto")
    if limits is not None or contender in ("vllm-default", SEARCH):
        cell = structs.replace(cell, name="", setup=structs.replace(cell.setup, prior=None))
    content = msgspec.json.encode((version, cell, contender, seed, limits))
    return hashlib.sha256(content).hexdigest()[:24]
