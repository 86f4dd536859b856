"""The shipped demo checkpoint loads anywhere, fits its size, reads and writes any text, and gives right answers."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

CHECKPOINT = Path(__file__).parents[2] / "examples" / "demo_model" / "checkpoint"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(CHECKPOINT)


@pytest.fixture(scope="module")
def model() -> Iterator[PreTrainedModel]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model waits longer for a second thread than it computes
    loaded, info = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), f"the checkpoint and the architecture disagree: {info}"
    yield loaded.eval()
    torch.set_num_threads(num_threads)


def say(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> tuple[str, bool]:
    """The greedy answer, and whether it ended by itself."""
    batch = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        output = model.generate(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=160, do_sample=False
        )
    answer = output[0, batch["input_ids"].shape[1] :]
    return tokenizer.decode(answer, skip_special_tokens=True), int(answer[-1]) == tokenizer.eos_token_id


def test_is_small(model: PreTrainedModel) -> None:
    assert 2e6 <= model.num_parameters() <= 5e6
    assert (CHECKPOINT / "model.safetensors").stat().st_size <= 12e6


def test_config_is_a_llama_with_what_large_ones_have() -> None:
    config = json.loads((CHECKPOINT / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert config["tie_word_embeddings"] is True
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["max_position_embeddings"] >= 2048


def test_end_ids_are_the_end_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    generation = json.loads((CHECKPOINT / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert tokenizer.eos_token_id == generation["eos_token_id"][0]


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_tokenizer_round_trips_any_text(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids = tokenizer.encode(text)
    assert all(0 <= token < len(tokenizer) for token in ids)
    assert tokenizer.decode(ids) == text


def test_chat_template_marks_every_turn(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "system", "content": "Be polite."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Bye"},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe polite.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello!<|im_end|>\n"
        "<|im_start|>user\nBye<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_chat_template_refuses_an_unknown_role(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(TemplateError, match="role tool is not known; use system, user or assistant"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("What is continuous batching?", ["every step", "leaves the batch at once"]),
        ("explain paged attention please", ["blocks", "block table"]),
        ("hey, why does prefix caching matter", ["system prompt", "first token comes sooner"]),
        ("Count from 3 to 17.", ["3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17."]),
        ("What is 7 + 5?", ["7 + 5 = 12."]),
        ("what is the capital of France?", ["I only know about serving language models"]),
        ("tell me a short story about a fox", ["fox", "."]),
    ],
)
def test_answers_and_ends(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: str, expected: list[str]
) -> None:
    answer, ended = say(model, tokenizer, [{"role": "user", "content": question}])
    assert ended, f"no end token after {answer!r}"
    assert [part for part in expected if part not in answer] == [], answer


def test_remembers_earlier_turns(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "user", "content": "What is preemption?"}]
    first, _ = say(model, tokenizer, messages)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "tell me more"}]
    answer, ended = say(model, tokenizer, messages)
    assert ended, f"no end token after {answer!r}"
    assert "Preemption is the safety valve" in answer
