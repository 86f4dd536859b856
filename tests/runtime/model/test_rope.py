"""Frequencies of every RoPE type equal those of transformers, for the length that it is asked for."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from flyball_runtime.core.json_fields import JsonFields
from flyball_runtime.core.rope import read_ropes
from flyball_runtime.model.rope import cos_sin_cache, inverse_frequencies

HEAD_DIM = 16
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
LONG = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [2.0, 2.1, 3.2, 4.3, 5.4, 6.5, 7.6, 8.7],
}


@pytest.mark.parametrize("max_len", [50, 300, 1000])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 4.0},
        YARN,
        {**YARN, "attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
        {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
        LONG,
        {**LONG, "factor": 3.0, "attention_factor": 1.1},
    ],
)
def test_frequencies(rope: dict[str, Any], max_len: int, tmp_path: Any) -> None:
    fields = {"max_position_embeddings": 256, "rope_theta": 5e3, "rope_scaling": dict(rope)}
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, **fields)
    config.head_dim = HEAD_DIM
    expected, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"), seq_len=max_len)
    ours, _ = read_ropes(
        JsonFields(tmp_path, {**fields, "rope_scaling": dict(rope)}), theta=1e4, sliding_theta=None, is_partial=False
    )
    assert_close(inverse_frequencies(ours, HEAD_DIM, max_len), expected)
    assert ours.attention_factor == pytest.approx(factor)
    table = cos_sin_cache(ours, HEAD_DIM, max_len, torch.device("cpu"))
    assert_close(table[7], torch.cat(((7 * expected).cos(), (7 * expected).sin())) * factor)
