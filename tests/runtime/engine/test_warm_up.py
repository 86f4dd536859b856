"""Warm-up steps are the largest that the settings allow, and run; the longest pause of a step is measured."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoints import make_checkpoint
from engines import generate, make_engine, random_prompts
from flyball_kernels import choose_backend
from flyball_runtime.core.clock import FakeClock
from flyball_runtime.core.config import EngineConfig
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.model_config import ModelConfig
from flyball_runtime.engine.start_up import QUERY_LENS, WarmUp, peak_bytes
from flyball_runtime.model.loader import load_model
from flyball_runtime.model.transformer import CausalLM, StepInputs

CPU = torch.device("cpu")


class Recorder:
    """Stands in for the model, which it calls."""

    def __init__(self, model: CausalLM) -> None:
        self.config = model.config
        self.backend = model.backend
        self.layout = model.layout
        self.steps: list[StepInputs] = []
        self._model = model

    def forward(self, inputs: StepInputs, kv: Any) -> torch.Tensor:
        self.steps.append(inputs)
        return self._model.forward(inputs, kv)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    path = make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3")
    return load_model(
        path, ModelConfig.from_dir(path), dtype=torch.float32, device="cpu", backend=choose_backend("cpu")
    )


def warm_up_of(model: Any, *, max_model_len: int = 128, **settings: int) -> WarmUp:
    config = EngineConfig(model="", served_model_name="", **settings)
    step_tokens = config.step_tokens("cpu", max_model_len)
    return WarmUp(
        model, config, max_model_len=max_model_len, step_tokens=step_tokens, kv_dtype=torch.float32, device=CPU
    )


@pytest.mark.parametrize(
    ("settings", "query_lens"),
    [
        ({"max_num_seqs": 4, "max_num_batched_tokens": 103}, [26, 26, 26, 25]),
        ({"max_num_seqs": 3, "max_num_batched_tokens": 3}, [1, 1, 1]),
        ({"max_num_seqs": 2, "max_num_batched_tokens": 100, "max_model_len": 20}, [20, 20]),  # positions end there
    ],
)
def test_the_largest_step_fills_the_budget(model: CausalLM, settings: dict[str, int], query_lens: list[int]) -> None:
    recorder = Recorder(model)
    warm_up_of(recorder, **settings).largest_step()
    (inputs,) = recorder.steps
    assert inputs.cu_query_lens.diff().tolist() == query_lens
    assert inputs.context_lens.tolist() == query_lens
    assert inputs.logits_indices.tolist() == (inputs.cu_query_lens[1:] - 1).tolist()
    assert inputs.token_ids.shape == inputs.positions.shape == inputs.slot_mappings[0].shape == (sum(query_lens),)


def test_small_steps_cover_every_query_length(model: CausalLM) -> None:
    recorder = Recorder(model)
    warm_up_of(recorder, max_num_seqs=2).small_steps()
    steps = [(inputs.max_query_len, inputs.max_context_len) for inputs in recorder.steps]
    assert steps == sorted({(query_len, context) for query_len in QUERY_LENS for context in (query_len, 128)})
    recorder = Recorder(model)
    warm_up_of(recorder, max_num_seqs=2, max_num_batched_tokens=20).small_steps()
    assert max(inputs.max_query_len for inputs in recorder.steps) == 16


def test_small_steps_of_experts_cover_every_number_of_rows_for_each(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3 moe")  # 6 experts, of which a token uses 3
    model = load_model(
        path, ModelConfig.from_dir(path), dtype=torch.float32, device="cpu", backend=choose_backend("cpu")
    )
    recorder = Recorder(model)
    warm_up_of(recorder, max_num_seqs=2, max_model_len=300).small_steps()
    assert {inputs.max_query_len for inputs in recorder.steps} == {*QUERY_LENS, *(2 * length for length in QUERY_LENS)}


def test_no_room_for_the_largest_step(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 3 GiB")

    recorder = Recorder(model)
    monkeypatch.setattr(recorder, "forward", out_of_memory)
    with pytest.raises(ConfigError, match=r"max-num-batched-tokens 100 and --max-num-seqs 2 does not fit.*3 GiB"):
        warm_up_of(recorder, max_num_seqs=2, max_num_batched_tokens=100).largest_step()


class SlowModel:
    """A model whose layers and head take the given seconds of a fake clock, and longer when they run first."""

    def __init__(self, model: CausalLM, layer_s: float, head_s: float, layers_at_once: int = 1, **config: Any) -> None:
        self.clock = FakeClock()
        self.steps: list[tuple[int, Tensor, Tensor, Tensor]] = []  # index, positions, block table, context lengths
        self.parts = SimpleNamespace(
            timed_parts=lambda *args: CausalLM.timed_parts(self.parts, *args),  # type: ignore[arg-type]
            backend=choose_backend("cpu"),
            layers_at_once=layers_at_once,
            layout=model.layout,
            config=replace(model.config, **config),
            embedding=model.embedding,
            layers=[SimpleNamespace(op=index) for index in range(len(model.layers))],
            _bound=lambda start, end, kv: self._slow(self._noted(start, model._bound(start, end, kv)), layer_s),
            lm_head=self._slow(model.lm_head, head_s),
        )

    def longest_pause_s(self, **settings: int) -> float:
        return warm_up_of(self.parts, **settings).longest_pause_s(self.clock)

    def _slow(self, part: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        left_s = [100.0]

        def run(*args: Any) -> Any:
            self.clock.advance(left_s.pop() if left_s else seconds)
            return part(*args)

        return run

    def _noted(self, index: int, layer: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: Tensor, residual: None, positions: Tensor, slots: Any, tables: Any, *lens: Tensor) -> Any:
            self.steps.append((index, positions, tables[0], lens[1]))
            return layer(x, residual, positions, slots, tables, *lens)

        return run


@pytest.mark.parametrize(
    ("layer_s", "head_s", "pause_s"),
    [(0.5, 0.01, 2.0), (0.5, 6.0, 12.0)],  # 256 tokens and 128 rows at most, 64 of them timed
)
def test_the_longest_pause_is_a_layer_or_the_head_of_the_largest_step(
    model: CausalLM, layer_s: float, head_s: float, pause_s: float
) -> None:
    slow = SlowModel(model, layer_s, head_s)
    assert slow.longest_pause_s(max_num_seqs=128, max_num_batched_tokens=256) == pytest.approx(pause_s)
    _, positions, block_table, context_lens = slow.steps[-1]
    assert positions.tolist() == list(range(64, 128)), "the end of the longest context"
    assert (context_lens.tolist(), block_table.shape) == ([128], (1, 8))


def test_a_pause_of_a_step_with_few_tokens_is_not_scaled(model: CausalLM) -> None:
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 20}
    assert SlowModel(model, 0.5, 0.1).longest_pause_s(**settings) == pytest.approx(0.5)
    assert SlowModel(model, 0.5, 0.1).longest_pause_s(**settings, max_model_len=5) == pytest.approx(2.0)  # 4 times 5


def test_few_tokens_that_run_through_several_layers_at_once_may_take_longest(model: CausalLM) -> None:
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 256}  # 4 times those that are timed
    assert SlowModel(model, 0.5, 0.1, layers_at_once=3).longest_pause_s(**settings) == pytest.approx(2.0)
    assert SlowModel(model, 0.5, 0.1, layers_at_once=16).longest_pause_s(**settings) == pytest.approx(
        8.1
    )  # and the head


@pytest.mark.parametrize(("windows", "layer"), [((None, None), 0), ((16, None), 1), ((16, 24), 1), ((24, 16), 0)])
def test_the_layer_that_attends_to_the_most_tokens_is_timed(
    model: CausalLM, windows: tuple[int | None, int | None], layer: int
) -> None:
    slow = SlowModel(model, 0.5, 0.1, sliding_windows=windows)
    slow.longest_pause_s(max_num_seqs=4)
    assert {index for index, *_ in slow.steps} == {layer}


@pytest.mark.gpu
def test_memory_of_a_step_on_a_gpu() -> None:
    device = torch.device("cuda")
    assert peak_bytes(lambda: None, device) == 0
    numel = 2**26
    assert peak_bytes(lambda: torch.zeros(numel, device=device), device) >= numel * 4  # type: ignore[arg-type, return-value]


@pytest.mark.gpu
def test_serving_stays_in_the_memory_that_was_set_aside(tmp_path: Path) -> None:
    """Long prompts in large steps, with 1 GiB for the cache and what a step takes."""
    torch.cuda.empty_cache()
    free_before, total = torch.cuda.mem_get_info()
    path = make_checkpoint(tmp_path, "qwen3")
    settings = {"max_num_seqs": 4096, "max_num_batched_tokens": 8192, "max_model_len": 512}
    engine = make_engine(path, device="cuda", gpu_memory_utilization=1 - (free_before - 2**30) / total, **settings)
    assert engine.info.longest_pause_s > 0
    generate(engine, random_prompts([480] * 64))
    free, _ = torch.cuda.mem_get_info()
    assert free_before - free <= 2**30 + 2**28  # kernels that are first needed now take room of their own
