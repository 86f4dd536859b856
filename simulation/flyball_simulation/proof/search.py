"""The best fixed limits of a cell: the whole grid, or uphill in it from a few places.

Goodput is smooth in both limits. Too many tokens a step make gaps too long, too few make prompts wait; more sequences help
until they are more than ever run, or until the KV cache is full. So the best limits are found in a dozen runs rather than 76.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from flyball_simulation import oracle
from flyball_simulation.oracle import SEQS, TOKENS, Limits
from flyball_simulation.proof import contenders
from flyball_simulation.proof.cells import Cell

STARTS: tuple[Limits, ...] = ((256, 384), (256, 256), (256, 512), (128, 192))
"""Where every search begins; these are the candidates for the best single limits too."""

ENOUGH = 0.9995
"""From this share on nothing better is looked for."""


class Found(Struct, frozen=True, kw_only=True):
    """What a search found.

    Attributes:
        best: the best limits.
        tried: limits with their shares of good requests; where they are worse than others, up to when that was clear.
    """

    best: Limits
    tried: list[tuple[Limits, float]]

    @property
    def shares(self) -> dict[Limits, float]:
        return dict(self.tried)


def singles(exhaustive: bool) -> list[Limits]:
    """Return the candidates for the best single fixed limits over all cells."""
    if exhaustive:
        return [(seqs, tokens) for seqs in (64, 256) for tokens in (128, 192, 256, 384, 512, 768) if tokens >= seqs]
    return list(STARTS)


def find(cell: Cell, seed: int, folder: Path, exhaustive: bool) -> Found:
    """Find the best fixed limits, or take them from ``folder``."""
    path = _path(cell, seed, folder, exhaustive)
    if path.exists():
        return msgspec.json.decode(path.read_bytes(), type=Found)
    shares = _whole(cell, seed, folder, exhaustive) if exhaustive or cell.grid else _uphill(cell, seed, folder)
    best = max(shares, key=shares.__getitem__)
    contenders.keep(path, Found(best=best, tried=list(shares.items())))
    return found_at(path)


def found(cell: Cell, seed: int, folder: Path, exhaustive: bool) -> Found | None:
    """Return what was found before; None if nothing was."""
    path = _path(cell, seed, folder, exhaustive)
    return found_at(path) if path.exists() else None


def found_at(path: Path) -> Found:
    return msgspec.json.decode(path.read_bytes(), type=Found)


def _path(cell: Cell, seed: int, folder: Path, exhaustive: bool) -> Path:
    name = "search-exhaustive" if exhaustive else "search"
    return folder / f"{contenders.key(cell, name, seed, None)}.json"


def _whole(cell: Cell, seed: int, folder: Path, exhaustive: bool) -> dict[Limits, float]:
    """Try all; runs that cannot become the best are given up, so candidates for the single limits run by themselves."""
    shares = {one: _share(cell, one, seed, folder) for one in singles(exhaustive)}
    tried = oracle.sweep(
        cell.setup, cell.workload(seed), cell.grid or oracle.grid(), seed=seed, duration_s=cell.seconds, num_processes=1
    )
    whole = {(one.max_num_seqs, one.max_num_batched_tokens): one.share_good for one in tried if not one.given_up}
    fewest_first = sorted({**whole, **shares}.items(), key=lambda one: (one[0][1], one[0][0]))
    return dict(fewest_first)  # of equally good limits the smallest token budget is taken, then the fewest sequences


def _uphill(cell: Cell, seed: int, folder: Path) -> dict[Limits, float]:
    shares = {one: _share(cell, one, seed, folder) for one in singles(False)}
    while True:
        best = max(shares, key=shares.__getitem__)  # of equally good ones the first: there is no hill there
        ahead = [one for one in _neighbours(best) if one not in shares]
        if shares[best] >= ENOUGH or not ahead:
            return shares
        shares[ahead[0]] = contenders.share_unless_worse(cell, ahead[0], seed, than=shares[best])


def _neighbours(limits: Limits) -> Iterator[Limits]:
    """Yield the next places in the grid, those of another token budget first."""
    seqs, tokens = SEQS.index(limits[0]), TOKENS.index(limits[1])
    for at_seqs, at_tokens in ((seqs, tokens + 1), (seqs, tokens - 1), (seqs - 1, tokens), (seqs + 1, tokens)):
        if 0 <= at_seqs < len(SEQS) and 0 <= at_tokens < len(TOKENS) and SEQS[at_seqs] <= TOKENS[at_tokens]:
            yield SEQS[at_seqs], TOKENS[at_tokens]


def _share(cell: Cell, limits: Limits, seed: int, folder: Path) -> float:
    return contenders.cached(cell, contenders.FIXED, seed, limits, folder).share_good
