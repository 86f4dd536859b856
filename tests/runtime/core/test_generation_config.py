import json
import logging
from pathlib import Path
from typing import Any

import pytest

from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.generation_config import default_sampling
from flyball_runtime.core.sampling_params import SamplingParams


def write(folder: Path, **fields: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return folder


def test_the_checkpoint_sets_what_it_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = write(tmp_path, do_sample=True, temperature=0.6, top_p=0.95, top_k=20, min_p=None, eos_token_id=[1, 2])
    with caplog.at_level(logging.INFO):
        assert default_sampling("auto", model) == SamplingParams(temperature=0.6, top_p=0.95, top_k=20)
    assert "temperature 0.6, top_p 0.95, top_k 20" in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("source", ["none", "vllm"])
def test_the_file_can_be_left_alone(source: str, tmp_path: Path) -> None:
    assert default_sampling(source, write(tmp_path, temperature=0.6)) == SamplingParams()


def test_a_folder_stands_in_for_the_checkpoint(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write(other, min_p=0.1, top_k=-1, repetition_penalty=1.05)
    expected = SamplingParams(min_p=0.1, repetition_penalty=1.05)
    assert default_sampling(str(other), write(tmp_path, temperature=0.6)) == expected


def test_without_a_file_the_defaults_are_openais(tmp_path: Path) -> None:
    assert default_sampling("auto", tmp_path) == SamplingParams()
    with pytest.raises(ConfigError, match=r"--generation-config is '.*', but there is no .*generation_config\.json"):
        default_sampling(str(tmp_path), tmp_path)


def test_what_the_engine_does_not_have_is_said_aloud(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    default_sampling("auto", write(tmp_path, typical_p=0.5, num_beams=1, max_new_tokens=512))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "sets typical_p 0.5, max_new_tokens 512, which this engine does not support" in record.getMessage()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 3.0}, r"temperature is 3\.0; it must be a number in \[0, 2\]"),
        ({"temperature": "hot"}, r"Expected `float \| null`, got `str` - at `\$\.temperature`"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_k": -2}, "top_k is -2"),
        ({"top_k": 1.5}, r"\$\.top_k"),
        ({"min_p": 2}, "min_p is 2"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
    ],
)
def test_a_value_that_cannot_be_used_stops_start_up(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"generation_config\.json: .*{message}.*--generation-config none"):
        default_sampling("auto", write(tmp_path, **fields))
