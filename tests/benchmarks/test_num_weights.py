"""The weights that benchmarks take a decode to read, of checkpoints with a head of their own and with a tied one."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def test_a_tied_head_counts_like_one_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    common, versus_vllm = importlib.import_module("common"), importlib.import_module("versus_vllm")
    shape = common.SHAPES["tiny"] | {"vocab_size": 512}
    counts = []
    for ties in (False, True):
        monkeypatch.setitem(common.SHAPES, "tiny", shape | {"tie_word_embeddings": ties})
        counts.append(versus_vllm.num_weights(common.make_checkpoint(tmp_path / str(ties), "tiny")))
    own, tied = counts
    assert own["of_head"] == 512 * shape["hidden_size"]
    assert tied == own
