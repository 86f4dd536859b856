import logging
from pathlib import Path

import msgspec
import pytest

from flyball_protocol import BootPrior, Limits
from flyball_runtime.core.config import read_boot_prior

PRIOR = BootPrior(revision=3, limits=Limits(max_num_seqs=8, kv_cache_fraction=0.5, max_num_batched_tokens=64))


def test_a_prior_is_read(tmp_path: Path) -> None:
    file = tmp_path / "limits.json"
    file.write_bytes(msgspec.json.encode(PRIOR))
    assert read_boot_prior(file) == PRIOR


def test_a_missing_file_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert read_boot_prior(tmp_path / "none.json") is None
    assert [record.levelno for record in caplog.records] == [logging.INFO]
    assert f"--boot-prior {tmp_path}/none.json does not exist" in caplog.text


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "truncated"),
        (b"\xff\xfe", ""),
        (b"[]", "Expected `object`"),
        (b'{"revision": 0, "limits": {}}', "$.revision"),
        (b'{"revision": 1}', "missing required field `limits`"),
        (b'{"revision": 1, "limits": {"max_num_seqs": 8}}', "missing required field `kv_cache_fraction`"),
        (msgspec.json.encode(PRIOR).replace(b":3", b":18446744073709551616"), "$.revision"),
        (msgspec.json.encode(PRIOR).replace(b":8", b":1" + b"0" * 30), "$.limits.max_num_seqs"),
        (msgspec.json.encode(PRIOR).replace(b":64", b":1e400"), "$.limits.max_num_batched_tokens"),
        (msgspec.json.encode(PRIOR).replace(b":64", b":-1"), "$.limits.max_num_batched_tokens"),
        (msgspec.json.encode(PRIOR).replace(b"0.5", b"NaN"), "malformed"),
        (msgspec.json.encode(PRIOR).replace(b"0.5", b"1.5"), "$.limits.kv_cache_fraction"),
        (msgspec.json.encode(PRIOR).replace(b"max_num_seqs", b"max_seqs"), "unknown field `max_seqs`"),
    ],
)
def test_a_malformed_file_is_told_loudly_and_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes, says: str
) -> None:
    file = tmp_path / "limits.json"
    file.write_bytes(content)
    assert read_boot_prior(file) is None
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert str(file) in record.getMessage()
    assert says in record.getMessage()
    assert "correct the file or delete it" in record.getMessage()


def test_a_file_that_cannot_be_read_is_told_loudly_and_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_boot_prior(tmp_path) is None
    assert f"cannot read --boot-prior {tmp_path} (Is a directory)" in caplog.text
