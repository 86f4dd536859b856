"""How many kernels a layer launches on a GPU: Triton's, played here, and torch's operations that are no views."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter, jit

import flyball_kernels
from flyball_kernels import Backend
from flyball_runtime.core.model_config import ModelConfig
from flyball_runtime.model.loader import load_model
from flyball_runtime.model.transformer import CausalLM, StepInputs

KERNEL_TYPES = (jit.JITFunction, interpreter.InterpretedFunction)
NO_WORK = ("aten::empty", "aten::detach", "aten::lift_fresh")


class Launches(TorchDispatchMode):
    """Lists what computes, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.names: list[str] = []
        for path in Path(flyball_kernels.__file__).parent.glob("*/kernel.py"):
            module = import_module(f"flyball_kernels.{path.parent.name}.kernel")
            for name, value in list(vars(module).items()):
                if isinstance(value, KERNEL_TYPES):
                    monkeypatch.setattr(module, name, _Played(name, self.names))

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and not func.name().startswith(NO_WORK):
            self.names.append(func.name().removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


class _Played:
    """A kernel whose launches are listed, and which computes nothing."""

    def __init__(self, name: str, names: list[str]) -> None:
        self._name, self._names = name, names

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(size > 0 for size in grid)
        return lambda *arguments, **constants: self._names.append(self._name)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return Launches(monkeypatch)


def _step(query_lens: list[int], context_lens: list[int], num_groups: int) -> StepInputs:
    num_tokens = sum(query_lens)
    return StepInputs(
        token_ids=torch.zeros(num_tokens, dtype=torch.int64),
        positions=torch.zeros(num_tokens, dtype=torch.int64),
        slot_mappings=(torch.arange(num_tokens),) * num_groups,
        block_tables=(torch.zeros(len(query_lens), -(-max(context_lens) // 16), dtype=torch.int32),) * num_groups,
        cu_query_lens=torch.tensor([0, *query_lens]).cumsum(0).int(),
        context_lens=torch.tensor(context_lens, dtype=torch.int32),
        logits_indices=torch.arange(len(query_lens)),
        cu_logits_lens=torch.arange(len(query_lens) + 1).int(),
        max_query_len=max(query_lens),
        max_logits_len=1,
        max_context_len=max(context_lens),
    )


def _launch_layer(
    model: CausalLM, launches: Launches, query_lens: list[int], context_lens: list[int], *, only_logits: bool = False
) -> list[str]:
    """Return what the second layer launches."""
    inputs = _step(query_lens, context_lens, len(model.layout.groups))
    shape = (16, 16, model.config.num_key_value_heads, model.config.head_dim)
    caches = torch.zeros(shape), torch.zeros(shape)
    x, residual = torch.zeros(2, sum(query_lens), model.config.hidden_size)
    with torch.inference_mode(), launches:
        model.layers[1](x, residual, inputs, caches, only_logits=only_logits)
    return launches.names


@pytest.fixture
def load(checkpoint: Callable) -> Callable[[str], CausalLM]:
    def load(architecture: str) -> CausalLM:
        path = checkpoint(architecture)
        settings = {"dtype": torch.float32, "device": "cpu", "backend": Backend("triton"), "max_model_len": 256}
        return load_model(path, ModelConfig.from_dir(path), **settings)

    return load


def test_a_qwen3_layer_of_decodes_launches_ten_kernels(load: Callable, launches: Launches) -> None:
    names = _launch_layer(load("qwen3"), launches, [1], [5000])
    assert [name for name in names if name.endswith("kernel")] == [
        "rms_norm_kernel",
        "rope_kv_write_kernel",
        "paged_attention_kernel",
        "join_splits_kernel",
        "rms_norm_kernel",
        "swiglu_kernel",
    ]
    assert len(names) == 10, names  # and four matrix products


@pytest.mark.parametrize("architecture", ["llama3", "mistral", "qwen2", "qwen3", "phi3"])
def test_a_layer_launches_at_most_ten_kernels(architecture: str, load: Callable, launches: Launches) -> None:
    assert len(_launch_layer(load(architecture), launches, [1, 1, 40], [300, 5000, 90])) <= 10, launches.names


def test_to_go_on_with_some_tokens_takes_two_launches(load: Callable, launches: Launches) -> None:
    names = _launch_layer(load("qwen3"), launches, [1, 40], [300, 90], only_logits=True)
    assert len(names) <= 10 + 2, names
    assert names.count("index_select") == 2
    assert not {"_local_scalar_dense", "item", "nonzero", "_to_copy"} & set(names)


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3"])
def test_a_layer_with_four_norms_launches_at_most_twelve(architecture: str, load: Callable, launches: Launches) -> None:
    assert len(_launch_layer(load(architecture), launches, [1], [5000])) <= 12, launches.names


def test_a_layer_of_experts_launches_as_much_for_any_number_of_them(load: Callable, launches: Launches) -> None:
    names = _launch_layer(load("qwen3 moe"), launches, [1, 40], [5000, 90])
    assert [name for name in names if name.endswith("kernel")][-7:] == [
        "rms_norm_kernel",
        "route_kernel",
        "assign_kernel",
        "float_kernel",
        "swiglu_kernel",
        "float_kernel",
        "weighted_sum_kernel",
    ]
    assert len(names) == 13, names  # and three matrix products


@pytest.mark.parametrize("architecture", ["qwen3", "mixtral", "qwen2 moe", "gpt-oss"])
def test_launches_do_not_wait_for_the_device(architecture: str, load: Callable, launches: Launches) -> None:
    """No value is read back to the host: a graph can capture the layer."""
    names = _launch_layer(load(architecture), launches, [1, 40], [300, 90])
    assert not {"_local_scalar_dense", "item", "nonzero", "_to_copy"} & set(names)
