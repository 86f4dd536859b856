"""Weights of a model: where they are, what they are called in a checkpoint, and the layers made of them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from flyball_kernels.backend import Backend
from flyball_kernels.linear import Float8Linear, Grouped, GroupedLinear, Int8Linear, Linear, PackedLinear, Rounded
from flyball_kernels.rms_norm import add_rms_norm, rms_norm
from flyball_runtime.core.quantization import UNQUANTIZED, Packing, Quantization, Stored
from flyball_runtime.model.packed_weights import BESIDE, WORDS, PackedWeights, joined

Destinations = Iterator[tuple[str, Tensor]]
"""Tensor names of a checkpoint, and where their values go."""


class Bits(NamedTuple):
    weight: Literal[4, 8]
    input: Literal[8, 16]


IN_GROUPS: Mapping[Quantization, Bits] = {"w8a16": Bits(8, 16), "int4": Bits(4, 16), "w4a8": Bits(4, 8)}
"""What has weights in groups of input features."""

HEAD: Mapping[Quantization, Quantization] = {"int4": "int8", "w4a8": "int8"}
"""How the output layer computes where other layers have 4 bits, which would be too few for it."""


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
        """Return the place for the output layer, which quantized checkpoints leave out."""
        if self.stored != UNQUANTIZED:
            return self.unrounded()
        return replace(self, quantization=HEAD.get(self.quantization, self.quantization))

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Return a layer of these weights, which it takes over, rounded if that is asked for."""
        if self.quantization == "int8":
            return Int8Linear(weight, bias, backend=self.backend)
        if self.quantization == "fp8":
            return Float8Linear(weight, bias, backend=self.backend)
        if self.quantization in IN_GROUPS:
            return self.grouped_linear(weight, bias)
        return PackedLinear(weight, bias, backend=self.backend)

    def grouped_linear(self, weight: Tensor | Grouped, bias: Tensor | None) -> Linear:
        bits = IN_GROUPS[self.quantization]
        return GroupedLinear(
            weight, bias, backend=self.backend, bits=bits.weight, dtype=self.dtype, input_bits=bits.input
        )


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


Parts = Mapping[str, int]
"""out_features of each projection of a layer by its name in the checkpoint, in the order of the output."""


class Weights(Protocol):
    """The weights of a layer until they are packed."""

    def destinations(self) -> Destinations:
        """Names in the checkpoint, from the projection's on, and where each tensor is to be copied to."""

    def layer(self, bias: Tensor | None) -> Linear:
        """Return the layer of the weights, which are filled now, and which it takes over."""


class Unquantized:
    """Weights in the model's dtype."""

    def __init__(self, in_features: int, parts: Parts, place: Place) -> None:
        self._parts, self._place = parts, place
        self._weight = place.empty(sum(parts.values()), in_features)

    def destinations(self) -> Destinations:
        return _rows(self._parts, "weight", self._weight)

    def layer(self, bias: Tensor | None) -> Linear:
        return self._place.linear(self._weight, bias)


class RoundedWeights:
    """Weights of 8 bits, whole numbers or e4m3, as compressed-tensors has them."""

    def __init__(self, in_features: int, parts: Parts, place: Place) -> None:
        self._parts, self._place = parts, place
        self._is_float8 = place.stored.quantization == "fp8"
        dtype = torch.float8_e4m3fn if self._is_float8 else torch.int8
        out_features = sum(parts.values())
        self._values = torch.empty(out_features, in_features, dtype=dtype, device=place.device)
        self._has_tensor_scales = place.stored.has_tensor_scales
        scales_shape = (len(parts),) if self._has_tensor_scales else (out_features, 1)
        self._scales = torch.empty(scales_shape, device=place.device)

    def destinations(self) -> Destinations:
        yield from _rows(self._parts, "weight", self._values)
        scales_of = dict.fromkeys(self._parts, 1) if self._has_tensor_scales else self._parts
        yield from _rows(scales_of, "weight_scale", self._scales)

    def layer(self, bias: Tensor | None) -> Linear:
        scales = self._scales.flatten()
        if self._has_tensor_scales:
            scales = scales.repeat_interleave(torch.tensor(list(self._parts.values()), device=scales.device))
        layer = Float8Linear if self._is_float8 else Int8Linear
        return layer(Rounded(self._values, scales), bias, backend=self._place.backend, dtype=self._place.dtype)


class WeightsInGroups:
    """Weights of 4 or 8 bits, several in a word."""

    def __init__(self, in_features: int, parts: Parts, place: Place, packing: Packing) -> None:
        self._place = place
        self._parts = {name: PackedWeights(packing, in_features, size, place.device) for name, size in parts.items()}

    def destinations(self) -> Destinations:
        for name, packed in self._parts.items():
            for kind, tensor in packed.tensors.items():
                yield f"{name}.{kind}", tensor

    def layer(self, bias: Tensor | None) -> Linear:
        grouped = joined([packed.unpack(name) for name, packed in self._parts.items()])
        return self._place.grouped_linear(grouped, bias)


def _rows(parts: Parts, kind: str, buffer: Tensor) -> Destinations:
    """Yield the rows of each projection, so that loading fills the buffer in place."""
    for name, rows in zip(parts, buffer.split(list(parts.values())), strict=True):
        yield f"{name}.{kind}", rows


def num_weights(name: str, tensor: Tensor, packing: Packing | None) -> int:
    """Return how many weights a tensor of a checkpoint has, whose words are packed like this."""
    kind = name.rpartition(".")[2]
    if kind in BESIDE:
        return 0
    return tensor.numel() * (packing.per_word if packing is not None and kind in WORDS else 1)


def weights_of(in_features: int, parts: Parts, place: Place) -> Weights:
    """Return the weights of a layer as the checkpoint has them."""
    if place.stored.packing is not None:
        return WeightsInGroups(in_features, parts, place, place.stored.packing)
    if place.stored != UNQUANTIZED:
        return RoundedWeights(in_features, parts, place)
    return Unquantized(in_features, parts, place)


class FusedLinear:
    """Several projections of the same input (q, k and v; gate and up) computed by one matmul.

    ``pack`` must be called once the weights are in; from then on the layer can be called.

    Args:
        exact: whether the weights are never rounded.
    """

    def __init__(self, in_features: int, parts: Parts, *, bias: bool, place: Place, exact: bool = False) -> None:
        self._parts = parts
        self._in_features = in_features
        self._weights: Weights | None = weights_of(in_features, parts, place.unrounded() if exact else place)
        self._bias = place.empty(sum(parts.values())) if bias else None
        self._packed: Linear | None = None

    def destinations(self, prefix: str) -> Destinations:
        """Names in the checkpoint, and where each tensor is to be copied to."""
        assert self._weights is not None, "packed already"
        named = self._weights.destinations()
        biases = () if self._bias is None else _rows(self._parts, "bias", self._bias)
        return ((prefix + name, tensor) for name, tensor in chain(named, biases))

    def projections(self, prefix: str) -> Iterator[tuple[str, Projection]]:
        """Yield the projections by name."""
        start = 0
        for name, size in self._parts.items():
            yield f"{prefix}{name}", Projection(self, slice(start, start + size), self._in_features)
            start += size

    def pack(self) -> None:
        """Give the weights the layout that is fastest on their device; the buffers that were filled are let go."""
        assert self._weights is not None, "packed twice"
        self._packed = self._weights.layer(self._bias)
        self._weights = self._bias = None

    @property
    def packed(self) -> Linear:
        """The layer of the packed weights."""
        assert self._packed is not None, "called before pack"
        return self._packed

    def __call__(self, x: Tensor, adapted: AdaptedStep = ()) -> Tensor:
        out = self.packed(x)
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
