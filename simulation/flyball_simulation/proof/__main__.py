"""``python -m flyball_simulation.proof``: run the matrix and the scenarios, write docs/tuning-proof.md.

``--tuners`` writes docs/tuning-proof-tuners.md instead, which needs no search for the oracle: a quarter of the time.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from itertools import repeat
from pathlib import Path

from flyball_simulation.proof import cells, contenders, matrix, page, scenarios
from flyball_simulation.proof.cells import Cell
from flyball_simulation.proof.scenarios import Verdict


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    wanted = [cell for cell in _cells(args) if args.only is None or args.only in cell.name]
    if not wanted:
        print(f"no cell has {args.only!r} in its name", file=sys.stderr)
        return 2
    if args.tuners:
        _write_tuners(args, wanted)
        return 0
    told = [] if args.smoke or args.only else scenarios.scenarios()
    plan = _plan(args)
    matrix.compute(wanted, plan._replace(seeds=plan.seeds[:1]))  # the most telling runs first, if not all get done
    verdicts = _judge(told, plan)
    done = matrix.compute(wanted, plan)
    args.output.mkdir(parents=True, exist_ok=True)
    written = page.write(args.output, done, told, verdicts, _source(args))
    print(f"wrote {written}", file=sys.stderr)
    return 0


def _write_tuners(args: argparse.Namespace, wanted: Sequence[Cell]) -> None:
    plan = _plan(args)
    done = matrix.compute_tuners(wanted, plan._replace(others=plan.seeds))
    args.output.mkdir(parents=True, exist_ok=True)
    print(f"wrote {page.write_tuners(args.output, done, _source(args))}", file=sys.stderr)


def _source(args: argparse.Namespace) -> page.Source:
    return page.Source(_command(args), args.commit or _commit(), contenders.code_version())


def _plan(args: argparse.Namespace) -> matrix.Plan:
    num_seeds = args.seeds or (5 if args.full else 3)
    seeds = (cells.SEEDS if args.development else cells.HELD_OUT_SEEDS)[:num_seeds]
    return matrix.Plan(
        seeds=seeds,
        others=seeds if args.full else seeds[:1],
        folder=args.cache,
        processes=args.processes,
        cached=args.cached,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m flyball_simulation.proof", description=__doc__)
    parser.add_argument(
        "--full",
        action="store_true",
        help="5 seeds for everybody; else 3, and one for the other tuners",
    )
    parser.add_argument("--seeds", type=int, choices=range(1, 6), help="how many")
    parser.add_argument(
        "--development", action="store_true", help="take the seeds for work on the tuner, not those that are held out"
    )
    parser.add_argument(
        "--tuners",
        action="store_true",
        help="run those that set limits themselves, and vLLM's defaults, with as many seeds each; no oracle, no scenarios",
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
    parser.add_argument(
        "--cached",
        action="store_true",
        help="run nothing; write the page from the runs that are there, and name the rest",
    )
    parser.add_argument("--commit", metavar="ID", help="named on the page (default: what git says)")
    parser.add_argument("--processes", type=int, metavar="N", help="(default: one for each core)")
    return parser


def _command(args: argparse.Namespace) -> str:
    """Return the command, without what changes no figure and without the folders of this machine."""
    words = {
        "--tuners": args.tuners,
        "--full": args.full,
        f"--seeds {args.seeds}": args.seeds,
        "--development": args.development,
        "--smoke": args.smoke,
        f"--only {args.only}": args.only,
        "--traces FOLDER": args.traces,
    }
    given = " ".join(word for word, is_given in words.items() if is_given)
    return f"make proof PROOF='{given}'" if given else "make proof"


def _commit() -> str:
    """Return the commit of the code; "" where there is no repository."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()


def _cells(args: argparse.Namespace) -> list[Cell]:
    if args.smoke:
        return cells.smoke()
    return [*cells.matrix(), *(cells.held_out(args.traces) if args.traces is not None else [])]


def _judge(told: Sequence[scenarios.Scenario], plan: matrix.Plan) -> dict[tuple[str, str], Verdict]:
    """Run the scenarios with the tuner and with the first one."""
    if told and not plan.cached:
        places = [(place, who) for who in ("auto", "rules") for place in range(len(told))]
        with matrix.processes(plan) as pool:
            list(pool.map(scenarios.run, *zip(*places, strict=True), repeat(plan.seeds[0]), repeat(plan.folder)))
    found = {}
    for one in told:
        for who in ("auto", "rules"):
            run = contenders.known(one.cell, who, plan.seeds[0], None, plan.folder)
            if run is not None:
                found[one.name, who] = one.judge(run, one.cell)
    return found


if __name__ == "__main__":
    sys.exit(main())
