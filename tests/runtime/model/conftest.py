"""Checkpoints, and both implementations of each, made once per session."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from checkpoints import make_checkpoint

Checkpoint = Callable[..., Path]
Reference = Callable[..., PreTrainedModel]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tensors this small are slower on several threads, which spend the time waiting for each other."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """``checkpoint(arch, **overrides)``: the directory of such a checkpoint; tests must not write into it."""
    made: dict[str, Path] = {}

    def get(arch: str, **overrides: Any) -> Path:
        key = repr((arch, sorted(overrides.items())))
        if key not in made:
            made[key] = make_checkpoint(tmp_path_factory.mktemp(arch), arch, **overrides)
        return made[key]

    return get


@pytest.fixture(scope="session")
def reference() -> Reference:
    """``reference(path, dtype)``: transformers' model of a checkpoint."""
    loaded: dict[tuple[Path, torch.dtype], PreTrainedModel] = {}

    def get(path: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        if (path, dtype) not in loaded:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
            model.generation_config.eos_token_id = None  # generate() goes on to max_new_tokens
            loaded[path, dtype] = model.eval()
        return loaded[path, dtype]

    return get
