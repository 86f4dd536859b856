"""Loading: every layout of files gives the same model, and every broken checkpoint an error that names the culprit."""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints import ARCHITECTURES, make_checkpoint
from flyball_kernels import choose_backend
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.model_config import ModelConfig
from flyball_runtime.core.rope import RopeConfig
from flyball_runtime.model import loader
from flyball_runtime.model.linear import Place
from flyball_runtime.model.loader import (
    TORCH_DTYPES,
    iter_headers,
    iter_weights,
    load_model,
    resolve_dtype,
    weight_files,
)
from flyball_runtime.model.transformer import CausalLM

NOBODY = 65534
CPU = choose_backend("cpu")
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def _load(path: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    return load_model(path, ModelConfig.from_dir(path), dtype=dtype, device="cpu", backend=CPU)


def _weights_in_place(path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """What loading put where, before packing hides it."""
    monkeypatch.setattr(CausalLM, "pack", lambda self: None)
    return dict(_load(path, dtype).destinations())


@pytest.fixture
def broken(checkpoint: Callable, tmp_path: Path) -> Callable[..., Path]:
    """A copy of a Qwen3 checkpoint whose tensors were changed by a function."""

    def make(change: Callable[[dict[str, Tensor]], object], arch: str = "qwen3") -> Path:
        path = tmp_path / "broken"
        shutil.copytree(checkpoint(arch), path)
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors")
        return path

    return make


@pytest.mark.parametrize("dtype", TORCH_DTYPES.values())
@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_tensor_arrives(
    arch: str, saved: torch.dtype, dtype: torch.dtype, checkpoint: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint(arch, dtype=saved)
    tensors = load_file(path / "model.safetensors")
    arrived = _weights_in_place(path, dtype, monkeypatch)
    assert arrived.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert arrived[name].dtype == dtype
        assert torch.equal(arrived[name], tensor.to(dtype)), name


def test_shards_hold_the_same_as_one_file(tmp_path: Path, checkpoint: Callable, monkeypatch) -> None:
    path = make_checkpoint(tmp_path, "qwen3", max_shard_size="100KB")
    assert len(weight_files(path)) > 2
    whole = load_file(checkpoint("qwen3") / "model.safetensors")
    for name, tensor in _weights_in_place(path, torch.float32, monkeypatch).items():
        assert torch.equal(tensor, whole[name]), name


def test_an_embedding_model_has_the_same_tensors_under_shorter_names(
    checkpoint: Callable, broken: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shorten(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    whole = _weights_in_place(checkpoint("llama3"), torch.float32, monkeypatch)
    short = _weights_in_place(broken(shorten, "llama3"), torch.float32, monkeypatch)
    assert whole.keys() == short.keys()
    assert all(torch.equal(whole[name], short[name]) for name in whole)


def test_a_tensor_under_both_names_is_there_twice(broken: Callable) -> None:
    with pytest.raises(ConfigError, match="twice"):
        _load(broken(lambda tensors: tensors.update({"norm.weight": tensors["model.norm.weight"].clone()})))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="asks Linux which file an address is mapped from")
def test_tensors_come_straight_from_the_mapped_file(checkpoint: Callable) -> None:
    files = weight_files(checkpoint("qwen3"))
    for _, tensor in iter_weights(files):
        assert _mapped_file(tensor.data_ptr()) == str(files[0])


def _mapped_file(address: int) -> str | None:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, _, end = line.split()[0].partition("-")
        if int(start, 16) <= address < int(end, 16):
            return line.split(maxsplit=5)[-1]
    return None


def test_fused_weights_are_filled_in_place(checkpoint: Callable, monkeypatch) -> None:
    arrived = _weights_in_place(checkpoint("qwen2"), torch.float32, monkeypatch)
    for names in ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"):
        for kind in ("weight", "bias"):
            parts = [tensor for name, tensor in arrived.items() if name.endswith(tuple(f"{n}.{kind}" for n in names))]
            storages = {part.untyped_storage().data_ptr() for part in parts}
            num_layers = 2
            assert len(storages) * len(names) == len(parts) == (num_layers * len(names) if parts else 0)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"])
def test_what_the_model_has_anyway_is_allowed(broken: Callable, name: str) -> None:
    _load(broken(lambda tensors: tensors.update({name: torch.zeros(3)}), arch="llama3"))  # llama3 here is tied


@pytest.mark.parametrize("name", [Q_PROJ, "model.norm.weight", "lm_head.weight"])
def test_missing_tensor(broken: Callable, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"broken lacks 1 tensor\(s\) that Qwen3ForCausalLM needs: {name}\."):
        _load(broken(lambda tensors: tensors.pop(name)))


@pytest.mark.parametrize(
    ("arch", "name"),
    [
        ("mixtral", "model.layers.1.block_sparse_moe.experts.3.w2.weight"),
        ("gpt-oss", "model.layers.0.self_attn.sinks"),
        ("gemma2", "model.layers.2.pre_feedforward_layernorm.weight"),
    ],
)
def test_missing_tensor_of_another_family(broken: Callable, arch: str, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"broken lacks 1 tensor\(s\) that \w+ForCausalLM needs: {name}\."):
        _load(broken(lambda tensors: tensors.pop(name), arch=arch))


def test_many_missing_tensors_are_counted(broken: Callable) -> None:
    with pytest.raises(ConfigError, match=r"lacks 24 tensor\(s\) .*: lm_head.weight, .* and 19 more\."):
        _load(broken(lambda tensors: [tensors.pop(name) for name in list(tensors) if name != Q_PROJ]))


@pytest.mark.parametrize("name", ["model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "extra"])
def test_unexpected_tensor(broken: Callable, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.safetensors: tensor {name} is not part of Qwen3ForCausalLM"):
        _load(broken(lambda tensors: tensors.update({name: torch.zeros(3)})))


def test_wrong_shape(broken: Callable) -> None:
    message = rf"model\.safetensors: tensor {Q_PROJ} has shape \[96, 63\]; config\.json asks for \[96, 64\]"
    with pytest.raises(ConfigError, match=message):
        _load(broken(lambda tensors: tensors.update({Q_PROJ: torch.zeros(96, 63)})))


@pytest.mark.parametrize(("dtype", "named"), [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3")])
def test_quantized_tensor(broken: Callable, dtype: torch.dtype, named: str) -> None:
    with pytest.raises(ConfigError, match=rf"tensor {Q_PROJ} is {named}; it must be one of BF16, F16, F32, F64"):
        _load(broken(lambda tensors: tensors.update({Q_PROJ: torch.zeros(96, 64).to(dtype)})))


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(lambda data: b"", id="empty"),
        pytest.param(lambda data: data[:1000], id="header cut short"),
        pytest.param(lambda data: data[:-1000], id="data cut short"),
        pytest.param(lambda data: b"\xff" * 16 + data[16:], id="overwritten"),
        pytest.param(lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", id="git-lfs pointer"),
    ],
)
def test_unreadable_file(checkpoint: Callable, tmp_path: Path, content: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "broken"
    shutil.copytree(checkpoint("qwen3"), path)
    file = path / "model.safetensors"
    file.write_bytes(content(file.read_bytes()))
    with pytest.raises(ConfigError, match=r"broken/model\.safetensors is not a readable safetensors file"):
        _load(path)


@contextmanager
def without_rights() -> Iterator[None]:
    """Be another user in the block if the test runs as root, who may read every file."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.mark.parametrize("read", [iter_headers, iter_weights])
def test_a_file_that_may_not_be_read(checkpoint: Callable, tmp_path: Path, read: Callable) -> None:
    shutil.copytree(checkpoint("qwen3"), tmp_path, dirs_exist_ok=True)
    files = weight_files(tmp_path)
    files[0].chmod(0)
    with (
        without_rights(),
        pytest.raises(ConfigError, match=r"cannot read .*/model\.safetensors as user \d+: Permission denied"),
    ):
        list(read(files))


def test_a_file_in_a_directory_that_may_not_be_searched(checkpoint: Callable, tmp_path: Path) -> None:
    blobs = shutil.copytree(checkpoint("qwen3"), tmp_path / "blobs")
    (tmp_path / "model.safetensors").symlink_to(blobs / "model.safetensors")
    blobs.chmod(0)
    with (
        without_rights(),
        pytest.raises(ConfigError, match=r"cannot read .*/model\.safetensors.* as user \d+: Permission"),
    ):
        weight_files(tmp_path)
    blobs.chmod(0o700)


def test_missing_shard(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3", max_shard_size="100KB")
    shard = weight_files(path)[1]
    shard.unlink()
    with pytest.raises(ConfigError, match=rf"{shard.name} is missing, but model\.safetensors\.index\.json names it"):
        _load(path)


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3", max_shard_size="100KB")
    first, second = weight_files(path)[:2]
    twice = dict(list(load_file(first).items())[:1])
    save_file({**load_file(second), **twice}, second)
    with pytest.raises(ConfigError, match=rf"{second.name}: tensor {next(iter(twice))} is in the checkpoint twice"):
        _load(path)


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {}}, {"weight_map": {"a": 1}}])
def test_unusable_index(checkpoint: Callable, tmp_path: Path, index: dict) -> None:
    path = tmp_path / "broken"
    shutil.copytree(checkpoint("qwen3"), path)
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"index\.json has no usable weight_map"):
        _load(path)


def test_no_weights(checkpoint: Callable, tmp_path: Path) -> None:
    shutil.copy(checkpoint("qwen3") / "config.json", tmp_path)
    with pytest.raises(
        ConfigError, match=r"has no weights: looked for model\.safetensors and model\.safetensors\.index"
    ):
        _load(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ConfigError, match=r"has weights in pytorch_model\.bin but none in safetensors.* Convert them"):
        _load(tmp_path)


@pytest.mark.parametrize(
    ("absurd", "message"),
    [
        (
            {"num_hidden_layers": 4096, "sliding_windows": (None,) * 4096, "ropes": (RopeConfig(),) * 4096},
            r"lacks 45034 tensor\(s\)",
        ),
        (
            {"vocab_size": 2**20},
            r"weight has shape \[384, 64\]; config\.json asks for \[1048576, 64\]",
        ),
        ({"intermediate_size": 2**20}, r"has shape .*; config\.json asks for"),
    ],
    ids=["layers", "vocabulary", "width"],
)
def test_a_config_that_does_not_fit_the_files_costs_no_memory(
    checkpoint: Callable, monkeypatch: pytest.MonkeyPatch, absurd: dict[str, Any], message: str
) -> None:
    path = checkpoint("qwen3")
    config = dataclasses.replace(ModelConfig.from_dir(path), **absurd)
    monkeypatch.setattr(loader, "_allocate", lambda *_: pytest.fail("memory was asked for"))
    with pytest.raises(ConfigError, match=message):
        load_model(path, config, dtype=torch.float32, device="cpu", backend=CPU)


@pytest.mark.parametrize("overrides", [{}, {"attention_bias": True, "mlp_bias": True}])
def test_number_of_parameters(checkpoint: Callable, overrides: dict[str, Any]) -> None:
    path = checkpoint("llama3", **overrides)
    tensors = load_file(path / "model.safetensors")
    assert _load(path).num_parameters == sum(tensor.numel() for tensor in tensors.values())


def test_larger_than_the_machine(checkpoint: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint("qwen3")
    config = ModelConfig.from_dir(path)
    num_parameters = _load(path).num_parameters
    monkeypatch.setattr(loader, "available_memory_bytes", lambda: 4 * num_parameters - 1)
    message = (
        r"Qwen3ForCausalLM needs .* GiB for its weights as torch\.float32, which cpu cannot give \(.* GiB are free\)"
    )
    with pytest.raises(ConfigError, match=message):
        load_model(path, config, dtype=torch.float32, device="cpu", backend=CPU)
    load_model(path, config, dtype=torch.bfloat16, device="cpu", backend=CPU)


def test_what_the_allocator_refuses(checkpoint: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "available_memory_bytes", lambda: 2**60)
    config = dataclasses.replace(ModelConfig.from_dir(checkpoint("qwen3")), intermediate_size=2**45)
    with pytest.raises(ConfigError, match=r"which cpu cannot give \(.*you tried to allocate"):
        loader._allocate(config, 64, Place(torch.float32, torch.device("cpu"), CPU), num_bytes=2**50)


def test_dtype_names(checkpoint: Callable) -> None:
    config = ModelConfig.from_dir(checkpoint("qwen3", dtype=torch.bfloat16))
    assert resolve_dtype("auto", config) == "bfloat16"
    assert resolve_dtype("float32", config) == "float32"
    with pytest.raises(ConfigError, match="--dtype is 'int8'; it must be one of auto, bfloat16, float16, float32"):
        resolve_dtype("int8", config)
