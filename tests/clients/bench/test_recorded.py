import gzip
from pathlib import Path

import pytest

from flyball_clients.bench.recorded import TraceRequest, read_dataset, read_trace
from flyball_clients.errors import ConfigError

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:17:03.9799600,4808,10\r\n"
    "2023-11-16 18:17:04.0319600,3180,8\r\n"
)
MOONCAKE = (
    '{"timestamp": 0, "input_length": 600, "output_length": 50, "hash_ids": [0, 1]}\n'
    '{"timestamp": 3000, "input_length": 512, "output_length": 4, "hash_ids": [0]}\n'
)


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return str(path)


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_azure(tmp_path: Path, name: str) -> None:
    first, second = read_trace(write(tmp_path, name, AZURE))
    assert (first.input_len, first.output_len, first.hash_ids) == (4808, 10, ())
    assert second.time_s - first.time_s == pytest.approx(0.052)


@pytest.mark.parametrize("name", ["m.jsonl", "m.jsonl.gz"])
def test_mooncake(tmp_path: Path, name: str) -> None:
    assert read_trace(write(tmp_path, name, MOONCAKE)) == [
        TraceRequest(0.0, 600, 50, (0, 1)),
        TraceRequest(3.0, 512, 4, (0,)),
    ]


def test_requests_come_in_order_of_time(tmp_path: Path) -> None:
    lines = AZURE.splitlines()
    shuffled = "\n".join([lines[0], lines[2], lines[1]])
    assert [request.input_len for request in read_trace(write(tmp_path, "a.csv", shuffled))] == [4808, 3180]


@pytest.mark.parametrize(
    "line",
    [
        "2023-11-16 18:17:04,3180",
        "yesterday,1,2",
        "2023-11-16,ten,2",
        "2023-11-16,1,",
        "2023-11-16,0,5",
        "2023-11-16,5,-1",
    ],
)
def test_a_malformed_azure_line_is_named(tmp_path: Path, line: str) -> None:
    path = write(tmp_path, "a.csv", AZURE + line + "\r\n")
    with pytest.raises(ConfigError, match=r"a\.csv:4: .+"):
        read_trace(path)


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        '{"timestamp": 1}',
        '{"timestamp": 1, "input_length": "5", "output_length": 2}',
        '{"timestamp": 1, "input_length": 5, "output_length": 0}',
        '{"timestamp": 1, "input_length": 513, "output_length": 2, "hash_ids": [1]}',
        '{"timestamp": 1, "input_length": 5, "output_length": 2, "hash_ids": [-1]}',
    ],
)
def test_a_malformed_mooncake_line_is_named(tmp_path: Path, line: str) -> None:
    path = write(tmp_path, "m.jsonl", MOONCAKE + line + "\n")
    with pytest.raises(ConfigError, match=r"m\.jsonl:3: .+"):
        read_trace(path)


def test_missing_columns_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a\.csv:1: no column ContextTokens, GeneratedTokens"):
        read_trace(write(tmp_path, "a.csv", "TIMESTAMP,Tokens\n1,2\n"))


@pytest.mark.parametrize(("name", "text"), [("a.csv", AZURE.splitlines()[0]), ("m.jsonl", "\n\n"), ("a.csv", "")])
def test_a_trace_without_requests_is_refused(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=r"no requests|no column"):
        read_trace(write(tmp_path, name, text))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    not_gzip = tmp_path / "a.csv.gz"
    not_gzip.write_text(AZURE)
    truncated = tmp_path / "t.csv.gz"
    truncated.write_bytes(gzip.compress(AZURE.encode())[:-20])
    binary = tmp_path / "b.csv"
    binary.write_bytes(b"TIMESTAMP,ContextTokens,GeneratedTokens\n\xff\xfe\n")
    for path in (not_gzip, truncated, binary, tmp_path / "missing.csv"):
        with pytest.raises(ConfigError, match=f"cannot read the trace .*{path.name}"):
            read_trace(str(path))


def test_an_unknown_kind_of_file_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--trace is t\.parquet; it must end in \.csv"):
        read_trace("t.parquet")


def write_lines(folder: Path, *lines: str) -> str:
    path = folder / "d.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def test_rows_come_in_order(tmp_path: Path) -> None:
    path = write_lines(tmp_path, '{"prompt": "é\u2028x", "max_tokens": 3}', "", '{"prompt": [1, 2]}')
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
    path = write_lines(tmp_path, '{"prompt": "fine"}', line)
    with pytest.raises(ConfigError, match=rf"d\.jsonl:2: .*{message}"):
        read_dataset(path, api)  # type: ignore[arg-type]


def test_an_empty_or_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no prompts"):
        read_dataset(write_lines(tmp_path, ""), "chat")
    with pytest.raises(ConfigError, match="cannot read the dataset"):
        read_dataset(str(tmp_path / "missing"), "chat")
