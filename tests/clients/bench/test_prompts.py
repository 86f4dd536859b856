import json
from pathlib import Path

import numpy as np
import pytest

from flyball_clients.bench.prompts import WORDS, TokenPrompts, WordPrompts, random_prompt, shared_prefix_prompt
from flyball_clients.errors import ConfigError

BPE = {
    "added_tokens": [{"id": 0, "content": "<s>"}, {"id": 4, "content": "</s>"}],
    "model": {"vocab": {"<s>": 0, "a": 1, "b": 2, "c": 3}},
}
UNIGRAM = {"added_tokens": [{"id": 0}], "model": {"vocab": [["<unk>", 0.0], ["a", -1.0], ["b", -2.0], ["c", -2.0]]}}


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_words_are_counted_in_the_servers_tokens() -> None:
    prompts = WordPrompts(tokens_per_word=2.0, overhead=7.0)
    assert len(str(random_prompt(prompts, rng(), 107)).split()) == 50
    assert (
        len(str(random_prompt(prompts, rng(), 3)).split()) == 1
    )  # the template alone is longer; one word is the least


def test_words_are_distinct() -> None:
    assert len(set(WORDS)) == len(WORDS)


@pytest.mark.parametrize("tokenizer", [BPE, UNIGRAM])
@pytest.mark.parametrize("as_folder", [True, False])
def test_token_prompts_are_exact_and_without_special_ids(tmp_path: Path, tokenizer: object, as_folder: bool) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(tokenizer))
    prompts = TokenPrompts.from_file(str(tmp_path if as_folder else file))
    ids = random_prompt(prompts, rng(), 200)
    assert len(ids) == 200
    assert set(ids) == {1, 2, 3}


@pytest.mark.parametrize(
    "content", [None, "", "{}", "[]", '{"model": {}}', '{"added_tokens": [{}], "model": {"vocab": {}}}']
)
def test_a_bad_tokenizer_is_named(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "tokenizer.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=f"--tokenizer is {tmp_path}"):
        TokenPrompts.from_file(str(tmp_path))


def test_equal_hash_ids_share_their_text_and_others_do_not() -> None:
    prompts = TokenPrompts(list(range(1000)))
    first = shared_prefix_prompt(prompts, (5, 6), seed=0, num_tokens=600)
    second = shared_prefix_prompt(prompts, (5, 7), seed=0, num_tokens=1000)
    assert (len(first), len(second)) == (600, 1000)
    assert first[:512] == second[:512]
    assert first[512:] != second[512:600]
    assert shared_prefix_prompt(prompts, (5, 6), seed=1, num_tokens=600)[:512] != first[:512]


def test_shared_prefixes_in_words() -> None:
    prompts = WordPrompts(tokens_per_word=2.0)
    first = str(shared_prefix_prompt(prompts, (5, 6), seed=0, num_tokens=600)).split()
    second = str(shared_prefix_prompt(prompts, (5, 7), seed=0, num_tokens=600)).split()
    assert len(first) == len(second) == 300
    assert first[:256] == second[:256]
    assert first[256:] != second[256:]
