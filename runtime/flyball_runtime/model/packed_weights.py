"""Weights of 4 or 8 bits as checkpoints hold them, several in a word of 32 bits: which tensors there are, and what they mean.

The layouts are those of compressed-tensors (``pack-quantized``), of GPTQ as AutoGPTQ and GPTQModel write it, and of AutoAWQ's
GEMM version.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from flyball_kernels.linear.reference import Grouped
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.quantization import WORD_BITS, Packing

WORDS = frozenset({"weight_packed", "qweight"})
BESIDE = frozenset({"weight_scale", "weight_shape", "weight_zero_point", "scales", "qzeros", "g_idx"})
"""What tensors with weights are called, and those beside them."""

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""In which of a word's places AWQ has its values, from the lowest bits on."""


class PackedWeights:
    """The tensors of one projection.

    Attributes:
        tensors: by the last part of their names, to be filled from the checkpoint.
    Raises:
        ConfigError: the layout has no such shape.
    """

    def __init__(self, packing: Packing, in_features: int, out_features: int, device: torch.device) -> None:
        self._packing = packing
        self._shape = out_features, in_features
        self._group_size = packing.group_size or in_features + in_features % 2  # an even number
        self._check_shape()
        num_groups = -(-in_features // self._group_size)
        words_in, words_out = -(-in_features // packing.per_word), -(-out_features // packing.per_word)

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.tensors: dict[str, Tensor]
        if packing.layout == "compressed-tensors":
            self.tensors = {
                "weight_packed": empty(out_features, words_in),
                "weight_scale": empty(out_features, num_groups, dtype=torch.float32),
                "weight_shape": empty(2, dtype=torch.int64),
            }
            if packing.has_zeros:
                self.tensors["weight_zero_point"] = empty(words_out, num_groups)
            return
        weights = (words_in, out_features) if packing.layout == "gptq" else (in_features, words_out)
        self.tensors = {
            "qweight": empty(*weights),
            "qzeros": empty(num_groups, words_out),
            "scales": empty(num_groups, out_features, dtype=torch.float32),
        }
        if packing.layout == "gptq":
            self.tensors["g_idx"] = empty(in_features)

    def _check_shape(self) -> None:
        out_features, in_features = self._shape
        needed = [("input", in_features, self._packing.group_size or 1)]
        if self._packing.layout != "compressed-tensors":
            per_word = self._packing.per_word
            needed += [("input", in_features, per_word), ("output", out_features, per_word)]
        for what, size, multiple in needed:
            if size % multiple:
                raise ConfigError(
                    f"a linear layer has {size} {what} features, and {self._packing.layout} in groups of {self._group_size} "
                    f"holds multiples of {multiple}. Use another checkpoint of this model."
                )

    def unpack(self, name: str) -> Grouped:
        """Return the weights, once the tensors are filled.

        Args:
            name: of the projection, for messages.
        Raises:
            ConfigError: the tensors contradict config.json.
        """
        packing, of = self._packing, self.tensors
        bits = packing.bits
        zeros: Tensor | None = None
        if packing.layout == "compressed-tensors":
            if tuple(of["weight_shape"].tolist()) != self._shape:
                raise ConfigError(
                    f"{name}.weight_shape is {of['weight_shape'].tolist()}; config.json asks for {list(self._shape)}."
                )
            values = _unpacked(of["weight_packed"], 1, bits)[:, : self._shape[1]]
            if packing.has_zeros:
                zeros = _unpacked(of["weight_zero_point"], 0, bits)[: self._shape[0]]
            return Grouped(values.contiguous(), of["weight_scale"], zeros, self._group_size, bits)
        if packing.layout == "gptq":
            self._check_order(name)
            values, zeros = _unpacked(of["qweight"], 0, bits).T, _unpacked(of["qzeros"], 1, bits).T
        else:
            values = _unpacked(of["qweight"], 1, bits, AWQ_ORDER).T
            zeros = _unpacked(of["qzeros"], 1, bits, AWQ_ORDER).T
        zeros = (zeros + packing.zero_offset) & ((1 << bits) - 1)
        return Grouped(values.contiguous(), of["scales"].T.contiguous(), zeros.contiguous(), self._group_size, bits)

    def _check_order(self, name: str) -> None:
        found = self.tensors["g_idx"]
        if not torch.equal(found, torch.arange(len(found), device=found.device, dtype=torch.int32) // self._group_size):
            raise ConfigError(
                f"{name}.g_idx does not say that features of a group are neighbours (desc_act), which is not supported. "
                "Use a checkpoint that was made without it."
            )


def joined(parts: Sequence[Grouped]) -> Grouped:
    """Return one matrix with the rows of all, which have the same groups."""
    values, scales = torch.cat([one.values for one in parts]), torch.cat([one.scales for one in parts])
    zeros = [one.zeros for one in parts if one.zeros is not None]
    return parts[0]._replace(values=values, scales=scales, zeros=torch.cat(zeros) if zeros else None)


def _unpacked(words: Tensor, dim: int, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """Return the values of ``[.., words, ..]`` int32 as ``[.., values, ..]`` uint8.

    Args:
        dim: along which values were packed.
        bits: of a value.
        order: the place in a word of each of its values, unless they lie in order.
    """
    places = range(WORD_BITS // bits) if order is None else order
    shifts = torch.tensor([bits * place for place in places], dtype=torch.int32, device=words.device)
    values = (words.movedim(dim, -1).unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return values.flatten(-2).movedim(-1, dim).to(torch.uint8)
