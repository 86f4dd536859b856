"""The engine in-process, as scripts use it."""

import shutil
from pathlib import Path

import pytest

from adapters import make_adapter, merged
from checkpoints import make_checkpoint, poison
from engines import Oracle, Reference, have_drafted, random_prompts
from flyball_runtime.core.errors import ConfigError, InvalidAdapter, InvalidRequest, RequestError
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.llm import LLM, BeamSearchParams, LoRARequest

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama3")


@pytest.fixture(scope="module")
def llm(path: Path) -> LLM:
    return LLM(path, max_num_seqs=4)


def test_many_prompts_come_back_in_order(llm: LLM, path: Path) -> None:
    prompts = random_prompts([3, 40, 7, 18, 25, 9])
    outputs = llm.generate(prompts, GREEDY)
    assert [output.token_ids for output in outputs] == Reference(path).generate(prompts)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert all(output.text == llm.tokenizer.decode(output.token_ids, skip_special_tokens=True) for output in outputs)


def test_one_prompt_may_be_text_or_ids_and_settings_may_differ(llm: LLM) -> None:
    (text,) = llm.generate("A flyball governor", GREEDY)
    (ids,) = llm.generate(llm.tokenizer.encode("A flyball governor"), GREEDY)
    assert text == ids
    short, long = llm.generate(["a", "a"], [SamplingParams(max_tokens=2, ignore_eos=True), GREEDY])
    assert (len(short.token_ids), short.finish_reason) == (2, "length")
    assert len(long.token_ids) > 2


def test_a_stop_string_among_accepted_drafts(llm: LLM, path: Path) -> None:
    """What was accepted behind it is neither shown nor counted."""
    settings = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    (whole,) = llm.generate(["One, two"], settings)
    stop = whole.text[10:13]
    settings = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop=(stop,))
    (expected,) = llm.generate(["One, two"], settings)
    speculating = LLM(path, max_num_seqs=4, speculative_config={"method": "ngram", "num_speculative_tokens": 16})
    oracle = Oracle(16, [[*expected.prompt_token_ids, *whole.token_ids]])
    have_drafted(speculating.engine, oracle)
    for _ in range(2):
        assert speculating.generate(["One, two"], settings) == [expected]
    assert oracle.num_accepted > 0
    assert not speculating.engine.has_work()


def test_an_unknown_setting_of_speculation_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown field `modle`"):
        LLM(path, speculative_config={"modle": "draft", "num_speculative_tokens": 4})


def test_a_stop_string_cuts_the_text_and_ends_the_request(llm: LLM) -> None:
    (whole,) = llm.generate("governor", SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    stop = whole.text[10:13]
    settings = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop=(stop,))
    (cut,) = llm.generate("governor", settings)
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason == "stop"
    assert not llm.engine.has_work()


def test_a_prefix_is_reused_within_a_cache_salt_only(llm: LLM) -> None:
    prompt = random_prompts([40], seed=7)

    def num_new_blocks(**salt: str) -> int:
        before = llm.engine.kv_cache.counts().cached
        llm.generate(prompt, SamplingParams(max_tokens=1), **salt)
        return llm.engine.kv_cache.counts().cached - before

    assert num_new_blocks(cache_salt="a") == 2, "two full blocks are new"
    assert num_new_blocks(cache_salt="a") == 0
    assert num_new_blocks(cache_salt="b") == 2
    assert num_new_blocks() == 2
    for bad in ("", "x" * 1025):
        with pytest.raises(RequestError, match="cache_salt"):
            llm.generate(prompt, cache_salt=bad)


def test_a_chat_goes_through_the_template(llm: LLM) -> None:
    answer = llm.chat([{"role": "user", "content": "hi"}], GREEDY)
    assert llm.tokenizer.decode(answer.prompt_token_ids).endswith("<|im_start|>assistant\n")


def test_a_bad_prompt_raises_and_leaves_nothing_behind(llm: LLM) -> None:
    for bad in ([[5], []], [[5], [99999]], [[5], [5] * 600]):
        with pytest.raises(RequestError):
            llm.generate(bad, GREEDY)
        assert not llm.engine.has_work()
        assert llm.engine.kv_cache.counts().used == 0
    with pytest.raises(RequestError, match="1 sampling settings for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY])


def test_the_checkpoint_says_how_to_sample_when_the_script_does_not(tmp_path: Path, path: Path) -> None:
    shutil.copytree(path, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.0}')
    llm = LLM(tmp_path, max_num_seqs=4)
    assert llm.default_sampling == SamplingParams(temperature=0.0)
    (greedy,) = llm.generate("A flyball governor", GREEDY)
    (output,) = llm.generate("A flyball governor")
    assert output.token_ids[:24] == greedy.token_ids
    assert LLM(tmp_path, generation_config="none", max_num_seqs=4).default_sampling == SamplingParams()


def test_what_is_not_a_model_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        LLM(tmp_path)


def test_nan_logits_are_an_error_that_names_the_prompt(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama2")
    poison(path, 9)
    llm = LLM(path, max_num_seqs=4)
    with pytest.raises(RequestError, match="prompt 1: the model gave no usable logits after 0 output tokens"):
        llm.generate([[5], [9], [6]], GREEDY)
    assert not llm.engine.has_work()
    assert len(llm.generate([[5]], SamplingParams(max_tokens=1))[0].token_ids) == 1


def test_a_beam_search_gives_outputs_with_texts_and_scores(llm: LLM) -> None:
    prompts = random_prompts([7, 20])
    params = BeamSearchParams(beam_width=2, max_tokens=6, length_penalty=0.0, logprobs=1)
    first, second = llm.beam_search(prompts, params)
    for prompt, output in zip(prompts, (first, second), strict=True):
        best, other = output.sequences
        assert best.tokens[: len(prompt)] == other.tokens[: len(prompt)] == prompt
        assert best.tokens != other.tokens and best.score == best.cum_logprob >= other.score
        assert best.text == llm.tokenizer.decode(best.tokens[len(prompt) :], skip_special_tokens=True)
        assert best.logprobs is not None and len(best.logprobs) == len(best.tokens) - len(prompt)
    with pytest.raises(RequestError, match="temperature does not go with beam search"):
        llm.beam_search(prompts, BeamSearchParams(beam_width=2, max_tokens=6, temperature=0.5))


def test_a_bad_word_does_not_come(llm: LLM) -> None:
    (plain,) = llm.generate("governor", SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    word = llm.tokenizer.decode(plain.token_ids[2:3])
    settings = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, bad_words=(word,))
    (without,) = llm.generate("governor", settings)
    assert without.token_ids[:2] == plain.token_ids[:2]
    assert plain.token_ids[2] not in without.token_ids


def test_prompts_may_have_adapters(llm: LLM, path: Path, tmp_path: Path) -> None:
    adapters = [make_adapter(tmp_path / str(seed), path, seed=seed, rank=4) for seed in (1, 2)]
    first, second = (LoRARequest(f"a{index}", index, str(one)) for index, one in enumerate(adapters))
    adapting = LLM(path, max_num_seqs=4, enable_lora=True, max_loras=2, max_cpu_loras=2)
    prompts = random_prompts([12, 30])
    wanted = [Reference(merged(tmp_path / f"merged {one.name}", path, one)).generate(prompts) for one in adapters]
    outputs = adapting.generate(
        [*prompts, *prompts, *prompts], GREEDY, lora_request=[first] * 2 + [None] * 2 + [second] * 2
    )
    plain = [output.token_ids for output in llm.generate(prompts, GREEDY)]
    assert [output.token_ids for output in outputs] == wanted[0] + plain + wanted[1]
    search = BeamSearchParams(beam_width=1, max_tokens=24)
    assert (
        adapting.beam_search(prompts[:1], search, lora_request=second)[0].sequences[0].tokens
        == prompts[0] + wanted[1][0]
    )
    with pytest.raises(InvalidAdapter, match="a2: 2 adapters are loaded, and max_cpu_loras is 2"):
        adapting.generate(prompts, GREEDY, lora_request=LoRARequest("a2", 2, str(adapters[0])))
    with pytest.raises(InvalidRequest, match="got 1 adapters for 2 prompts"):
        adapting.generate(prompts, GREEDY, lora_request=[first])
    with pytest.raises(InvalidAdapter, match="0 without enable_lora"):
        llm.generate(prompts, GREEDY, lora_request=first)
    with pytest.raises(InvalidAdapter, match="cannot read"):
        LLM(path, enable_lora=True).generate(prompts, GREEDY, lora_request=LoRARequest("a", 1, str(tmp_path)))
