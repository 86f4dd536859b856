"""``python -m flyball_simulation.proof``: run the matrix and the scenarios, write docs/tuning-proof.md."""

import argparse
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import msgspec

from flyball_simulation.proof import cells, contenders, matrix, page, scenarios
from flyball_simulation.proof.cells import Cell
from flyball_simulation.proof.scenarios import Verdict


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    wanted = [cell for cell in _cells(args) if args.only is None or args.only in cell.name]
    if not wanted:
        print(f"no cell has {args.only!r} in its name", file=sys.stderr)
        return 2
    seeds = (cells.SEEDS if args.development else cells.HELD_OUT_SEEDS)[: args.seeds]
    done = matrix.compute(wanted, seeds, args.cache, args.processes)
    told = [] if args.smoke or args.only else scenarios.scenarios()
    verdicts = _judge(told, seeds[0], args.cache, args.processes)
    args.output.mkdir(parents=True, exist_ok=True)
    words = " ".join(sys.argv[1:] if argv is None else argv)
    written = page.write(
        args.output, done, told, verdicts, version=contenders.code_version(), command=f"make proof PROOF='{words}'"
    )
    print(f"wrote {written}", file=sys.stderr)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m flyball_simulation.proof", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, choices=range(1, 6), help="how many (default: %(default)s)")
    parser.add_argument(
        "--development", action="store_true", help="take the seeds for work on the tuner, not those that are held out"
    )
    parser.add_argument("--smoke", action="store_true", help="two small cells, in seconds")
    parser.add_argument("--only", metavar="TEXT", help="cells with this in their names; no scenarios")
    parser.add_argument("--traces", type=Path, metavar="FOLDER", help="with the recorded traces that are held out")
    parser.add_argument("--output", type=Path, default=Path("docs"), metavar="FOLDER", help="(default: %(default)s)")
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path("out/proof"),
        metavar="FOLDER",
        help="runs that are done (default: %(default)s)",
    )
    parser.add_argument("--processes", type=int, metavar="N", help="(default: one for each core)")
    return parser


def _cells(args: argparse.Namespace) -> list[Cell]:
    if args.smoke:
        return cells.smoke()
    return [*cells.matrix(), *(cells.held_out(args.traces) if args.traces is not None else [])]


def _judge(
    told: Sequence[scenarios.Scenario], seed: int, cache: Path, processes: int | None
) -> dict[tuple[str, str], Verdict]:
    """Run the scenarios with the tuner and with the first one."""
    pairs = [(place, who) for place in range(len(told)) for who in ("auto", "rules")]
    if not pairs:
        return {}
    with ProcessPoolExecutor(processes or len(os.sched_getaffinity(0)), mp_context=get_context("spawn")) as pool:
        found = pool.map(_verdict, *zip(*((place, who, seed, cache) for place, who in pairs), strict=True))
        return {(told[place].name, who): verdict for (place, who), verdict in zip(pairs, found, strict=True)}


def _verdict(place: int, who: str, seed: int, cache: Path) -> Verdict:
    scenario = scenarios.scenarios()[place]
    path = cache / f"{contenders.key(scenario.cell, who, seed, None)}.json"
    if path.exists():
        run = msgspec.json.decode(path.read_bytes(), type=contenders.Run)
    else:
        run = contenders.run(scenario.cell, who, seed)
        path.write_bytes(msgspec.json.encode(run))
    return scenario.judge(run, scenario.cell)


if __name__ == "__main__":
    sys.exit(main())
