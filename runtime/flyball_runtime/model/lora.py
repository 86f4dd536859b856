"""LoRA adapters in peft's format: adapter_config.json says what they are, adapter_model.safetensors has the matrices.

An adapter is read as a whole and checked against the base model before it is used. What would change its meaning and is not
computed here is refused by name.
"""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flyball_kernels.linear import PackedLinear
from flyball_protocol.quoting import quoted, quoted_list
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.json_fields import JsonFields, read_json_object
from flyball_runtime.core.memory import available_memory_bytes
from flyball_runtime.model.linear import Adaptation, FusedLinear, LowRank, Place, Projection
from flyball_runtime.model.loader import Header, check_kind, full_name, is_file, iter_headers, iter_weights

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"

_READ = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "bias", "target_modules", "init_lora_weights"})
_WITHOUT_EFFECT = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    }
)
"""Fields about training, or about which modules have matrices, which the file with the matrices says too."""

_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Ways to start training (``init_lora_weights``) that leave the base model's weights as they are."""

_TENSOR_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<matrix>[AB])\.weight")


@dataclass(frozen=True)
class AdapterConfig:
    """What adapter_config.json says.

    Attributes:
        scale: of what is added to the output of each projection.
        target_modules: names, or ends of names, of modules that have matrices; none if a pattern describes them.
    """

    rank: int
    scale: float
    target_modules: tuple[str, ...]

    @classmethod
    def from_dir(cls, path: Path, max_rank: int) -> "AdapterConfig":
        """Raises ConfigError for what is missing, malformed or not supported."""
        file = path / CONFIG_FILE
        values = read_json_object(file)
        fields = JsonFields(file, values)
        if (kind := fields.raw("peft_type")) != "LORA":
            raise ConfigError(
                f"{file}: peft_type is {quoted(kind)}; only LORA is supported. Merge it into the weights."
            )
        _refuse_unsupported(file, values)
        rank, alpha = fields.integer("r"), fields.number("lora_alpha")
        if rank > max_rank:
            raise ConfigError(
                f"{file}: r is {rank}, above --max-lora-rank {max_rank}. Start the server with a higher one."
            )
        scale = alpha / (math.sqrt(rank) if fields.boolean("use_rslora", False) else rank)
        targets = fields.raw("target_modules")
        if isinstance(targets, list) and not all(isinstance(one, str) for one in targets):
            raise fields.error("target_modules", "a list of names, or a text")
        return cls(rank, scale, tuple(targets) if isinstance(targets, list) else ())


def _refuse_unsupported(file: Path, values: Mapping[str, Any]) -> None:
    """Raise ConfigError for the first field that changes what the adapter means in a way that is not supported."""
    if (bias := values.get("bias")) not in (None, "none"):
        raise ConfigError(f"{file}: bias is {quoted(bias)}; adapters with biases are not supported. {_MERGE}")
    if (start := values.get("init_lora_weights")) not in _PLAIN_STARTS:
        raise ConfigError(
            f"{file}: init_lora_weights is {quoted(start)}, which changes the weights of the base model. Save the adapter "
            "with path_initial_model_for_weight_conversion, or merge it into the weights."
        )
    for name, value in values.items():
        if value and name not in _READ | _WITHOUT_EFFECT:
            raise ConfigError(f"{file}: {name} is {quoted(value)}, which is not supported. {_MERGE}")


_MERGE = "Leave it out when training, or merge the adapter into the weights (merge_and_unload) and serve those."


@dataclass(frozen=True)
class Matrices:
    """Of one projection: ``[rank, in_features]``, and ``[out_features, rank]`` with the scale in it."""

    projection: Projection
    down: Tensor
    up: Tensor


class HostAdapter:
    """An adapter in host memory, in the base model's dtype."""

    def __init__(self, matrices: list[Matrices]) -> None:
        self._matrices = matrices

    def packed(self, place: Place) -> Adaptation:
        """Return what a step needs, where the model is and in the layout of its kernels."""
        adaptation: dict[FusedLinear, list[LowRank]] = {}
        for one in self._matrices:
            down, up = (PackedLinear(matrix.to(place.device), backend=place.backend) for matrix in (one.down, one.up))
            adaptation.setdefault(one.projection.layer, []).append(LowRank(one.projection.columns, down, up))
        return adaptation


def read_adapter(
    path: Path, projections: Mapping[str, Projection], *, max_rank: int, dtype: torch.dtype
) -> HostAdapter:
    """Read the adapter in a folder.

    Args:
        projections: of the base model, by name.
        dtype: of the base model.
    Raises:
        ConfigError: a file is missing or malformed, or the adapter does not fit the base model or needs what is not supported.
    """
    config = AdapterConfig.from_dir(path, max_rank)
    file = path / WEIGHTS_FILE
    _check_there(file)
    headers = list(iter_headers([file]))
    modules = _checked_modules(headers, projections, config)
    num_bytes = sum(math.prod(header.shape) for header in headers) * dtype.itemsize
    if num_bytes > (free_bytes := available_memory_bytes()):
        raise ConfigError(
            f"{file} takes {num_bytes} bytes of memory as {dtype}, and {free_bytes} are free. Unload others."
        )
    tensors = {name: _converted(file, name, tensor, config.scale, dtype) for name, tensor in iter_weights([file])}
    return HostAdapter(
        [
            Matrices(
                projections[full_name(module)], tensors[_tensor_name(module, "A")], tensors[_tensor_name(module, "B")]
            )
            for module in modules
        ]
    )


def _tensor_name(module: str, matrix: str) -> str:
    return f"base_model.model.{module}.lora_{matrix}.weight"


def _check_there(file: Path) -> None:
    if is_file(file):
        return
    pickles = sorted(one.name for one in file.parent.glob("adapter_model.*"))
    if pickles:
        raise ConfigError(
            f"{file.parent} has {pickles[0]} but no {WEIGHTS_FILE}, and pickled weights can run code when loaded. "
            "Load and save it with peft, with safe_serialization=True."
        )
    raise ConfigError(f"{file.parent} has no {WEIGHTS_FILE}. Download or export the adapter again.")


def _checked_modules(
    headers: Collection[Header], projections: Mapping[str, Projection], config: AdapterConfig
) -> list[str]:
    """Return the modules that have matrices, as the file names them. Each has both, in the shapes that its projection needs."""
    found: dict[str, set[str]] = {}
    for header in headers:
        match = _TENSOR_NAME.fullmatch(header.name)
        if match is None:
            raise ConfigError(
                f"{header.file}: tensor {quoted(header.name, 160)} is not a matrix of a linear layer's adapter "
                f"(base_model.model.MODULE.lora_A.weight or lora_B). {_MERGE}"
            )
        projection = projections.get(full_name(match["module"]))
        if projection is None:
            names = sorted({name.rpartition(".")[2] for name in projections})
            raise ConfigError(
                f"{header.file}: {quoted(match['module'], 160)} cannot be adapted in this base model. Modules that can be "
                f"are {', '.join(names)} of its layers. Check that the adapter was made for this model, or merge it into "
                "the weights."
            )
        _check_shape(header, match["matrix"], projection, config.rank)
        check_kind(header)
        found.setdefault(match["module"], set()).add(match["matrix"])
    if not found:
        raise ConfigError(f"{WEIGHTS_FILE} has no tensors. Download or export the adapter again.")
    halves = [module for module, matrices in found.items() if len(matrices) == 1]
    if halves:
        raise ConfigError(
            f"{WEIGHTS_FILE} has only one of lora_A and lora_B for {quoted_list(halves)}. Export it again."
        )
    for target in config.target_modules:
        if not any(module == target or module.endswith(f".{target}") for module in found):
            raise ConfigError(
                f"target_modules of {CONFIG_FILE} has {quoted(target)}, for which {WEIGHTS_FILE} has no tensors. "
                "Download or export the adapter again."
            )
    return list(found)


def _check_shape(header: Header, matrix: str, projection: Projection, rank: int) -> None:
    out_features = projection.columns.stop - projection.columns.start
    expected = (rank, projection.in_features) if matrix == "A" else (out_features, rank)
    if header.shape != expected:
        raise ConfigError(
            f"{header.file}: tensor {header.name} has shape {list(header.shape)}; the base model and r = {rank} of "
            f"{CONFIG_FILE} ask for {list(expected)}. Check that the adapter was made for this model."
        )


def _converted(file: Path, name: str, tensor: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return a copy in ``dtype``. The scale goes into the matrix that is multiplied last."""
    made = (tensor.float() * scale if ".lora_B." in name else tensor.float()).to(dtype, copy=True)
    if not made.isfinite().all():
        raise ConfigError(
            f"{file}: tensor {name} holds NaN or infinity as {dtype}. Export it again, or use another --dtype."
        )
    return made
