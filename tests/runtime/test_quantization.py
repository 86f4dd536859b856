"""Linear layers in 8 and 4 bits: how little they change what a model says, and that nothing else changes it."""

import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints import make_checkpoint
from engines import GREEDY, INT8_KV, Reference, generate, make_engine, random_prompts
from flyball_kernels import Backend
from flyball_kernels.linear.reference import Grouped, round_groups, round_rows, round_to_float8, unrounded
from flyball_runtime.core.config import EngineConfig
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.llm import LLM
from flyball_runtime.model.attention_probe import probe
from flyball_runtime.model.loader import load_model

DEMO_MODEL = Path(__file__).parents[2] / "examples" / "demo_model"


def one_fast(*architectures: str) -> list[Any]:
    """Return parameters of which only the first is of a test that is always run."""
    return [architectures[0], *(pytest.param(one, marks=pytest.mark.slow) for one in architectures[1:])]


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Texts of the kind that the demo model was trained on."""
    monkeypatch.syspath_prepend(DEMO_MODEL)
    import corpus

    yield list(islice(corpus.documents(seed=4_000_000), 40))
    for name in ("corpus", "families", "grammar", "stories", "words"):
        sys.modules.pop(name, None)


W8A8: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "ignore": ["lm_head", "re:.*mlp.gate$"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "output_activations": None,
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}
"""What llm-compressor writes into config.json for its scheme W8A8."""


def quantize(path: Path, change: Callable[[dict[str, Tensor], dict[str, Any]], object] = lambda *_: None) -> Path:
    """Round the linear layers of a checkpoint of one file as llm-compressor does, whose scales divide by 127.5."""
    tensors = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        if re.search(r"(_proj|experts\.\d+\.w\d)\.weight$", name):
            scales = tensor.float().abs().amax(1, keepdim=True) / 127.5
            tensors[name] = (tensor / scales).round().clamp(-128, 127).to(torch.int8)
            tensors[name.replace(".weight", ".weight_scale")] = scales.to(tensor.dtype)
        else:
            tensors[name] = tensor
    config = json.loads((path / "config.json").read_text()) | {"quantization_config": json.loads(json.dumps(W8A8))}
    change(tensors, config)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


def round_inputs(module: torch.nn.Linear, inputs: tuple[Tensor, ...]) -> Tensor:
    x = inputs[0].flatten(0, -2)
    rounded = round_rows(x)
    return (rounded.values * rounded.scales[:, None]).view(inputs[0].shape)


def rounding_reference(path: Path, *, head: bool) -> Reference:
    """Return transformers' model of a checkpoint that is not quantized, with layers that round their inputs and have
    the weights of ``quantize``; with ``head``, those that ``--quantization int8`` makes."""

    reference = Reference(path)
    for name, module in reference._model.named_modules():
        if not isinstance(module, torch.nn.Linear) or (name == "lm_head" and not head):
            continue
        if head:
            values, scales = round_rows(module.weight)
            scales = scales[:, None]
        else:
            scales = module.weight.abs().amax(1, keepdim=True) / 127.5
            values = (module.weight / scales).round().clamp(-128, 127)
        module.weight = torch.nn.Parameter(values * scales)  # no longer the embedding's
        module.register_forward_pre_hook(round_inputs)
    return reference


def set_field(*keys: str, to: object) -> Callable[[dict[str, Tensor], dict[str, Any]], object]:
    def change(_: dict[str, Tensor], config: dict[str, Any]) -> None:
        part = config["quantization_config"]
        for key in keys[:-1]:
            part = part[key]
        part[keys[-1]] = to

    return change


GROUP = ("config_groups", "group_0")


def float8_config(**changes: object) -> dict[str, Any]:
    """Return what llm-compressor writes for its scheme FP8_DYNAMIC, with changes to the scheme of weights."""
    weights, inputs = (
        {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": strategy == "token"}
        for strategy in ("channel", "token")
    )
    group = {"targets": ["Linear"], "weights": weights | changes, "input_activations": inputs}
    return W8A8 | {"format": "float-quantized", "config_groups": {"group_0": group}}


def float8_checkpoint(
    path: Path, change: Callable[[dict[str, Tensor], dict[str, Any]], object] = lambda *_: None, **changes: object
) -> Reference:
    """Round the linear layers of a checkpoint to e4m3; return transformers' model with the rounded weights."""
    reference, tensors = Reference(path), {}
    modules = dict(reference._model.named_modules())
    per_tensor = changes.get("strategy") == "tensor"
    for key, tensor in load_file(path / "model.safetensors").items():
        tensors[key] = tensor
        if key.endswith("_proj.weight"):
            most = tensor.abs().amax().view(1) if per_tensor else tensor.abs().amax(1, keepdim=True)
            scales = (most / 448).bfloat16()
            values = (tensor / scales.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
            tensors |= {key: values, f"{key}_scale": scales}
            modules[key.removesuffix(".weight")].weight = torch.nn.Parameter(values.float() * scales.float())
    config = json.loads((path / "config.json").read_text()) | {"quantization_config": float8_config(**changes)}
    change(tensors, config)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return reference


def with_static_inputs(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Add what llm-compressor writes for its scheme FP8, whose inputs have one scale that was measured before."""
    set_field(*GROUP, "input_activations", "strategy", to="tensor")(tensors, config)
    set_field(*GROUP, "input_activations", "dynamic", to=False)(tensors, config)
    names = [name for name in tensors if name.endswith(".weight_scale")]
    tensors.update({name.replace(".weight_scale", ".input_scale"): torch.tensor([0.25]) for name in names})


GROUP_SIZE = 32
AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight columns AWQ has in each place of a word, from the lowest bits on."""


def packed(values: Tensor, dim: int, bits: int, places: Sequence[int] | None = None) -> Tensor:
    """Return ``values`` of so many bits with neighbours along ``dim`` in a word of 32."""
    places = range(32 // bits) if places is None else places
    words_of = values.to(torch.int64).movedim(dim, -1).unflatten(-1, (-1, len(places)))
    words = sum(words_of[..., column] << bits * place for place, column in enumerate(places))
    return (words - ((words >> 31) << 32)).to(torch.int32).movedim(-1, dim).contiguous()  # as signed numbers


def compressed_tensors(weight: Grouped) -> dict[str, Tensor]:
    tensors = {
        "weight_packed": packed(weight.values, 1, weight.bits),
        "weight_scale": weight.scales,
        "weight_shape": torch.tensor(weight.values.shape),
    }
    return tensors if weight.zeros is None else tensors | {"weight_zero_point": packed(weight.zeros, 0, weight.bits)}


def gptq(weight: Grouped, stored_less: int = 1) -> dict[str, Tensor]:
    assert weight.zeros is not None
    return {
        "qweight": packed(weight.values.T, 0, weight.bits),
        "qzeros": packed((weight.zeros.T - stored_less) & (2**weight.bits - 1), 1, weight.bits),
        "scales": weight.scales.T.half().contiguous(),
        "g_idx": torch.arange(weight.values.shape[1], dtype=torch.int32) // weight.group_size,
    }


def awq(weight: Grouped) -> dict[str, Tensor]:
    assert weight.zeros is not None
    return {
        "qweight": packed(weight.values.T, 1, 4, AWQ_PLACES),
        "qzeros": packed(weight.zeros.T, 1, 4, AWQ_PLACES),
        "scales": weight.scales.T.half().contiguous(),
    }


def weight_only(**weights: object) -> dict[str, Any]:
    scheme = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP_SIZE, "dynamic": False} | weights
    group = {"targets": ["Linear"], "weights": scheme, "input_activations": None, "output_activations": None}
    return W8A8 | {"format": "pack-quantized", "config_groups": {"group_0": group}}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP_SIZE, "desc_act": False, "sym": False, "lm_head": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP_SIZE, "zero_point": True, "version": "gemm"}

PACKINGS: dict[str, tuple[dict[str, Any], Callable[[Grouped], dict[str, Tensor]]]] = {
    "compressed-tensors": (weight_only(symmetric=True), compressed_tensors),
    "compressed-tensors, zeros": (weight_only(symmetric=False), compressed_tensors),
    "compressed-tensors, channels": (
        weight_only(symmetric=True, strategy="channel", group_size=None),
        compressed_tensors,
    ),
    "compressed-tensors, 8 bits": (weight_only(num_bits=8, symmetric=True), compressed_tensors),
    "compressed-tensors, 8 bits, channels, zeros": (
        weight_only(num_bits=8, symmetric=False, strategy="channel", group_size=None),
        compressed_tensors,
    ),
    "gptq": (GPTQ, gptq),
    "gptq, 8 bits": (GPTQ | {"bits": 8}, gptq),
    "gptq, one group": (GPTQ | {"group_size": -1, "desc_act": True}, gptq),
    "gptq_v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, partial(gptq, stored_less=0)),
    "awq": (AWQ, awq),
}
"""What config.json says, and the tensors of a weight."""


def pack_checkpoint(path: Path, name: str, change: Callable[[dict[str, Tensor], dict[str, Any]], object]) -> Reference:
    """Round the linear layers of a checkpoint to 4 or 8 bits; return transformers' model with the rounded weights."""
    reference, (config, pack) = Reference(path), PACKINGS[name]
    modules, tensors = dict(reference._model.named_modules()), {}
    seeded = torch.Generator().manual_seed(0)
    for key, tensor in load_file(path / "model.safetensors").items():
        if not key.endswith("_proj.weight"):
            tensors[key] = tensor
            continue
        one_group = "channels" in name or "one group" in name
        bits = 8 if "8 bits" in name else 4
        grouped = round_groups(tensor, tensor.shape[1] if one_group else GROUP_SIZE, bits)
        grouped = grouped._replace(scales=grouped.scales.half().float())
        if "zeros" in name or "tensors" not in name:
            few = grouped.middle // 4
            zeros = torch.randint(-few, few, grouped.scales.shape, generator=seeded) + grouped.middle
            zeros = zeros.to(torch.uint8)
            grouped = grouped._replace(zeros=zeros)
        prefix = key.removesuffix(".weight")
        tensors |= {f"{prefix}.{part}": one for part, one in pack(grouped).items()}
        modules[prefix].weight = torch.nn.Parameter(unrounded(grouped))
    whole = json.loads((path / "config.json").read_text()) | {"quantization_config": json.loads(json.dumps(config))}
    change(tensors, whole)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(whole))
    return reference


def settings_on_cpu(quantization: str) -> dict[str, str]:
    """Return settings of an engine on a CPU, where the C++ ops have no code for fp8."""
    return {"quantization": quantization} | ({"kernel_backend": "torch"} if quantization == "fp8" else {})


def nats_per_token(texts: list[str], **settings: object) -> float:
    llm = LLM(DEMO_MODEL / "checkpoint", **settings)
    outputs = llm.generate(texts, SamplingParams(max_tokens=1, prompt_logprobs=0))
    found = [one.logprob for output in outputs for one in (output.prompt_logprobs or [])[1:] if one is not None]
    return -math.fsum(one for one in found if one is not None) / len(found)


def test_the_perplexity_of_a_trained_model_hardly_grows(texts: list[str]) -> None:
    exact = nats_per_token(texts, dtype="float32")
    rounded = nats_per_token(texts, dtype="bfloat16", quantization="int8")
    print(exact, nats_per_token(texts, dtype="bfloat16"), rounded)
    assert rounded != exact
    assert math.exp(rounded - exact) < 1.01


def test_the_perplexity_with_keys_and_values_in_8_bits_hardly_grows(texts: list[str]) -> None:
    exact = nats_per_token(texts, dtype="float32")
    rounded = [nats_per_token(texts, dtype=dtype, **INT8_KV) for dtype in ("float32", "bfloat16")]
    print(exact, nats_per_token(texts, dtype="bfloat16"), *rounded)
    assert exact not in rounded
    assert max(math.exp(one - exact) for one in rounded) < 1.01


@pytest.mark.parametrize(("quantization", "most"), [("w8a16", 1.005), ("int4", 1.05), ("w4a8", 1.05), ("fp8", 1.01)])
def test_the_perplexity_of_rounded_weights_grows_little(texts: list[str], quantization: str, most: float) -> None:
    exact = nats_per_token(texts, dtype="float32")
    rounded = nats_per_token(texts, dtype="bfloat16", **settings_on_cpu(quantization))
    print(exact, rounded)
    assert rounded != exact
    assert math.exp(rounded - exact) < most


@pytest.mark.parametrize("architecture", one_fast("llama3", "qwen2", "phi3", "gemma2", "smollm3"))
@pytest.mark.parametrize("stored", [False, True], ids=["rounded at load", "quantized checkpoint"])
def test_tokens_are_those_of_transformers_with_layers_that_round(
    tmp_path: Path, architecture: str, stored: bool
) -> None:
    path, prompts = make_checkpoint(tmp_path, architecture), random_prompts([40, 3, 70, 1, 25])
    expected = rounding_reference(path, head=not stored).generate(prompts)
    engine = make_engine(quantize(path)) if stored else make_engine(path, quantization="int8")
    found = generate(engine, prompts)
    assert [one[0] for one in found] == [one[0] for one in expected]
    # sums in another order: once in a while an input that differs in its last bit is rounded to the next number
    assert sum(one == other for one, other in zip(found, expected, strict=True)) >= len(prompts) - 1
    assert engine.info.quantization == "int8"


@pytest.mark.parametrize("quantization", ["int4", "w8a16", "fp8"])
@pytest.mark.parametrize("architecture", one_fast("llama3", "phi3", "gemma2", "mixtral"))
def test_tokens_are_those_of_transformers_with_rounded_weights(
    tmp_path: Path, architecture: str, quantization: str
) -> None:
    path, prompts = make_checkpoint(tmp_path, architecture), random_prompts([40, 3, 70, 1, 25])
    reference = Reference(path)
    bits, group_size = (4, 32) if quantization == "int4" else (8, 128)

    def rounded(weight: Tensor) -> Tensor:
        if quantization == "fp8":
            values, scales = round_to_float8(weight)
            return values.float() * scales[:, None]
        return unrounded(round_groups(weight, group_size, bits))

    head = reference._model.lm_head
    if quantization == "int4":
        values, scales = round_rows(head.weight)
        head.weight = torch.nn.Parameter(values * scales[:, None])  # no longer the embedding's
        head.register_forward_pre_hook(round_inputs)
    else:
        head.weight = torch.nn.Parameter(rounded(head.weight))
    for name, module in reference._model.named_modules():
        if name.endswith("experts"):  # all of a layer in one tensor
            for weights in (module.gate_up_proj, module.down_proj):
                weights.data = torch.stack([rounded(one) for one in weights])
        elif isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.weight = torch.nn.Parameter(rounded(module.weight))
    engine = make_engine(path, **settings_on_cpu(quantization))
    found, expected = generate(engine, prompts), reference.generate(prompts)
    assert [one[0] for one in found] == [one[0] for one in expected]
    # as in 8 bits, which the head has
    assert sum(one == other for one, other in zip(found, expected, strict=True)) >= len(prompts) - 1
    assert engine.info.quantization == quantization


@pytest.mark.parametrize("architecture", one_fast("qwen3", "phi3", "gemma2"))
@pytest.mark.parametrize("name", PACKINGS)
def test_checkpoints_in_groups_mean_what_they_say(tmp_path: Path, architecture: str, name: str) -> None:
    path, prompts = make_checkpoint(tmp_path, architecture), random_prompts([40, 3, 70, 1, 25])
    expected = pack_checkpoint(path, name, lambda *_: None).generate(prompts)
    num_parameters = make_engine(make_checkpoint(tmp_path / "whole", architecture)).info.num_parameters
    engine = make_engine(path)
    assert generate(engine, prompts) == expected
    quantization = "w8a16" if "8 bits" in name else "int4"
    assert (engine.info.quantization, engine.info.num_parameters) == (quantization, num_parameters)
    assert generate(make_engine(path, kernel_backend="torch"), prompts) == expected


@pytest.mark.parametrize("architecture", one_fast("qwen3", "phi3"))
@pytest.mark.parametrize("strategy", ["channel", "tensor"])
@pytest.mark.parametrize(
    "change",
    [lambda *_: None, set_field(*GROUP, "input_activations", to=None), with_static_inputs],
    ids=["dynamic inputs", "weights alone", "static inputs"],
)
def test_fp8_checkpoints_mean_what_they_say(
    tmp_path: Path, architecture: str, strategy: str, change: Callable[[dict[str, Tensor], dict[str, Any]], object]
) -> None:
    """Inputs are not rounded, whatever the checkpoint says of them."""
    path, prompts = make_checkpoint(tmp_path, architecture), random_prompts([40, 3, 70, 1, 25])
    expected = float8_checkpoint(path, change, strategy=strategy).generate(prompts)
    whole = make_engine(make_checkpoint(tmp_path / "whole", architecture))
    engine = make_engine(path, kernel_backend="torch")
    assert generate(engine, prompts) == expected
    assert generate(whole, prompts) != expected  # the rounding is there
    assert (engine.info.quantization, engine.info.num_parameters) == ("fp8", whole.info.num_parameters)


@pytest.mark.parametrize("name", [name for name in PACKINGS if "8 bits" not in name])
def test_inputs_beside_a_checkpoint_in_4_bits_have_8_if_asked(tmp_path: Path, name: str) -> None:
    path, prompts = make_checkpoint(tmp_path, "qwen3"), random_prompts([40, 3, 70, 1, 25])
    exact = pack_checkpoint(path, name, lambda *_: None).generate(prompts)
    engine = make_engine(path, quantization="w4a8")
    found, expected = (
        generate(engine, prompts),
        generate(make_engine(path, quantization="w4a8", kernel_backend="torch"), prompts),
    )
    # an input halfway between two whole numbers falls to either of them, by the order of the sums that it is made of
    assert sum(one == other for one, other in zip(found, expected, strict=True)) >= len(prompts) - 1
    assert sum(one[0] == other[0] for one, other in zip(found, exact, strict=True)) >= len(prompts) - 1
    assert engine.info.quantization == "w4a8"
    int8 = quantize(make_checkpoint(tmp_path / "int8", "qwen3"))
    assert make_engine(int8, quantization="w4a8").info.quantization == "int8"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gptq", set_field("bits", to=3), "quantization_config.bits is 3; it must be 4 or 8"),
        ("gptq", set_field("bits", to=[4]), r"quantization_config.bits is \[4\]; it must be 4 or 8"),
        ("awq", set_field("bits", to=8), "quantization_config.bits is 8; it must be 4"),
        ("gptq", set_field("lm_head", to=True), "lm_head is True; it must be absent or false"),
        ("gptq", set_field("desc_act", to=True), "desc_act is True; it must be false: features of"),
        ("gptq", set_field("checkpoint_format", to="marlin"), "checkpoint_format is 'marlin'"),
        ("gptq", set_field("group_size", to=12), "group_size is 12; it must be a multiple of 8"),
        ("gptq", set_field("group_size", to=24), "64 input features, and gptq in groups of 24"),
        (
            "gptq",
            lambda tensors, _: tensors["model.layers.0.mlp.up_proj.g_idx"].copy_(torch.arange(64) % 2),
            "up_proj.g_idx does not say that features of a group are neighbours",
        ),
        (
            "gptq",
            lambda tensors, _: tensors.update({"model.layers.0.mlp.up_proj.qweight": torch.zeros(8, 1)}),
            "up_proj.qweight has shape",
        ),
        ("awq", set_field("version", to="gemv"), "version is 'gemv'; it must be gemm"),
        ("awq", set_field("zero_point", to=False), "zero_point is False; it must be true"),
        (
            "compressed-tensors",
            set_field(*GROUP, "weights", "actorder", to="group"),
            "weights.actorder is 'group'; it must be absent, weight or static",
        ),
        (
            "compressed-tensors",
            set_field(*GROUP, "weights", "num_bits", to=2),
            "weights.num_bits is 2; it must be 4 or 8",
        ),
        (
            "compressed-tensors",
            set_field(*GROUP, "input_activations", to={"num_bits": 8}),
            "input_activations is .* must be absent: with pack-quantized",
        ),
        (
            "compressed-tensors",
            lambda tensors, _: tensors["model.layers.0.mlp.up_proj.weight_shape"].fill_(1),
            r"up_proj.weight_shape is \[1, 1\]; config.json asks for",
        ),
    ],
)
def test_checkpoints_in_groups_that_cannot_be_read_say_why(
    tmp_path: Path, name: str, change: Callable[[dict[str, Tensor], dict[str, Any]], object], message: str
) -> None:
    path = make_checkpoint(tmp_path, "llama3")
    pack_checkpoint(path, name, change)
    with pytest.raises(ConfigError, match=message):
        make_engine(path)


@pytest.mark.parametrize("quantization", ["int8", "w8a16", "int4", "w4a8"])
@pytest.mark.parametrize("architecture", one_fast("llama3", "gemma3", "mixtral", "gpt-oss"))
def test_tokens_do_not_depend_on_other_requests_chunks_or_threads(
    tmp_path: Path, architecture: str, quantization: str
) -> None:
    path = make_checkpoint(tmp_path, architecture)
    prompts = random_prompts([40, 3, 70, 1, 25])
    whole = make_engine(path, quantization=quantization)
    expected = [generate(whole, [prompt])[0] for prompt in prompts]
    assert generate(whole, prompts) == expected
    chunked = make_engine(path, quantization=quantization, max_num_batched_tokens=16, enable_prefix_caching=False)
    assert generate(chunked, prompts) == expected
    assert whole.info.key.split("/")[1:][-3] == f"float32+{quantization}"


@pytest.mark.parametrize("quantization", ["int8", "w8a16", "int4", "w4a8"])
def test_the_reference_says_the_same(tmp_path: Path, quantization: str) -> None:
    path, prompts = make_checkpoint(tmp_path, "qwen3"), random_prompts([30, 8])
    expected = generate(make_engine(path, quantization=quantization, kernel_backend="torch"), prompts)
    assert generate(make_engine(path, quantization=quantization), prompts) == expected
    assert generate(make_engine(path), prompts, GREEDY) != expected


FEW = SamplingParams(temperature=0.0, max_tokens=2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, the test below runs the compiled kernels")
@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("int8", "w8a16", "int4", "fp8")),
        "gptq",
        "fp8 checkpoint",
    ],
)
def test_triton_says_the_same(tmp_path: Path, name: str) -> None:
    """Rounded at load, and checkpoints with zeros and of fp8; in Triton's interpreter."""
    path, prompts = make_checkpoint(tmp_path, "qwen3"), random_prompts([6, 3])
    settings: dict[str, Any] = {"max_num_batched_tokens": 8, "max_model_len": 32}
    if name == "gptq":
        pack_checkpoint(path, name, lambda *_: None)
    elif name == "fp8 checkpoint":
        float8_checkpoint(path)
    else:
        settings["quantization"] = name
    expected = generate(make_engine(path, kernel_backend="torch", **settings), prompts, FEW)
    assert generate(make_engine(path, kernel_backend="triton", **settings), prompts, FEW) == expected


@pytest.mark.slow
def test_triton_says_the_same_of_experts(tmp_path: Path) -> None:
    path, prompts = make_checkpoint(tmp_path, "mixtral"), random_prompts([6, 3])
    settings: dict[str, Any] = {"max_num_batched_tokens": 8, "max_model_len": 32, "quantization": "int4"}
    expected = generate(make_engine(path, kernel_backend="torch", **settings), prompts, FEW)
    assert generate(make_engine(path, kernel_backend="triton", **settings), prompts, FEW) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ["qwen3", "mixtral"])
@pytest.mark.parametrize("quantization", ["int8", "w8a16", "int4", "fp8"])
def test_a_gpu_says_the_same(tmp_path: Path, quantization: str, architecture: str) -> None:
    path, prompts = make_checkpoint(tmp_path, architecture), random_prompts([30, 8, 100])
    expected = generate(make_engine(path, **settings_on_cpu(quantization)), prompts)
    assert generate(make_engine(path, quantization=quantization, device="cuda"), prompts) == expected


def test_what_cannot_be_rounded_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama3")
    with pytest.raises(
        ConfigError, match="--quantization is 'int3'; it must be one of none, int8, w8a16, int4, w4a8, fp8"
    ):
        EngineConfig(model=str(path), served_model_name="m", quantization="int3")
    with pytest.raises(ConfigError, match="--quantization w4a8 has no kernel for GPUs, nor for the triton backend"):
        make_engine(path, quantization="w4a8", kernel_backend="triton")
    with pytest.raises(
        ConfigError, match=r"--quantization fp8 cannot be served by the C\+\+ ops, .* int8 or w8a16, which"
    ):
        make_engine(path, quantization="fp8", kernel_backend="cpp")
    for quantization in ("int8", "fp8"):
        settings = {"dtype": torch.float32, "device": "cpu", "quantization": quantization}
        with pytest.raises(ConfigError, match="runs in transformers, whose layers are not rounded"):
            load_model(path, probe(path), backend=Backend("torch"), **settings)


@pytest.mark.parametrize("architecture", one_fast("mixtral", "qwen3 moe"))
def test_a_quantized_mixture_of_experts(tmp_path: Path, architecture: str) -> None:
    path, prompts = make_checkpoint(tmp_path, architecture), random_prompts([40, 3, 70])
    exact = generate(make_engine(path), prompts)
    quantized = generate(make_engine(quantize(path)), prompts)
    assert quantized == generate(make_engine(path, kernel_backend="torch"), prompts)
    assert quantized != exact


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_field("quant_method", to="bitsandbytes"), r"quantization_config \('bitsandbytes'\): of quantized check"),
        (
            set_field("quant_method", to=["awq"]),
            r"quantization_config \(\"\['awq'\]\"\): of quantized checkpoints only",
        ),
        (
            set_field("quant_method", to="fp8"),
            r"\(fp8 that is not of compressed-tensors, mostly with scales of blocks, which have no kernel",
        ),
        (set_field("format", to="marlin-24"), "quantization_config.format is 'marlin-24'; it must be one of"),
        (set_field("format", to="float-quantized"), "group_0.weights.type is 'int'; it must be 'float'"),
        (set_field("kv_cache_scheme", to={"num_bits": 8}), "quantization_config.kv_cache_scheme is .* must be absent"),
        (set_field("sparsity_config", to={"format": "sparse-24-bitmask"}), "sparsity_config is .* must be absent"),
        (set_field("config_groups", to={}), "config_groups is {}; it must be an object with one group"),
        (set_field(*GROUP, "targets", to=["re:.*q_proj"]), r"group_0.targets is \['re:.*; it must be \['Linear'\]"),
        (set_field(*GROUP, "weights", "num_bits", to=4), "group_0.weights.num_bits is 4; it must be 8"),
        (set_field(*GROUP, "weights", "strategy", to="group"), "weights.strategy is 'group'; it must be 'channel'"),
        (set_field(*GROUP, "input_activations", to=None), "input_activations.num_bits is None; it must be 8"),
        (set_field(*GROUP, "input_activations", "dynamic", to=False), "input_activations.dynamic is False"),
        (
            lambda tensors, _: tensors.update({"model.layers.0.self_attn.o_proj.weight": torch.zeros(64, 64)}),
            "o_proj.weight is F32, and by config.json it is I8. Checkpoints with some linear layers in another",
        ),
        (
            lambda tensors, _: tensors.pop("model.layers.0.self_attn.o_proj.weight_scale"),
            "lacks 1 tensor.s. that LlamaForCausalLM needs: model.layers.0.self_attn.o_proj.weight_scale",
        ),
        (
            lambda tensors, _: tensors.update({"lm_head.weight": torch.zeros(384, 64, dtype=torch.int8)}),
            "tensor lm_head.weight is I8; it must be one of BF16",
        ),
    ],
)
def test_quantized_checkpoints_that_cannot_be_read_say_why(
    tmp_path: Path, change: Callable[[dict[str, Tensor], dict[str, Any]], object], message: str
) -> None:
    path = quantize(make_checkpoint(tmp_path, "llama3", tie_word_embeddings=False), change)
    with pytest.raises(ConfigError, match=message):
        make_engine(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda *_: None,
            r"a checkpoint in fp8 cannot be served by the C\+\+ ops, .* or --kernel-backend torch, which",
        ),
        (set_field(*GROUP, "weights", "num_bits", to=4), "group_0.weights.num_bits is 4; it must be 8"),
        (set_field(*GROUP, "weights", "symmetric", to=False), "weights.symmetric is False; it must be True"),
        (set_field(*GROUP, "weights", "dynamic", to=True), "weights.dynamic is True; it must be False"),
        (set_field(*GROUP, "weights", "strategy", to="block"), "weights.strategy is 'block'; it must be 'channel' or"),
        (
            set_field(*GROUP, "weights", "strategy", to="tensor"),
            r"weight_scale has shape \[\d+, 1\]; config.json asks for",
        ),
        (
            set_field(*GROUP, "input_activations", "type", to="int"),
            "input_activations.type is 'int'; it must be 'float'",
        ),
        (
            lambda tensors, _: tensors.update({"model.layers.0.self_attn.o_proj.weight": torch.zeros(64, 64)}),
            "o_proj.weight is F32, and by config.json it is F8_E4M3. Checkpoints with some linear layers in another",
        ),
        (
            lambda tensors, _: tensors.pop("model.layers.0.self_attn.o_proj.weight_scale"),
            "lacks 1 tensor.s. that LlamaForCausalLM needs: model.layers.0.self_attn.o_proj.weight_scale",
        ),
        (
            lambda tensors, _: tensors.update({"model.layers.0.self_attn.k_scale": torch.ones(1)}),
            "tensor model.layers.0.self_attn.k_scale is not part of LlamaForCausalLM",
        ),
    ],
)
def test_fp8_checkpoints_that_cannot_be_read_say_why(
    tmp_path: Path, change: Callable[[dict[str, Tensor], dict[str, Any]], object], message: str
) -> None:
    path = make_checkpoint(tmp_path, "llama3")
    float8_checkpoint(path, change)
    with pytest.raises(ConfigError, match=message):
        make_engine(path, kernel_backend="cpp" if "ops" in message else "torch")
