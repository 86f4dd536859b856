from pathlib import Path

import pytest

from flyball_runtime.cli import build_parser, engine_config_from
from flyball_runtime.core.config import EngineConfig
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.speculation import SpeculativeConfig


def test_the_fields_have_the_names_and_defaults_of_vllm():
    config = SpeculativeConfig.parse('{"method": "ngram", "num_speculative_tokens": 4}')
    config.validate()
    assert (config.num_speculative_tokens, config.shortest_lookup, config.longest_lookup) == (4, 5, 5)
    config = SpeculativeConfig.parse('{"num_speculative_tokens": 4, "prompt_lookup_max": 3}')
    assert (config.shortest_lookup, config.longest_lookup) == (3, 3)
    config = SpeculativeConfig.parse('{"num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}')
    assert (config.shortest_lookup, config.longest_lookup) == (2, 4)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("ngram", "cannot be read"),
        ("[4]", "Expected `object`"),
        ('{"method": "ngram"}', "missing required field `num_speculative_tokens`"),
        ('{"num_speculative_tokens": "4"}', "num_speculative_tokens"),
        ('{"num_speculative_tokens": 4, "modle": "draft"}', "unknown field `modle`"),
        ('{"num_speculative_tokens": 4, "model": 7}', "model"),
        ('{"num_speculative_tokens": ' + "9" * 5000, "cannot be read"),
        ("\ud800", "cannot be read"),
    ],
)
def test_a_config_that_is_none_is_refused(text: str, named: str):
    with pytest.raises(ConfigError, match=named) as caught:
        SpeculativeConfig.parse(text)
    assert "its fields are num_speculative_tokens, method" in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"method": "eagle\n"}, r"method in --speculative-config is 'eagle\\n'; it must be ngram, or draft_model"),
        ({"method": "draft_model"}, "is draft_model, and no model is given"),
        ({"method": "ngram", "model": "a\n"}, r"model in --speculative-config is 'a\\n', which the method ngram"),
        (
            {"model": "a", "prompt_lookup_max": 4},
            "prompt_lookup_max and prompt_lookup_min in --speculative-config are of",
        ),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens in --speculative-config is 0; it must be from 1 to 64"),
        ({"num_speculative_tokens": 65}, "is 65"),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min in --speculative-config is 0"),
        ({"prompt_lookup_max": 10**6}, "prompt_lookup_max in --speculative-config is 1000000; it must be from 1 to 64"),
        ({"disable_by_batch_size": -1}, "disable_by_batch_size"),
        ({"prompt_lookup_min": 3, "prompt_lookup_max": 2}, "prompt_lookup_min in .* is 3, above prompt_lookup_max 2"),
    ],
)
def test_values_out_of_range_are_named(fields: dict, named: str):
    config = SpeculativeConfig(**({"num_speculative_tokens": 4} | fields))
    with pytest.raises(ConfigError, match=named):
        EngineConfig(model="", served_model_name="", speculative_config=config)


def test_the_flag_is_read():
    def config(*flags: str) -> EngineConfig:
        args = build_parser().parse_args(["serve", "model", *flags])
        return engine_config_from(args, Path("model"))

    assert config().speculative_config is None
    read = config("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}').speculative_config
    assert read == SpeculativeConfig(num_speculative_tokens=4, method="ngram")
    with pytest.raises(ConfigError, match="--speculative-config 'ngram' cannot be read"):
        config("--speculative-config", "ngram")


def test_planning_ahead_excludes_drafts():
    with pytest.raises(ConfigError, match="--speculative-config and --async-scheduling exclude each other"):
        config = SpeculativeConfig(num_speculative_tokens=4)
        EngineConfig(model="", served_model_name="", speculative_config=config, async_scheduling=True)


def test_logits_of_drafts_count_towards_the_largest_step():
    settings = {"model": "", "served_model_name": "", "max_num_seqs": 40}
    assert EngineConfig(**settings).max_num_sampled == 40
    config = SpeculativeConfig(num_speculative_tokens=4, disable_by_batch_size=16)
    assert EngineConfig(**settings, speculative_config=config).max_num_sampled == 16 * 5
    config = SpeculativeConfig(num_speculative_tokens=1, disable_by_batch_size=16)
    assert EngineConfig(**settings, speculative_config=config).max_num_sampled == 40
