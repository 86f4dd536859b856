"""How a checkpoint makes embeddings, as its files say."""

import json
from pathlib import Path
from typing import Any

import pytest

from flyball_runtime.cli import build_parser
from flyball_runtime.core.embedder import Embedder
from flyball_runtime.core.errors import ConfigError

MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]


def checkpoint(
    path: Path, *, modules: Any = None, pooling: dict[str, Any] | None = None, config: dict[str, Any] | None = None
) -> Path:
    (path / "config.json").write_text(json.dumps({"hidden_size": 64} | (config or {})))
    if modules is not None:
        (path / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (path / "1_Pooling").mkdir()
        (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return path


def test_a_plain_checkpoint_pools_the_last_token_and_is_not_cut(tmp_path: Path) -> None:
    embedder = Embedder.of_checkpoint("auto", checkpoint(tmp_path))
    assert embedder == Embedder(pooling="last", size=64)
    assert [one for one in (-1, 0, 1, 63, 64, 65) if embedder.takes(one)] == [64]


def test_sentence_transformers_files_choose_the_pooling_and_the_flag_comes_before_them(tmp_path: Path) -> None:
    pooling = {"word_embedding_dimension": 64, "pooling_mode_lasttoken": False, "pooling_mode_mean_tokens": True}
    path = checkpoint(tmp_path, modules=MODULES, pooling=pooling)
    assert Embedder.of_checkpoint("auto", path).pooling == "mean"
    assert Embedder.of_checkpoint("last", path).pooling == "last"
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling | dict.fromkeys(pooling, False)))
    with pytest.raises(ConfigError, match="asks for no pooling_mode"):
        Embedder.of_checkpoint("auto", path)


def test_the_flag_takes_vllms_capital_letters() -> None:
    assert build_parser().parse_args(["serve", "m", "--pooling-type", "MEAN"]).pooling_type == "mean"


def test_dimensions_that_a_model_was_trained_for(tmp_path: Path) -> None:
    some = Embedder.of_checkpoint("auto", checkpoint(tmp_path, config={"matryoshka_dimensions": [16, 32]}))
    assert [one for one in range(70) if some.takes(one)] == [16, 32, 64]
    every = Embedder.of_checkpoint("auto", checkpoint(tmp_path, config={"is_matryoshka": True}))
    assert [one for one in range(70) if every.takes(one)] == list(range(1, 65))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"modules": MODULES, "pooling": {"pooling_mode_cls_token": True}}, "pooling_mode_cls_token"),
        ({"modules": MODULES, "pooling": {"pooling_mode_max_tokens": True, "pooling_mode_lasttoken": True}}, "max_"),
        ({"modules": MODULES}, "cannot read"),
        ({"modules": [*MODULES, {"path": "3_Dense", "type": "sentence_transformers.models.Dense"}]}, "Dense"),
        ({"modules": {"0": "Transformer"}}, "is not a list"),
        ({"modules": [5]}, "is not a list"),
        ({"config": {"matryoshka_dimensions": [0]}}, "matryoshka_dimensions"),
        ({"config": {"matryoshka_dimensions": "all"}}, "matryoshka_dimensions"),
        ({"config": {"is_matryoshka": 1}}, "is_matryoshka"),
    ],
)
def test_what_is_not_served_ends_the_start_with_a_way_out(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        Embedder.of_checkpoint("auto", checkpoint(tmp_path, **files))
    assert str(tmp_path) in str(refused.value)
