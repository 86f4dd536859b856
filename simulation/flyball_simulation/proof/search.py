"""The best fixed limits of a cell: all of the grid is tried."""

from pathlib import Path

import msgspec
from msgspec import Struct

from flyball_simulation import oracle
from flyball_simulation.oracle import Limits
from flyball_simulation.proof import contenders
from flyball_simulation.proof.cells import Cell
from flyball_simulation.world import share_good

SINGLES: tuple[Limits, ...] = ((256, 384), (256, 256), (256, 512), (128, 192))
"""The candidates for the best single limits over all cells; a search begins with them, since the best are often near."""


class Found(Struct, frozen=True, kw_only=True):
    """What a search found.

    Attributes:
        best: the best limits; of equally good ones, those that were tried first.
        tried: limits with their shares of good requests: the candidates for the single limits, and what was better.
    """

    best: Limits
    tried: list[tuple[Limits, float]]

    @property
    def shares(self) -> dict[Limits, float]:
        return dict(self.tried)


def find(cell: Cell, seed: int, folder: Path, near: Limits | None = None) -> Found:
    """Find the best fixed limits, or take them from ``folder``.

    Args:
        near: limits that are tried early, such as the best of another seed.
    """
    path = _path(cell, seed, folder)
    if not path.exists():
        shares = try_all(cell, seed, folder, near)
        contenders.keep(path, Found(best=max(shares, key=shares.__getitem__), tried=list(shares.items())))
    return _found_at(path)


def found(cell: Cell, seed: int, folder: Path) -> Found | None:
    """Return what was found before; None if nothing was."""
    path = _path(cell, seed, folder)
    return _found_at(path) if path.exists() else None


def try_all(cell: Cell, seed: int, folder: Path, near: Limits | None = None) -> dict[Limits, float]:
    """Return the shares of the candidates for the single limits, and of all others that were better than what was tried before.

    Nothing that could be better is left out. A run is given up once it cannot be better than the best one any more. And
    where fewer sequences ran at once than the limit allows, other limits above what ran make the very same run.
    """
    early = SINGLES if near is None else dict.fromkeys((*SINGLES, near))
    shares = {one: _share(cell, one, seed, folder) for one in early}
    workload = cell.workload(seed)
    most_running: dict[int, int] = {}  # by tokens, in runs with more sequences
    for seqs, tokens in cell.grid or oracle.grid():
        if (seqs, tokens) in shares or seqs > most_running.get(tokens, seqs):
            continue
        num_bad = round((1.0 - max(shares.values())) * len(workload))
        world = oracle.world_of(cell.setup, workload, (seqs, tokens), seed, num_bad - 1)
        world.run()
        most_running[tokens] = world.most_running
        if not world.was_given_up:
            shares[seqs, tokens] = share_good(world.outcomes(), cell.setup.objectives)
    return shares


def _found_at(path: Path) -> Found:
    return msgspec.json.decode(path.read_bytes(), type=Found)


def _path(cell: Cell, seed: int, folder: Path) -> Path:
    return folder / f"{contenders.key(cell, contenders.SEARCH, seed, None)}.json"


def _share(cell: Cell, limits: Limits, seed: int, folder: Path) -> float:
    return contenders.cached(cell, contenders.FIXED, seed, limits, folder).share_good
