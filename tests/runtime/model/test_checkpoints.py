"""The factory keeps its promises: same arguments, same weights; a tokenizer that round-trips; a chat template."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from checkpoints import BOS_ID, EOS_ID, TURN_END_ID, VOCAB_SIZE, make_checkpoint


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    first, same, other = (
        load_file(make_checkpoint(tmp_path / name, "qwen2", seed=seed) / "model.safetensors")
        for name, seed in (("first", 0), ("same", 0), ("other", 1))
    )
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_tokenizer_and_chat_template(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_checkpoint(tmp_path, "llama2"))
    text = "Zwölf governors, 12 engines: ⚙️\n"
    assert len(tokenizer) == VOCAB_SIZE
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (BOS_ID, EOS_ID)
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == TURN_END_ID
