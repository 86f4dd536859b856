"""Which layers share a block table: those that attend to equally many tokens. No torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

SIMILAR = 1.25
"""Kinds of layers whose numbers differ by less are not split further; some tensors of the smaller ones stay unused."""


def most_blocks(window: int | None, num_tokens: int, num_step_tokens: int, block_size: int) -> int:
    """Return how many blocks of a group a sequence of ``num_tokens`` holds at most.

    Args:
        window: the group's; None is all.
        num_step_tokens: most tokens of it that are computed in one step. What lies behind the window after it is given back.
    """
    num_blocks = -(-num_tokens // block_size)
    if window is None:
        return num_blocks
    return min(num_blocks, -(-(window + num_step_tokens) // block_size) + 1)


@dataclass(frozen=True)
class KVGroup:
    """Layers with one block table.

    Attributes:
        window: how many of the latest tokens they attend to, the query's own included; None is all.
        layers: their indices.
    """

    window: int | None
    layers: tuple[int, ...]


@dataclass(frozen=True)
class KVLayout:
    """How layers are laid over KV blocks.

    A block holds ``block_size`` tokens of one group, so it costs the same memory whoever takes it, and all groups take from
    one pool. The i-th layer of each group uses the i-th pair of tensors (after vLLM's hybrid KV cache manager).

    Attributes:
        num_tensors: pairs of K and V tensors, as many as the largest group has layers.
    """

    groups: tuple[KVGroup, ...]
    num_tensors: int

    @classmethod
    def of(cls, windows: Sequence[int | None], max_model_len: int) -> "KVLayout":
        """Group layers by their windows; one that no sequence outgrows is none."""
        kinds: dict[int | None, list[int]] = {}
        for layer, window in enumerate(windows):
            reach = None if window is None or window >= max_model_len else window
            kinds.setdefault(reach, []).append(layer)
        fewest, most = (pick(map(len, kinds.values())) for pick in (min, max))
        size = most if most < SIMILAR * fewest else fewest
        groups = [
            KVGroup(window, tuple(layers[start : start + size]))
            for window, layers in kinds.items()
            for start in range(0, len(layers), size)
        ]
        return cls(tuple(groups), size)

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(group.window for group in self.groups)

    @cached_property
    def places(self) -> list[tuple[int, int]]:
        """By layer, its group and which of the tensors it uses."""
        places = {
            layer: (index, at) for index, group in enumerate(self.groups) for at, layer in enumerate(group.layers)
        }
        return [places[layer] for layer in range(len(places))]


def longest_reach(windows: Sequence[int | None]) -> int:
    """Return the first of the layers that attend to the most tokens."""
    reaches = [math.inf if window is None else window for window in windows]
    return reaches.index(max(reaches))
