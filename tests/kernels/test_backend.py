import logging
import os
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from flyball_kernels import Backend, choose_backend, rms_norm
from flyball_kernels.cpu import build, library


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    """A machine with an empty cache and no compiler."""
    monkeypatch.setattr(library, "_loaded", False)
    monkeypatch.setenv("FLYBALL_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")


@pytest.fixture
def fake_compiler(monkeypatch, tmp_path):
    """A compiler that writes an empty output and a line per call into calls.txt."""
    script = tmp_path / "fake-c++"
    script.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --version ]; then echo fake 1; exit; fi\n'
        f'echo call >> "{tmp_path}/calls.txt"; sleep 0.05\n'
        'while [ $# -gt 0 ]; do if [ "$1" = -o ]; then : > "$2"; fi; shift; done\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("FLYBALL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(script))
    return tmp_path / "calls.txt"


def test_auto_is_cpp_on_cpu_and_triton_on_cuda():
    assert choose_backend("cpu", "auto").name == "cpp"
    assert choose_backend("cuda", "auto") == Backend("triton")
    assert choose_backend("meta", "auto") == Backend("torch")
    assert choose_backend("cpu", "torch") == Backend("torch")


def test_auto_without_a_compiler_warns_and_runs_the_references(no_compiler, caplog):
    with caplog.at_level(logging.WARNING):
        backend = choose_backend("cpu", "auto")
    assert backend.name == "torch"
    assert "slower torch references" in caplog.text
    assert "'no-such-compiler' is not on PATH. Install g++" in caplog.text
    torch.testing.assert_close(rms_norm(torch.ones(1, 4), torch.ones(4), 0.0, backend=backend), torch.ones(1, 4))


def test_cpp_without_a_compiler_is_an_error(no_compiler):
    with pytest.raises(RuntimeError, match="'no-such-compiler' is not on PATH"):
        choose_backend("cpu", "cpp")


def test_backends_that_cannot_run_there(monkeypatch):
    with pytest.raises(ValueError, match="backend is 'flash'; it must be one of auto, cpp, torch, triton"):
        choose_backend("cpu", "flash")
    with pytest.raises(ValueError, match="'cpp' runs on cpu, not on cuda"):
        choose_backend("cuda", "cpp")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="'triton' runs on cuda, not on cpu"):
        choose_backend("cpu", "triton")


def test_a_failing_compiler_is_quoted(no_compiler, monkeypatch, tmp_path):
    script = tmp_path / "broken-c++"
    script.write_text("#!/bin/sh\necho kernel.cpp:1: that will not do >&2\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    with pytest.raises(build.BuildError, match=r"(?s)broken-c\+\+ ended with 3\..*that will not do"):
        build.build()
    assert [path for path in (tmp_path / "kernels").iterdir() if path.is_dir()] == []


def test_many_builders_compile_once(fake_compiler):
    with ThreadPoolExecutor(6) as pool:
        paths = set(pool.map(lambda _: build.build(), range(6)))
    assert len(paths) == 1 and paths.pop().exists()
    assert fake_compiler.read_text().splitlines() == ["call", "call"]  # compile and link


def test_other_flags_of_the_cpu_mean_another_library(fake_compiler, monkeypatch):
    here = build.library_path(os.environ["CXX"])
    monkeypatch.setattr(build.variants, "cpu_flags_line", lambda: "another cpu")
    assert build.library_path(os.environ["CXX"]) != here
