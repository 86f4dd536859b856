"""What config.json says of quantized weights."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from flyball_protocol.quoting import quoted
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.json_fields import JsonFields

Quantization = Literal["none", "int8", "w8a16", "int4", "w4a8", "fp8"]
"""``int8``: weights of linear layers are 8 bits with a scale for each output feature, their inputs with one for each token.
``w8a16``: weights are 8 bits with a scale for each group of input features, and inputs have 16. ``int4``: the same with weights
of 4 bits. ``w4a8``: inputs beside them have 8, with a scale for each group. ``fp8``: weights are e4m3 with a scale for each
output feature, and inputs have 16 bits."""

WORD_BITS = 32
"""Of a word that has several weights."""

Layout = Literal["compressed-tensors", "gptq", "awq"]


class Packing(NamedTuple):
    """How a checkpoint holds weights of 4 or 8 bits whose inputs have 16.

    Attributes:
        bits: of a weight.
        group_size: input features that share a scale; None: all of an output feature.
        has_zeros: whether zeros are stored; else they are all the middle, 8 or 128.
        zero_offset: what a zero is larger than it is stored.
    """

    layout: Layout
    bits: int
    group_size: int | None
    has_zeros: bool = True
    zero_offset: int = 0

    @property
    def per_word(self) -> int:
        """Weights in a word of 32 bits."""
        return WORD_BITS // self.bits


class Stored(NamedTuple):
    """How a checkpoint holds the weights of linear layers.

    Attributes:
        packing: of int4 and w8a16.
        has_tensor_scales: whether fp8 weights have one scale for each tensor, not for each output feature.
    """

    quantization: Quantization = "none"
    packing: Packing | None = None
    has_tensor_scales: bool = False


UNQUANTIZED = Stored()

INT8_FORMATS = ("int-quantized", "naive-quantized")
"""Of compressed-tensors: each weight is a tensor of int8, beside one of its scales."""

PACKED_FORMAT = "pack-quantized"

FLOAT8_FORMAT = "float-quantized"

WEIGHT_ONLY: dict[int, Quantization] = {4: "int4", 8: "w8a16"}
"""What checkpoints whose weights alone have so many bits are."""

_READABLE = "W8A8 (int8), fp8, W4A16 and W8A16 of compressed-tensors, 4 and 8 bits of GPTQ, and 4 bits of AWQ"
_NO_SPARSITY = (None, "dense")
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
_W8A8: dict[str, dict[str, Any]] = {
    "weights": _INT8 | {"strategy": "channel", "dynamic": False},
    "input_activations": _INT8 | {"strategy": "token", "dynamic": True},
}
_WEIGHT_ONLY = {"type": "int", "dynamic": False}
_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}


def resolve_quantization(asked: Quantization, stored: Stored) -> Quantization:
    """Return how layers compute: a checkpoint's quantized weights stay as they are, and inputs beside 4 bits may have 8."""
    if stored == UNQUANTIZED or (stored.quantization, asked) == ("int4", "w4a8"):
        return asked
    return stored.quantization


def read_quantization(fields: JsonFields) -> Stored:
    """Return how the checkpoint holds the weights of linear layers.

    Raises:
        ConfigError: in a way that cannot be read here; the message says which, and what can.
    """
    key = next((key for key in ("quantization_config", "compression_config") if fields.raw(key) is not None), None)
    if key is None:
        return UNQUANTIZED
    config = fields.child(key)
    method = config.raw("quant_method")
    read = _METHODS.get(method) if isinstance(method, str) else None
    if read is None:
        raise ConfigError(
            f"{fields.source} has {key}{_named(method)}: of quantized checkpoints only {_READABLE} are supported. "
            "Use one of those, or the unquantized model in bfloat16, float16 or float32."
        )
    return read(config)


def _compressed_tensors(config: JsonFields) -> Stored:
    formats = (*INT8_FORMATS, PACKED_FORMAT, FLOAT8_FORMAT)
    if config.raw("format") not in formats:
        raise config.error("format", f"one of {', '.join(formats)}; others hold weights that Flyball cannot read")
    if config.child("sparsity_config").raw("format") not in _NO_SPARSITY:
        raise config.error("sparsity_config", "absent: sparse weights are not supported")
    for name in ("kv_cache_scheme", "transform_config"):
        if config.raw(name):
            raise config.error(name, "absent: it is not supported")
    groups = config.child("config_groups")
    names = groups.names()
    if len(names) != 1:
        raise config.error("config_groups", "an object with one group, for all linear layers")
    group = groups.child(names[0])
    if group.raw("targets") != ["Linear"]:
        raise group.error("targets", "['Linear']: all linear layers or none")
    if group.raw("output_activations"):
        raise group.error("output_activations", "absent: outputs are not quantized here")
    if config.raw("format") == PACKED_FORMAT:
        return _weight_only(_packed(group))
    if config.raw("format") == FLOAT8_FORMAT:
        return _float8(group)
    for part, scheme in _W8A8.items():
        _check_scheme(group.child(part), scheme, "W8A8: int8, a scale for each output feature and each token")
    return Stored("int8")


def _weight_only(packing: Packing) -> Stored:
    return Stored(WEIGHT_ONLY[packing.bits], packing)


def _packed(group: JsonFields) -> Packing:
    if group.raw("input_activations"):
        raise group.error("input_activations", f"absent: with {PACKED_FORMAT}, inputs are as they are (W4A16, W8A16)")
    weights = group.child("weights")
    bits = _bits(weights, "num_bits")
    _check_scheme(weights, _WEIGHT_ONLY, "W4A16 or W8A16: whole numbers, for weights alone")
    if weights.raw("actorder") in ("group", "dynamic"):
        raise weights.error("actorder", "absent, weight or static: features of a group must be neighbours")
    strategy = weights.raw("strategy")
    if strategy not in ("group", "channel"):
        raise weights.error("strategy", "'group' or 'channel'")
    size = _group_size(weights) if strategy == "group" else None
    return Packing("compressed-tensors", bits, size, has_zeros=not weights.boolean("symmetric", True))


def _float8(group: JsonFields) -> Stored:
    """Return how weights of e4m3 are held. Inputs are never rounded beside them, whatever the checkpoint says of inputs."""
    weights = group.child("weights")
    _check_scheme(weights, _FLOAT8 | {"dynamic": False}, "fp8: e4m3, for weights")
    if group.raw("input_activations"):
        _check_scheme(group.child("input_activations"), _FLOAT8, "fp8: inputs in e4m3 or as they are")
    strategy = weights.raw("strategy")
    if strategy not in ("channel", "tensor"):
        raise weights.error("strategy", "'channel' or 'tensor': scales of blocks or groups have no kernel here")
    return Stored("fp8", has_tensor_scales=strategy == "tensor")


def _gptq(config: JsonFields) -> Stored:
    bits = _bits(config, "bits")
    for name, why in (("lm_head", "the output layer must not be quantized"), ("dynamic", "all layers must be alike")):
        if config.raw(name):
            raise config.error(name, f"absent or false: {why}")
    if config.boolean("desc_act", False) and config.raw("group_size") != -1:
        raise config.error("desc_act", "false: features of a group must be neighbours")
    layout = config.raw("checkpoint_format")
    if layout not in (None, "gptq", "gptq_v2"):
        raise config.error("checkpoint_format", "gptq or gptq_v2")
    return _weight_only(Packing("gptq", bits, _group_size(config), zero_offset=0 if layout == "gptq_v2" else 1))


def _awq(config: JsonFields) -> Stored:
    _check_scheme(config, {"bits": 4}, "AWQ has no other number of bits")
    if str(config.raw("version") or "gemm").lower() != "gemm":
        raise config.error("version", "gemm")
    if not config.boolean("zero_point", True):
        raise config.error("zero_point", "true")
    return _weight_only(Packing("awq", 4, _group_size(config)))


def _bits(config: JsonFields, name: str) -> int:
    bits = config.raw(name)
    if not isinstance(bits, int) or bits not in WEIGHT_ONLY:
        raise config.error(name, "4 or 8 (other numbers of bits are not supported)")
    return bits


def _group_size(config: JsonFields) -> int | None:
    """Return the features of a group; None for -1, which is all."""
    if config.raw("group_size") == -1:
        return None
    size = config.integer("group_size", 128)
    if size % 8:
        raise config.error("group_size", "a multiple of 8, or -1")
    return size


def _check_scheme(found: JsonFields, scheme: dict[str, Any], why: str) -> None:
    for key, wanted in scheme.items():
        if found.raw(key) != wanted:
            raise found.error(key, f"{wanted!r} ({why})")


_METHODS: dict[str, Callable[[JsonFields], Stored]] = {
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
}


def _named(method: object) -> str:
    """Return the name of a method, how to undo it where transformers can (gpt-oss), or why it has no kernel."""
    if method == "mxfp4":
        return " (mxfp4, which transformers unpacks: Mxfp4Config(dequantize=True), then save_pretrained)"
    if method == "fp8":
        return " (fp8 that is not of compressed-tensors, mostly with scales of blocks, which have no kernel here)"
    return "" if method is None else f" ({quoted(str(method))})"
