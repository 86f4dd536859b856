"""How a checkpoint wants to be sampled where a request says nothing: its generation_config.json."""

import logging
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from flyball_runtime.core.errors import ConfigError, InvalidRequest
from flyball_runtime.core.json_fields import read_json_object
from flyball_runtime.core.sampling_params import DEFAULT_SAMPLING, SamplingParams

logger = logging.getLogger(__name__)

FILE = "generation_config.json"
AUTO, NONE = "auto", "none"
NONE_OF_VLLM = "vllm"
"""What ``vllm serve`` calls NONE."""

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "encoder_repetition_penalty": (None, 1),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "no_repeat_ngram_size": (None, 0),
    "typical_p": (None, 1),
    "epsilon_cutoff": (None, 0),
    "eta_cutoff": (None, 0),
    "num_beams": (None, 1),
    "bad_words_ids": (None, []),
    "suppress_tokens": (None, []),
    "max_new_tokens": (None,),
}
"""Fields that shape outputs and that this engine has nothing for, each with the values that ask for nothing."""


class _Fields(Struct):
    """The fields that this engine honours; null counts as absent, and whatever else the file holds is skipped."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def default_sampling(generation_config: str, model: Path) -> SamplingParams:
    """The settings of a request that brings none.

    Args:
        generation_config: AUTO reads the file of the checkpoint ``model`` if it has one, NONE reads no file, anything else
            is a folder that holds one.
    Raises:
        ConfigError: the folder has no such file, or a value in it cannot be used.
    """
    if generation_config in (NONE, NONE_OF_VLLM):
        return DEFAULT_SAMPLING
    file = (model if generation_config == AUTO else Path(generation_config)) / FILE
    if file.is_file():
        return _read(file)
    if generation_config == AUTO:
        return DEFAULT_SAMPLING
    raise ConfigError(
        f"--generation-config is {generation_config!r}, but there is no {file}. "
        f"Give a folder that has one, {AUTO} for the checkpoint's, or {NONE}."
    )


def _read(file: Path) -> SamplingParams:
    values = read_json_object(file)
    try:
        set_fields = _set_fields(msgspec.convert(values, _Fields))
        params = SamplingParams(**set_fields)
        params.validate(vocab_size=1)  # it has no token ids
    except (msgspec.ValidationError, InvalidRequest) as error:
        reason = str(error).rstrip(".")
        raise ConfigError(f"{file}: {reason}. Correct the file, or start with --generation-config {NONE}.") from None
    if set_fields:
        logger.info("sampling defaults of requests: %s, from %s", _listed(set_fields), file)
    if ignored := _ignored(values):
        logger.warning("%s sets %s, which this engine does not support; it is ignored", file, _listed(ignored))
    return params


def _set_fields(fields: _Fields) -> dict[str, Any]:
    named = {name: value for name, value in msgspec.structs.asdict(fields).items() if value is not None}
    return named | {"top_k": 0} if named.get("top_k") == -1 else named


def _ignored(values: dict[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name, neutral in _NEUTRAL.items() if values.get(name) not in neutral}


def _listed(fields: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in fields.items())
