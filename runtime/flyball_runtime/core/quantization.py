"""What config.json says of quantized weights."""

from typing import Any, Literal

from flyball_protocol.quoting import quoted
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.json_fields import JsonFields

Quantization = Literal["none", "int8"]
"""``int8``: weights of linear layers are 8 bits with a scale for each output feature, their inputs with one for each token."""

METHOD = "compressed-tensors"
FORMATS = ("int-quantized", "naive-quantized")
"""Each weight is a tensor of int8, beside one of its scales."""

_NO_SPARSITY = (None, "dense")
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
_SCHEME: dict[str, dict[str, Any]] = {
    "weights": _INT8 | {"strategy": "channel", "dynamic": False},
    "input_activations": _INT8 | {"strategy": "token", "dynamic": True},
}


def resolve_quantization(asked: Quantization, stored: Quantization) -> Quantization:
    """Return how layers compute: a checkpoint that is quantized stays as it is."""
    return asked if stored == "none" else stored


def read_quantization(fields: JsonFields) -> Quantization:
    """Return how the checkpoint holds the weights of linear layers.

    Raises:
        ConfigError: in a way that cannot be read here; the message says which, and what can.
    """
    key = next((key for key in ("quantization_config", "compression_config") if fields.raw(key) is not None), None)
    if key is None:
        return "none"
    config = fields.child(key)
    method = config.raw("quant_method")
    if method != METHOD:
        raise ConfigError(
            f"{fields.source} has {key}{_named(method)}: of quantized checkpoints only {METHOD} with 8-bit integers (W8A8) "
            "are supported. Use one of those, or the unquantized model in bfloat16, float16 or float32."
        )
    if config.raw("format") not in FORMATS:
        raise config.error("format", f"one of {', '.join(FORMATS)}; others hold weights that Flyball cannot read")
    if config.child("sparsity_config").raw("format") not in _NO_SPARSITY:
        raise config.error("sparsity_config", "absent: sparse weights are not supported")
    for name in ("kv_cache_scheme", "transform_config"):
        if config.raw(name):
            raise config.error(name, "absent: it is not supported")
    groups = config.child("config_groups")
    names = groups.names()
    if len(names) != 1:
        raise config.error("config_groups", "an object with one group, for all linear layers")
    _check_group(groups.child(names[0]))
    return "int8"


def _check_group(group: JsonFields) -> None:
    if group.raw("targets") != ["Linear"]:
        raise group.error("targets", "['Linear']: all linear layers or none")
    if group.raw("output_activations"):
        raise group.error("output_activations", "absent: outputs are not quantized here")
    for part, scheme in _SCHEME.items():
        found = group.child(part)
        for key, wanted in scheme.items():
            if found.raw(key) != wanted:
                raise found.error(key, f"{wanted!r} (W8A8: int8, a scale for each output feature and each token)")


def _named(method: object) -> str:
    """Return the name of a method, and how to undo it where transformers can (gpt-oss)."""
    if method == "mxfp4":
        return " (mxfp4, which transformers unpacks: Mxfp4Config(dequantize=True), then save_pretrained)"
    return "" if method is None else f" ({quoted(str(method))})"
