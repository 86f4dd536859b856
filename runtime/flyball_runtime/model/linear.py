"""Weights of a model: where they are, what they are called in a checkpoint, and the layers made of them."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flyball_kernels.backend import Backend
from flyball_kernels.linear import PackedLinear
from flyball_kernels.rms_norm import add_rms_norm, rms_norm

Destinations = Iterator[tuple[str, Tensor]]
"""Tensor names of a checkpoint, and where their values go."""


@dataclass(frozen=True)
class Place:
    """Where the tensors of a model are, and what computes with them."""

    dtype: torch.dtype
    device: torch.device
    backend: Backend

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)


class FusedLinear:
    """Several projections of the same input (q, k and v; gate and up) computed by one matmul.

    The checkpoint's tensors are rows of one buffer, so loading fills it in place. ``pack`` must be called once the
    weights are in; from then on the layer can be called.

    Args:
        parts: out_features of each projection by its name in the checkpoint, in the order of the output.
    """

    def __init__(self, in_features: int, parts: dict[str, int], *, bias: bool, place: Place) -> None:
        out_features = sum(parts.values())
        self._parts = parts
        self._backend = place.backend
        self._weight: Tensor | None = place.empty(out_features, in_features)
        self._bias = place.empty(out_features) if bias else None
        self._packed: PackedLinear | None = None

    def destinations(self, prefix: str) -> Destinations:
        """Names in the checkpoint, and the rows that each tensor is to be copied into."""
        for kind, buffer in (("weight", self._weight), ("bias", self._bias)):
            if buffer is not None:
                for name, rows in zip(self._parts, buffer.split(list(self._parts.values())), strict=True):
                    yield f"{prefix}{name}.{kind}", rows

    def pack(self) -> None:
        """Give the weights the layout that is fastest on their device; the buffer that was filled is let go."""
        assert self._weight is not None, "packed twice"
        self._packed = PackedLinear(self._weight, self._bias, backend=self._backend)
        self._weight = self._bias = None

    def __call__(self, x: Tensor) -> Tensor:
        assert self._packed is not None, "called before pack"
        return self._packed(x)


class Norm:
    """RMSNorm of the last dimension.

    Args:
        offset: added to the weights: 1 where a checkpoint has them relative to one (Gemma).
    """

    def __init__(self, size: int, *, eps: float, offset: float, place: Place) -> None:
        self.weight = place.empty(size)
        self._eps, self._offset, self._backend = eps, offset, place.backend

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self._eps, offset=self._offset, backend=self._backend)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the norm of the sum, and the sum."""
        if residual is None:
            return self(x), x
        return add_rms_norm(x, residual, self.weight, self._eps, offset=self._offset, backend=self._backend)
