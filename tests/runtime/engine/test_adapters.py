"""Greedy tokens of LoRA adapters equal those of transformers with the adapter merged into the weights, whatever else runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from adapters import ATTENTION, MLP, make_adapter, merged
from checkpoints import make_checkpoint
from engines import Oracle, Reference, generate, have_drafted, kv_block_bytes, make_engine, random_prompts
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.lora import LoraConfig, LoraModule
from flyball_runtime.core.request import Failed, Request
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.core.speculation import SpeculativeConfig
from flyball_runtime.engine.engine import Engine

LENGTHS = [5, 17, 40]
MAX_TOKENS = 12
SAMPLING = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
ADAPTERS: list[dict[str, Any]] = [
    {"targets": (*ATTENTION, *MLP), "rank": 8, "alpha": 16.0},
    {"targets": ("q_proj", "v_proj"), "rank": 3, "alpha": 12.0},
    {"targets": ("k_proj", "o_proj", "up_proj", "down_proj"), "rank": 16, "alpha": 8.0, "use_rslora": True},
]


@dataclass(frozen=True)
class Case:
    """A base model and adapters of it; each prompt is for the base model and for each adapter.

    Attributes:
        expected: for each of ``adapters``, the outputs of all ``distinct`` prompts one after the other.
    """

    base: Path
    modules: tuple[LoraModule, ...]
    distinct: list[list[int]]
    expected: list[list[int]]

    @property
    def prompts(self) -> list[list[int]]:
        return self.distinct * (1 + len(self.modules))

    @property
    def adapters(self) -> list[int | None]:
        numbers: list[int | None] = [None, *range(len(self.modules))]
        return [number for number in numbers for _ in self.distinct]

    def engine(self, *, max_loras: int = 3, **settings: Any) -> Engine:
        return make_engine(self.base, lora=LoraConfig(max_loras=max_loras, modules=self.modules), **settings)

    def run(self, engine: Engine) -> list[list[int]]:
        return generate(engine, self.prompts, SAMPLING, adapters=self.adapters)


def make_case(folder: Path, arch: str, adapters: list[dict[str, Any]]) -> Case:
    base = make_checkpoint(folder / "base", arch)
    paths = [make_adapter(folder / str(index), base, seed=index, **one) for index, one in enumerate(adapters)]
    models = [base, *(merged(folder / f"merged {index}", base, path) for index, path in enumerate(paths))]
    prompts = random_prompts(LENGTHS)
    outputs = [Reference(model).generate(prompts, MAX_TOKENS) for model in models]
    assert len({str(one) for one in outputs}) == len(models), "adapters change what is said"
    expected = [output for one in outputs for output in one]
    return Case(base, tuple(LoraModule(name=path.name, path=str(path)) for path in paths), prompts, expected)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("qwen3"), "qwen3", ADAPTERS)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_seqs": 4, "max_num_batched_tokens": 7},
        {"max_loras": 1, "async_scheduling": True},
        {"enable_prefix_caching": False, "kernel_backend": "torch"},
    ],
    ids=["whole", "chunked", "one slot, planned ahead", "torch"],
)
def test_a_batch_of_the_base_model_and_three_adapters(case: Case, settings: dict[str, Any]) -> None:
    engine = case.engine(**settings)
    assert case.run(engine) == case.expected
    assert case.run(engine) == case.expected, "of what is cached by now, each finds its own"


def run_counting(case: Case, engine: Engine, stat: str) -> tuple[list[list[int]], int]:
    """Run all prompts of a case at once; return their outputs and the sum of a count of the steps."""
    outputs: dict[str, list[int]] = {str(index): [] for index in range(len(case.prompts))}
    for name, prompt, adapter in zip(outputs, case.prompts, case.adapters, strict=True):
        engine.submit(Request(request_id=name, prompt_token_ids=prompt, sampling=SAMPLING, adapter=adapter))
    num = 0
    while engine.has_work():
        output = engine.step()
        num += getattr(output.stats, stat)
        for request_id, token_id in zip(output.request_ids, output.token_ids, strict=True):
            outputs[request_id].append(token_id)
    return list(outputs.values()), num


def test_preempted(case: Case) -> None:
    engine = case.engine(max_model_len=112, max_loras=2, kv_cache_memory_bytes=9 * kv_block_bytes(case.base))
    outputs, num_preempted = run_counting(case, engine, "num_preemptions")
    assert num_preempted > 0
    assert outputs == case.expected


def test_prefixes_in_host_memory_are_those_of_one_adapter(case: Case) -> None:
    """All requests have the same three prompts; what was computed for one adapter is of no use to another."""
    block_bytes = kv_block_bytes(case.base)
    memory = {"kv_cache_memory_bytes": 9 * block_bytes, "swap_space_bytes": 60 * block_bytes}
    engine = case.engine(max_model_len=112, max_num_seqs=2, **memory)
    runs = [run_counting(case, engine, "num_swapped_in_blocks") for _ in range(2)]
    assert [outputs for outputs, _ in runs] == [case.expected] * 2
    assert sum(num_back for _, num_back in runs) > 0


def test_drafts_are_verified_by_the_adapter(case: Case) -> None:
    speculative = SpeculativeConfig(num_speculative_tokens=4)
    engine = case.engine(speculative_config=speculative)
    for number, adapter in enumerate((None, 0, 1, 2)):
        expected = case.expected[number * len(LENGTHS) : (number + 1) * len(LENGTHS)]
        oracle = Oracle(4, [prompt + output for prompt, output in zip(case.distinct, expected, strict=True)])
        have_drafted(engine, oracle)
        assert generate(engine, case.distinct, SAMPLING, adapters=[adapter] * len(LENGTHS)) == expected
        assert oracle.num_accepted > 0


def test_a_draft_model_drafts_without_adapters(case: Case) -> None:
    """The base model itself: for its own requests it is always right, for those of adapters the adapter decides."""
    engine = case.engine(speculative_config=SpeculativeConfig(num_speculative_tokens=3, model=str(case.base)))
    engine.governor.tokens_per_s = lambda *_: None  # type: ignore[method-assign]  pay whatever drafts cost
    assert case.run(engine) == case.expected
    assert case.run(engine) == case.expected, "from the prefix cache"


def test_forks_share_the_prompt_of_their_adapter(case: Case) -> None:
    engine = case.engine(enable_prefix_caching=False)
    prompts = [prompt for prompt in case.distinct for _ in range(3)]
    expected = [output for output in case.expected[len(LENGTHS) : 2 * len(LENGTHS)] for _ in range(3)]
    assert generate(engine, prompts, SAMPLING, forked=True, adapters=[0] * len(prompts)) == expected


def test_log_probabilities_and_pooled_states_are_those_of_the_adapter(case: Case, tmp_path: Path) -> None:
    """Both are asked for again: the second time, the prompt of the pooled request is cached."""
    path = merged(tmp_path, case.base, Path(case.modules[0].path))
    told = [
        scores_of(engine, case.distinct[2], adapter)
        for engine, adapter in ((make_engine(path), None), (case.engine(), 0))
    ]
    for theirs, ours in zip(*told, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def scores_of(engine: Engine, prompt: list[int], adapter: int | None) -> list[np.ndarray]:
    """Log probabilities of prompt and output, and the pooled states, twice each."""
    scored = SamplingParams(temperature=0.0, max_tokens=4, logprobs=0, prompt_logprobs=0)
    found = []
    for number in range(2):
        of_prompt, of_output, pooled = [], [], b""
        for name, sampling, pooling in (("scored", scored, None), ("pooled", SamplingParams(), "last")):
            engine.submit(
                Request(
                    request_id=f"{name} {number}",
                    prompt_token_ids=prompt,
                    sampling=sampling,
                    pooling=pooling,
                    adapter=adapter,
                )
            )
        while engine.has_work():
            output = engine.step()
            of_prompt += [one.logprob for scores in output.prompt_logprobs.values() for one in scores]
            of_output += [one.logprob for one in output.logprobs.values()]
            pooled += b"".join(one.pooled for one in output.endings)
        found += [np.array(of_prompt), np.array(of_output), np.frombuffer(pooled, np.float32)]
    return found


def test_adapters_come_and_go_between_steps(case: Case) -> None:
    """A number names one adapter for good; another under a new number has nothing of the old one."""
    engine = make_engine(case.base, lora=LoraConfig(max_loras=1))
    for number, module in enumerate((*case.modules, case.modules[0]), 10):
        engine.load_adapter(number, module.path).result(timeout=60)
        index = 1 + (number - 10) % len(case.modules)
        outputs = generate(engine, case.distinct, SAMPLING, adapters=[number] * len(LENGTHS))
        assert outputs == case.expected[index * len(LENGTHS) : (index + 1) * len(LENGTHS)]
        engine.unload_adapter(number)
    assert generate(engine, case.distinct, SAMPLING) == case.expected[: len(LENGTHS)]


def test_an_adapter_whose_numbers_overflow_harms_nobody_else(case: Case, tmp_path: Path) -> None:
    path = make_adapter(tmp_path, case.base, alpha=1e38)
    engine = case.engine(max_loras=2)
    engine.load_adapter(9, str(path)).result(timeout=60)
    engine.submit(Request(request_id="bad", prompt_token_ids=[5, 6], sampling=SamplingParams(max_tokens=2), adapter=9))
    for index, prompt in enumerate(case.distinct):
        engine.submit(Request(request_id=str(index), prompt_token_ids=prompt, sampling=SAMPLING))
    outputs: dict[str, list[int]] = {}
    endings = []
    while engine.has_work():
        output = engine.step()
        endings += output.endings
        for request_id, token_id in zip(output.request_ids, output.token_ids, strict=True):
            outputs.setdefault(request_id, []).append(token_id)
    (failed,) = (one for one in endings if isinstance(one, Failed))
    assert (failed.request_id, failed.code) == ("bad", "invalid_logits")
    assert [outputs[str(index)] for index in range(len(LENGTHS))] == case.expected[: len(LENGTHS)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "targets"),
    [
        ("mistral", (*ATTENTION, *MLP)),
        ("qwen2", ATTENTION),
        ("gemma2", (*ATTENTION, *MLP)),
        ("phi3", ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
        ("qwen2 moe", ("q_proj", "shared_expert.gate_proj", "shared_expert.down_proj")),
        ("gpt-oss", ATTENTION),
    ],
)
def test_other_architectures(tmp_path: Path, arch: str, targets: tuple[str, ...]) -> None:
    adapters = [{"targets": targets, "rank": 4}, {"targets": targets[:1], "rank": 8, "alpha": 32.0}]
    case = make_case(tmp_path, arch, adapters)
    assert case.run(case.engine(max_loras=2)) == case.expected


def test_adapters_for_code_of_transformers_are_refused(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path, "qwen3")
    with pytest.raises(ConfigError, match="runs with the code of transformers"):
        make_engine(base, model_impl="transformers", lora=LoraConfig())


def test_a_bad_adapter_at_the_start_is_a_config_error(case: Case, tmp_path: Path) -> None:
    path = make_adapter(tmp_path, case.base, rank=32)
    with pytest.raises(ConfigError, match="r is 32, above --max-lora-rank 16"):
        make_engine(case.base, lora=LoraConfig(modules=(LoraModule(name="a", path=str(path)),)))


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # in peft
@pytest.mark.parametrize("adapter", ADAPTERS, ids=["all", "few", "rank-stabilized"])
def test_merging_is_that_of_peft(tmp_path: Path, adapter: dict[str, Any]) -> None:
    """The weights from which the expected tokens come are what peft makes of the same files."""
    base = make_checkpoint(tmp_path / "base", "qwen3")
    path = make_adapter(tmp_path / "adapter", base, **adapter)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    by_peft = PeftModel.from_pretrained(model, str(path)).merge_and_unload().state_dict()
    ours = load_file(merged(tmp_path / "merged", base, path) / "model.safetensors")
    for name, weight in ours.items():
        torch.testing.assert_close(weight, by_peft[name], rtol=0, atol=1e-6)
