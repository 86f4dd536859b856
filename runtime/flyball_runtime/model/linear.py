"""Weights of a model: where they are, what they are called in a checkpoint, and the layers made of them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from flyball_kernels.backend import Backend
from flyball_kernels.linear import Int4Linear, Int8Linear, PackedLinear, Rounded
from flyball_kernels.rms_norm import add_rms_norm, rms_norm
from flyball_runtime.core.quantization import UNQUANTIZED, Quantization, Stored
from flyball_runtime.model.packed_weights import PackedWeights, joined

Destinations = Iterator[tuple[str, Tensor]]
"""Tensor names of a checkpoint, and where their values go."""


Linear = PackedLinear | Int8Linear | Int4Linear

SCALE = "weight_scale"
"""What compressed-tensors calls the scales of a weight, ``[out_features, 1]``."""


@dataclass(frozen=True)
class Place:
    """Where the tensors of a model are, and what computes with them.

    Attributes:
        quantization: how linear layers compute.
        stored: how the checkpoint has their weights. What is quantized there is computed so.
    """

    dtype: torch.dtype
    device: torch.device
    backend: Backend
    quantization: Quantization = "none"
    stored: Stored = UNQUANTIZED

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def unrounded(self) -> "Place":
        """Return the place for what is never rounded, nor stored so."""
        return replace(self, quantization="none", stored=UNQUANTIZED)

    def of_head(self) -> "Place":
        """Return the place for the output layer: quantized checkpoints leave it out, and 4 bits would be too few for it."""
        if self.stored != UNQUANTIZED:
            return self.unrounded()
        return replace(self, quantization="int8") if self.quantization == "int4" else self

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Return a layer of these weights, which it takes over, rounded if that is asked for."""
        if self.quantization == "int8":
            return Int8Linear(weight, bias, backend=self.backend)
        if self.quantization == "int4":
            return Int4Linear(weight, bias, backend=self.backend)
        return PackedLinear(weight, bias, backend=self.backend)


class LowRank(NamedTuple):
    """What an adapter adds to a projection: ``up(down(x))``, in these columns of its layer's output."""

    columns: slice
    down: PackedLinear
    up: PackedLinear


Adaptation = Mapping["FusedLinear", Sequence[LowRank]]
"""What an adapter adds to a model."""


@dataclass(frozen=True, slots=True)
class AdaptedTokens:
    """The tokens of a step that one adapter is for.

    Attributes:
        indices: ``[num_adapted]`` int64, of the tokens among the step's; None for all.
    """

    indices: Tensor | None
    adaptation: Adaptation

    def add(self, layer: "FusedLinear", x: Tensor, out: Tensor) -> None:
        """Add to ``out``, the layer's output for ``x``, what the adapter makes of these tokens; other rows stay as they are."""
        parts = self.adaptation.get(layer)
        if not parts:
            return
        if self.indices is None:
            for columns, down, up in parts:
                out[:, columns] += up(down(x))
            return
        adapted = x.index_select(0, self.indices)
        for columns, down, up in parts:
            out[:, columns].index_add_(0, self.indices, up(down(adapted)))


AdaptedStep = Sequence[AdaptedTokens]
"""All that adapters change in a step. No token is in two of them."""


class Projection(NamedTuple):
    """A projection that an adapter may change: its layer, where in the layer's output it is, and the size of its input."""

    layer: "FusedLinear"
    columns: slice
    in_features: int


class FusedLinear:
    """Several projections of the same input (q, k and v; gate and up) computed by one matmul.

    The checkpoint's tensors are rows of one buffer, so loading fills it in place. ``pack`` must be called once the
    weights are in; from then on the layer can be called.

    Args:
        parts: out_features of each projection by its name in the checkpoint, in the order of the output.
        exact: whether the weights are never rounded further.
    """

    def __init__(
        self, in_features: int, parts: dict[str, int], *, bias: bool, place: Place, exact: bool = False
    ) -> None:
        out_features = sum(parts.values())
        self._parts = parts
        self._in_features = in_features
        self._place = place.unrounded() if exact else place
        self._scales: Tensor | None = None
        self._weight: Tensor | None = None
        self._packed_weights: dict[str, PackedWeights] = {}
        if (packing := self._place.stored.packing) is not None:
            self._packed_weights = {
                name: PackedWeights(packing, in_features, size, place.device) for name, size in parts.items()
            }
        elif self._place.stored.quantization == "int8":
            self._scales = torch.empty(out_features, 1, device=place.device)
            self._weight = torch.empty(out_features, in_features, dtype=torch.int8, device=place.device)
        else:
            self._weight = place.empty(out_features, in_features)
        self._bias = place.empty(out_features) if bias else None
        self._packed: Linear | None = None

    def destinations(self, prefix: str) -> Destinations:
        """Names in the checkpoint, and where each tensor is to be copied to."""
        for name, packed in self._packed_weights.items():
            for kind, tensor in packed.tensors.items():
                yield f"{prefix}{name}.{kind}", tensor
        for kind, buffer in (("weight", self._weight), (SCALE, self._scales), ("bias", self._bias)):
            if buffer is not None:
                for name, rows in zip(self._parts, buffer.split(list(self._parts.values())), strict=True):
                    yield f"{prefix}{name}.{kind}", rows

    def projections(self, prefix: str) -> Iterator[tuple[str, Projection]]:
        """Yield the projections by name."""
        start = 0
        for name, size in self._parts.items():
            yield f"{prefix}{name}", Projection(self, slice(start, start + size), self._in_features)
            start += size

    def pack(self) -> None:
        """Give the weights the layout that is fastest on their device; the buffer that was filled is let go."""
        place = self._place
        if self._packed_weights:
            grouped = joined([one.unpack(name) for name, one in self._packed_weights.items()])
            self._packed = Int4Linear(grouped, self._bias, backend=place.backend, dtype=place.dtype)
            self._packed_weights, self._bias = {}, None
            return
        assert self._weight is not None, "packed twice"
        if self._scales is None:
            self._packed = place.linear(self._weight, self._bias)
        else:
            rounded = Rounded(self._weight, self._scales[:, 0])
            self._packed = Int8Linear(rounded, self._bias, backend=place.backend, dtype=place.dtype)
        self._weight = self._scales = self._bias = None

    def __call__(self, x: Tensor, adapted: AdaptedStep = ()) -> Tensor:
        assert self._packed is not None, "called before pack"
        out = self._packed(x)
        for one in adapted:
            one.add(self, x, out)
        return out


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
