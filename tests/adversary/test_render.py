"""`flyball render` of bad manifests: one line that says what is wrong, at once and whatever it was."""

import random
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from adversary_kit.condition import log_problems
from adversary_kit.manifests import REFUSED, TAKEN
from flyball_protocol import endpoints
from replicas import environment

MOST_MEMORY_BYTES = 3 << 30
DEADLINE_S = 60.0
MOST_BYTES_SAID = 4096
FAST = {
    "an integer of 5,000 digits",
    "100,000 brackets",
    "a name that is forged",
    "a pod that is itself",
    "an alias bomb in the pod",
}

TAKEN_FAST = "a date that is none"


def limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY_BYTES, MOST_MEMORY_BYTES))


def render(file: Path) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "flyball_cli", "render", "-f", str(file)]
    return subprocess.run(
        command, capture_output=True, timeout=DEADLINE_S, preexec_fn=limit_memory, env=environment(), check=False
    )


@pytest.mark.parametrize(
    "name", [pytest.param(n, id=n, marks=[] if n in FAST else [pytest.mark.slow]) for n in REFUSED]
)
def test_a_bad_manifest_is_told_in_one_line(name: str, tmp_path: Path) -> None:
    file = tmp_path / "chat.yaml"
    file.write_bytes(REFUSED[name].encode())
    done = render(file)
    assert (done.returncode, done.stdout) == (endpoints.EXIT_CONFIG_ERROR, b""), (done.stderr[-500:], done.stdout[:500])
    assert done.stderr.startswith(b"flyball render: ")
    assert len(done.stderr) < MOST_BYTES_SAID
    assert not log_problems(done.stderr)


@pytest.mark.parametrize(
    "name", [TAKEN_FAST, *(pytest.param(n, marks=pytest.mark.slow) for n in TAKEN if n != TAKEN_FAST)]
)
def test_an_odd_manifest_is_rendered(name: str, tmp_path: Path) -> None:
    file = tmp_path / "chat.yaml"
    file.write_bytes(TAKEN[name].encode())
    done = render(file)
    assert (done.returncode, done.stderr) == (endpoints.EXIT_OK, b"")
    assert not log_problems(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    "content",
    [b"\xff\xfe\x00", b"\x00" * 100, b"\x80abc", random.Random(1).randbytes(1000)],
    ids=["utf16", "zeros", "latin", "random"],
)
def test_a_file_that_is_no_text_is_told_in_one_line(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "chat.yaml"
    file.write_bytes(content)
    done = render(file)
    assert done.returncode == endpoints.EXIT_CONFIG_ERROR
    assert not log_problems(done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/none", "/dev/null", "/", "/proc/self/mem"])
def test_a_path_that_is_no_manifest_is_told_in_one_line(path: str) -> None:
    done = render(Path(path))
    assert done.returncode == endpoints.EXIT_CONFIG_ERROR
    assert not log_problems(done.stderr)
