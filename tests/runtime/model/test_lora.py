"""Adapters in peft's format: what they add to a model, and which are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters import ATTENTION, edit_config, make_adapter
from checkpoints import make_checkpoint
from flyball_kernels.backend import choose_backend
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.model_config import ModelConfig
from flyball_runtime.model.linear import AdaptedTokens, FusedLinear, Place
from flyball_runtime.model.loader import load_model
from flyball_runtime.model.lora import HostAdapter, Matrices, read_adapter
from flyball_runtime.model.transformer import CausalLM

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base"), "qwen3")


@pytest.fixture(scope="module")
def model(base: Path) -> CausalLM:
    backend = choose_backend(CPU, "torch")
    loaded = load_model(base, ModelConfig.from_dir(base), dtype=torch.float32, device=CPU, backend=backend)
    assert isinstance(loaded, CausalLM)
    return loaded


def read(model: CausalLM, path: Path, **settings: Any) -> Any:
    return read_adapter(path, model.projections(), **({"max_rank": 16, "dtype": torch.float32} | settings))


@pytest.mark.parametrize("backend", ["torch", "cpp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_get_what_their_adapter_adds_and_others_stay_as_they_are(backend: str, dtype: torch.dtype) -> None:
    """Of a layer with three projections, adapters change one, two or none of the outputs."""
    place = Place(dtype, CPU, choose_backend(CPU, backend))
    layer = FusedLinear(24, {"q": 10, "k": 6, "v": 6}, bias=False, place=place)
    for _, weight in layer.destinations(""):
        torch.nn.init.normal_(weight)
    layer.pack()
    parts = dict(layer.projections(""))
    x = torch.randn(7, 24, dtype=dtype)
    before = layer(x)
    expected = before.float()
    adapted = []
    for names, indices in ((("q",), [0, 3]), (("k", "v"), [5, 2, 6])):
        matrices = {
            name: (torch.randn(3, 24), torch.randn(parts[name].columns.stop - parts[name].columns.start, 3))
            for name in names
        }
        adapted.append(_tokens(layer, parts, matrices, indices, place))
        for name, (down, up) in matrices.items():
            added = (x[indices].float() @ down.to(dtype).float().T).to(dtype).float() @ up.to(dtype).float().T
            expected[indices, parts[name].columns] += added
    after = layer(x, adapted)
    # in bf16 the output, what is added and the sum are rounded each, to 8 bits of values up to about 50
    tolerance = 1e-4 if dtype == torch.float32 else 0.3
    torch.testing.assert_close(after.float(), expected, rtol=0.0, atol=tolerance)
    assert torch.equal(after[[1, 4]], before[[1, 4]])
    assert torch.equal(after[[0, 3], 10:], before[[0, 3], 10:])
    everywhere = _tokens(layer, parts, matrices, None, place)
    torch.testing.assert_close(layer(x, [everywhere])[[5, 2, 6]], after[[5, 2, 6]], rtol=0.0, atol=tolerance)


def _tokens(layer: FusedLinear, parts: Any, matrices: Any, indices: list[int] | None, place: Place) -> AdaptedTokens:
    host = HostAdapter(
        [Matrices(parts[name], *(one.to(place.dtype) for one in pair)) for name, pair in matrices.items()]
    )
    return AdaptedTokens(None if indices is None else torch.tensor(indices), host.packed(place))


def test_all_that_is_in_the_file_is_used(model: CausalLM, base: Path, tmp_path: Path) -> None:
    whole = read(model, make_adapter(tmp_path / "whole", base))
    assert sum(map(len, whole.packed(model_place(model)).values())) == 2 * 7
    attention = read(model, make_adapter(tmp_path / "attention", base, targets=ATTENTION))
    assert sum(map(len, attention.packed(model_place(model)).values())) == 2 * 4


def model_place(model: CausalLM) -> Place:
    return Place(torch.float32, CPU, model.backend)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"use_dora": True}, "use_dora is True, which is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern is"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern is"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
        ({"layer_replication": [[0, 1]]}, "layer_replication is"),
        ({"trainable_token_indices": [5]}, "trainable_token_indices is"),
        ({"something_new": "x" * 500}, "something_new is 'xxx"),
        ({"init_lora_weights": "pissa"}, "changes the weights of the base model"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only LORA"),
        ({"peft_type": None}, "peft_type is None"),
        ({"r": 17}, "r is 17, above --max-lora-rank 16"),
        ({"r": 4}, r"has shape \[8, 64\]; the base model and r = 4 of adapter_config.json ask for \[4, 64\]"),
        ({"r": 0}, "r is 0; it must be a whole number"),
        ({"r": "8"}, "r is '8'"),
        ({"lora_alpha": -1}, "lora_alpha is -1"),
        ({"lora_alpha": None}, "has no lora_alpha"),
        ({"use_rslora": 1}, "use_rslora is 1"),
        ({"target_modules": ["q_proj", "c_attn"]}, "target_modules of adapter_config.json has 'c_attn'"),
        ({"target_modules": [5]}, "target_modules is"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    model: CausalLM, base: Path, tmp_path: Path, fields: dict[str, Any], says: str
) -> None:
    path = make_adapter(tmp_path, base, targets=("q_proj",))
    edit_config(path, **fields)
    with pytest.raises(ConfigError, match=says) as refused:
        read(model, path)
    assert len(str(refused.value)) < 700


def change(path: Path, **tensors: torch.Tensor | None) -> None:
    """Replace, add or leave out tensors of an adapter, by module and matrix."""
    file = path / "adapter_model.safetensors"
    matrices = load_file(file)
    for name, tensor in tensors.items():
        full = f"base_model.model.{name}.weight"
        matrices.pop(full, None)
        if tensor is not None:
            matrices[full] = tensor
    save_file(matrices, file)


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({f"{Q}.lora_B": None}, "only one of lora_A and lora_B for 'model.layers.0.self_attn.q_proj'"),
        ({f"{Q}.lora_A": torch.zeros(8, 32)}, r"has shape \[8, 32\]"),
        ({f"{Q}.lora_B": torch.zeros(8)}, r"has shape \[8\]"),
        ({f"{Q}.lora_A": torch.full((8, 64), float("nan"))}, "holds NaN or infinity"),
        ({f"{Q}.lora_A": torch.zeros(8, 64, dtype=torch.int8)}, "is I8; it must be one of"),
        (
            {"lm_head.lora_A": torch.zeros(8, 64)},
            "'lm_head' cannot be adapted in this base model. Modules that can be are",
        ),
        ({"model.layers.2.self_attn.q_proj.lora_A": torch.zeros(8, 64)}, r"layers\.2.* cannot be adapted"),
        ({f"{Q}.lora_magnitude_vector": torch.zeros(8)}, "is not a matrix of a linear layer's adapter"),
        ({"model.embed_tokens.lora_embedding_A": torch.zeros(8)}, "is not a matrix"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    model: CausalLM, base: Path, tmp_path: Path, tensors: dict[str, torch.Tensor | None], says: str
) -> None:
    path = make_adapter(tmp_path, base, targets=("q_proj",))
    change(path, **tensors)
    with pytest.raises(ConfigError, match=says):
        read(model, path)


def test_files_that_are_missing_or_broken_are_named(model: CausalLM, base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere/adapter_config.json"):
        read(model, tmp_path / "nowhere")
    path = make_adapter(tmp_path / "adapter", base, targets=("q_proj",))
    weights = path / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:100])
    with pytest.raises(ConfigError, match="not a readable safetensors file"):
        read(model, path)
    weights.rename(path / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"adapter_model.bin but no adapter_model.safetensors"):
        read(model, path)
    (path / "adapter_model.bin").unlink()
    with pytest.raises(ConfigError, match=r"has no adapter_model.safetensors"):
        read(model, path)
    save_file({}, weights)
    with pytest.raises(ConfigError, match="has no tensors"):
        read(model, path)
    (path / "adapter_config.json").write_text(json.dumps([1]))
    with pytest.raises(ConfigError, match="an object is needed"):
        read(model, path)


def test_an_adapter_that_overflows_the_dtype_is_refused(model: CausalLM, base: Path, tmp_path: Path) -> None:
    path = make_adapter(tmp_path, base, targets=("q_proj",))
    edit_config(path, lora_alpha=1e7)
    with pytest.raises(ConfigError, match=r"infinity as torch.float16"):
        read(model, path, dtype=torch.float16)
