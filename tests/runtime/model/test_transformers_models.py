"""Models that transformers implements, with Flyball's attention: what is read off them, what is refused, and the results."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.testing import assert_close
from transformers.models.starcoder2.modeling_starcoder2 import Starcoder2MLP

from checkpoints import OTHER_ARCHITECTURES, VOCAB_SIZE
from engines import Reference, generate, make_engine, random_prompts
from flyball_kernels import choose_backend
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.model.attention_probe import TransformersModel, probe
from flyball_runtime.model.loader import describe_model, load_model
from flyball_runtime.model.transformers_lm import TransformersLM, _three_sequences

CPU = torch.device("cpu")


@pytest.fixture
def write_config(tmp_path: Path) -> Callable[..., Path]:
    """``write_config(architecture, **fields)``: a directory with transformers' config.json of it, and no weights."""

    def write(architecture: str, **fields: Any) -> Path:
        config = getattr(transformers, architecture).config_class(**fields)
        config.architectures = [architecture]
        config.save_pretrained(tmp_path)
        return tmp_path

    return write


def load(path: Path, model_impl: str = "auto") -> TransformersLM:
    config = describe_model(path, model_impl)
    model = load_model(path, config, dtype=torch.float32, device=CPU, backend=choose_backend(CPU), max_model_len=256)
    assert isinstance(model, TransformersLM)
    return model


def kv_of(model: TransformersLM) -> list[tuple[Tensor, Tensor]]:
    shape = (3, 8, model.config.num_key_value_heads, model.config.head_dim)
    return [(torch.zeros(shape), torch.zeros(shape)) for _ in range(model.layout.num_tensors)]


@pytest.mark.parametrize(
    ("arch", "num_kv_heads", "head_dim", "windows"),
    [
        ("starcoder2", 2, 16, (24, 24)),
        ("gpt-neox", 4, 16, (None, None)),
        ("cohere2", 2, 16, (20, None, 20)),
        ("glm", 2, 24, (None, None)),
        ("olmoe", 2, 16, (None, None)),
    ],
)
def test_what_the_engine_needs_is_read_off_a_forward_pass(
    arch: str, num_kv_heads: int, head_dim: int, windows: tuple[int | None, ...], checkpoint: Callable[..., Path]
) -> None:
    config = probe(checkpoint(arch))
    assert (config.num_key_value_heads, config.head_dim, config.sliding_windows) == (num_kv_heads, head_dim, windows)
    assert (config.vocab_size, config.max_context_len, config.eos_token_ids) == (VOCAB_SIZE, 512, {1, 3})
    assert config.kv_bytes_per_layer("float32") == 2 * 4 * num_kv_heads * head_dim
    assert len({call.layer for call in config.calls}) == len(windows)


def test_every_other_architecture_of_the_tests_has_one_case_above() -> None:
    assert set(OTHER_ARCHITECTURES) == {"starcoder2", "gpt-neox", "cohere2", "glm", "olmoe"}


@pytest.mark.parametrize("arch", ["gemma2", "gpt-oss", "qwen3 windows"])  # soft cap, sinks and experts, windows
def test_a_native_architecture_by_request(arch: str, checkpoint: Callable[..., Path]) -> None:
    path, prompts = checkpoint(arch), random_prompts([5, 40])
    engine = make_engine(path, model_impl="transformers", max_num_batched_tokens=13)
    assert generate(engine, prompts) == Reference(path).generate(prompts)


def test_learned_positions(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """GPT-2: other names of fields, other layers, no RoPE."""
    config = transformers.GPT2Config(vocab_size=VOCAB_SIZE, n_embd=64, n_layer=2, n_head=4, n_positions=300)
    config.eos_token_id = 1
    transformers.GPT2LMHeadModel(config).eval().save_pretrained(tmp_path)
    prompts = random_prompts([5, 40])
    engine = make_engine(tmp_path, max_model_len=None, max_num_batched_tokens=13)
    assert engine.info.max_model_len == 300
    assert generate(engine, prompts) == Reference(tmp_path).generate(prompts)


def test_hidden_states_are_those_after_the_last_norm(checkpoint: Callable[..., Path]) -> None:
    path = checkpoint("starcoder2")
    model, hidden = load(path), []
    inputs = _three_sequences(len(model.layout.groups), VOCAB_SIZE, CPU)
    model.forward(inputs, kv_of(model), pool=lambda states_of: hidden.append(states_of(torch.arange(12))))
    theirs = transformers.AutoModel.from_pretrained(path)
    with torch.inference_mode():
        assert_close(hidden[0], theirs(torch.arange(12).view(3, 4)).last_hidden_state.flatten(0, 1))


def test_logits_of_chosen_tokens_come_from_one_pass(checkpoint: Callable[..., Path]) -> None:
    model = load(checkpoint("cohere2"))
    inputs = _three_sequences(len(model.layout.groups), VOCAB_SIZE, CPU)
    layers: list[str] = []
    scored: list[Tensor] = []

    def score(logits_of: Callable[[Tensor], Tensor]) -> None:
        scored.extend(logits_of(torch.tensor(wanted)) for wanted in ([0, 5], [11]))

    logits = model.forward(inputs, kv_of(model), lambda: layers.append("done"), score)
    assert (logits.shape, logits.dtype, len(layers)) == ((12, VOCAB_SIZE), torch.float32, 3)
    assert_close(torch.cat(scored), logits[[0, 5, 11]])
    assert_close(model.forward(inputs, kv_of(model)), logits)  # the decoder computes again


def test_start_up_times_a_layer_and_the_head(checkpoint: Callable[..., Path]) -> None:
    model = load(checkpoint("cohere2"))
    inputs = _three_sequences(len(model.layout.groups), VOCAB_SIZE, CPU)
    layer, head = model.timed_parts(inputs, kv_of(model), 5)
    ran: list[str] = []
    for call in model.config.calls:
        model._model.get_submodule(call.layer).register_forward_hook(lambda *_, name=call.layer: ran.append(name))
    with torch.inference_mode():
        layer()
        assert head().shape == (5, VOCAB_SIZE)
    assert ran == ["model.layers.1"], "the one without a window, once"


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        (
            "Lfm2ForCausalLM",
            {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
            r"Lfm2ForCausalLM has layers of kind conv: a hybrid cache.*in which every layer is full or",
        ),
        ("JambaForCausalLM", {}, "JambaForCausalLM has .*: a hybrid cache"),
        ("MambaForCausalLM", {}, "MambaForCausalLM has .*: a hybrid cache"),
        ("RecurrentGemmaForCausalLM", {}, "RecurrentGemmaForCausalLM has .*: a hybrid cache"),
        ("Qwen3NextForCausalLM", {}, "has layers of kind linear_attention: a hybrid cache"),
        ("BloomForCausalLM", {}, "BloomForCausalLM does not call attention through .*ALiBi"),
        ("DeepseekV3ForCausalLM", {"num_hidden_layers": 1}, "heads of 192, 192 and 128 elements for queries, keys and"),
        ("BertLMHeadModel", {"num_hidden_layers": 1}, "BertLMHeadModel has a mask of its own"),
        (
            "DiffLlamaForCausalLM",
            {"num_hidden_layers": 1},
            "calls attention 2 times in 1 layers; it must be once in each",
        ),
        ("GlmMoeDsaForCausalLM", {"num_hidden_layers": 1}, "has layers of kind indexed_attention: a hybrid cache"),
        ("T5ForConditionalGeneration", {}, "'T5ForConditionalGeneration' .*'t5'. is no decoder-only text model"),
        ("Qwen2VLForConditionalGeneration", {}, "'Qwen2VLForConditionalGeneration' .* models that also read images"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name_before_its_weights_are_read(
    architecture: str, fields: dict[str, Any], message: str, write_config: Callable[..., Path]
) -> None:
    with pytest.raises(ConfigError, match=message):
        probe(write_config(architecture, vocab_size=VOCAB_SIZE, **fields))


def test_a_type_that_transformers_lacks(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NewForCausalLM"], "model_type": "new", "vocab_size": 9}')
    with pytest.raises(ConfigError, match=r"transformers 5\S* cannot read .*config\.json: .*is not run"):
        probe(tmp_path)


@pytest.mark.parametrize(
    ("arch", "context_len"),
    [("llama dynamic", 512), ("phi3 longrope", 256), ("qwen3 yarn", 512)],
)
def test_the_context_ends_where_the_rotation_would_change(
    arch: str, context_len: int, checkpoint: Callable[..., Path]
) -> None:
    config = describe_model(checkpoint(arch), "transformers")
    assert isinstance(config, TransformersModel)
    assert config.default_context_len == config.max_context_len == context_len


def test_rotation_in_the_original_context_is_that_of_transformers(checkpoint: Callable[..., Path]) -> None:
    path, prompts = checkpoint("phi3 longrope"), random_prompts([5, 40, 200])
    engine = make_engine(path, model_impl="transformers")
    assert generate(engine, prompts) == Reference(path).generate(prompts)


def test_flyballs_own_code_by_request(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="'Starcoder2ForCausalLM' is not supported; supported are LlamaForCausalLM"):
        describe_model(checkpoint("starcoder2"), "flyball")


def test_a_model_that_mixes_tokens_outside_of_attention(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Starcoder2MLP.forward
    monkeypatch.setattr(Starcoder2MLP, "forward", lambda self, x: plain(self, x) + x.roll(1, dims=1))
    with pytest.raises(ConfigError, match="Starcoder2ForCausalLM mixes tokens outside of attention"):
        load(checkpoint("starcoder2"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("model.norm.weight"), "missing keys 'model.norm.weight'"),
        (lambda weights: weights.update(extra=torch.zeros(1)), "unexpected keys 'extra'"),
        (lambda weights: weights.update({"model.norm.weight": torch.ones(7)}), "model.norm.weight"),
        (lambda weights: weights.update(extra=torch.zeros(1, dtype=torch.int8)), "extra is I8; it must be one of BF16"),
    ],
)
def test_weights_that_do_not_fit(
    change: Callable[[dict[str, Tensor]], Any], message: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    source = checkpoint("starcoder2")
    weights = load_file(source / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)
