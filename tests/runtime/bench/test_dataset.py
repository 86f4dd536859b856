from pathlib import Path

import pytest

from flyball_runtime.bench.dataset import read_dataset
from flyball_runtime.core.errors import ConfigError


def write(folder: Path, *lines: str) -> str:
    path = folder / "d.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def test_rows_come_in_order(tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt": "é\u2028x", "max_tokens": 3}', "", '{"prompt": [1, 2]}')
    first, second = read_dataset(path, "completions")
    assert (first.prompt, first.max_tokens) == ("é\u2028x", 3)
    assert (second.prompt, second.max_tokens) == ([1, 2], None)


@pytest.mark.parametrize(
    ("api", "line", "message"),
    [
        ("completions", "{", "a line is"),
        ("completions", '{"text": "x"}', "unknown field"),
        ("completions", "{}", "either prompt or messages"),
        ("chat", '{"prompt": "x", "messages": []}', "either prompt or messages"),
        ("completions", '{"messages": []}', "--endpoint chat"),
        ("chat", '{"prompt": [1]}', "--endpoint completions"),
        ("completions", '{"prompt": "x", "max_tokens": 0}', "at least 1"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, api: str, line: str, message: str) -> None:
    path = write(tmp_path, '{"prompt": "fine"}', line)
    with pytest.raises(ConfigError, match=rf"d\.jsonl:2: .*{message}"):
        read_dataset(path, api)  # type: ignore[arg-type]


def test_an_empty_or_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no prompts"):
        read_dataset(write(tmp_path, ""), "chat")
    with pytest.raises(ConfigError, match="cannot read the dataset"):
        read_dataset(str(tmp_path / "missing"), "chat")
