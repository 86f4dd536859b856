"""Small random LoRA adapters for checkpoints of one file, in peft's format, and the same merged into the weights."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def make_adapter(
    directory: Path,
    base: Path,
    *,
    targets: tuple[str, ...] = (*ATTENTION, *MLP),
    rank: int = 8,
    alpha: float = 16.0,
    seed: int = 1,
    **fields: Any,
) -> Path:
    """Write an adapter of every module of ``base`` whose name ends with one of these; return its folder.

    Args:
        fields: more of adapter_config.json, in the place of what peft writes.
    """
    generator = torch.Generator().manual_seed(seed)
    matrices = {}
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if any(module.endswith(f".{target}") for target in targets):
            rows, columns = weight.shape
            matrices[f"base_model.model.{module}.lora_A.weight"] = torch.randn(rank, columns, generator=generator) * 0.1
            matrices[f"base_model.model.{module}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) * 0.1
    directory.mkdir(parents=True, exist_ok=True)
    save_file(matrices, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.05,
        "target_modules": list(targets),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "init_lora_weights": True,
        "inference_mode": True,
        "rank_pattern": {},
        "alpha_pattern": {},
        "fan_in_fan_out": False,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config | fields))
    return directory


def edit_config(directory: Path, **fields: Any) -> None:
    """Change fields of an adapter_config.json."""
    file = directory / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def merged(directory: Path, base: Path, adapter: Path) -> Path:
    """Write ``base`` with the adapter added to its weights into ``directory``; return that."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    rank = config["r"]
    scale = config["lora_alpha"] / (math.sqrt(rank) if config["use_rslora"] else rank)
    shutil.copytree(base, directory, dirs_exist_ok=True)
    weights, matrices = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name, down in matrices.items():
        if ".lora_A." in name:
            module = name.removeprefix("base_model.model.").partition(".lora_A.")[0]
            weights[f"{module}.weight"] += scale * matrices[name.replace("lora_A", "lora_B")] @ down
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
