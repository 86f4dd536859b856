"""The compiled simulator: the same result to the last bit, and what is said where it cannot be had."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import programs
from flyball_runtime.core.errors import ConfigError
from flyball_simulation import compiled

ROOT = Path(__file__).parents[2]
MANIFEST = ROOT / "examples" / "llmdeployment.yaml"

RUNS = {
    "the tuner": "--plant cpu --workload chat --request-rate 2 --minutes 6 --replicas 2 --kv-tokens 12000",
    "a busy neighbour": "--plant a100 --workload code --request-rate 4 --minutes 6 --slow-down 1.6:2:4 --hiccups 0.02",
    "rules": "--plant l4 --workload long --request-rate 0.4 --minutes 6 --controller rules",
    "all fixed limits": "--plant cpu --workload chat --request-rate 1 --minutes 1 --controller oracle",
}


def simulate(flags: str, output: Path, *more: str) -> dict[str, object]:
    command = [sys.executable, "-m", "flyball_cli", "simulate", "-f", str(MANIFEST), "--output", str(output), *more]
    done = subprocess.run([*command, *flags.split()], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, object] = json.loads(output.read_text())
    result.pop("steps_per_s")
    return result


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    programs.find("gcc")
    programs.python_headers()
    return tmp_path_factory.mktemp("cache")


@pytest.mark.slow
@pytest.mark.parametrize("flags", RUNS.values(), ids=RUNS)
def test_the_result_is_the_same(flags: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYBALL_CACHE_DIR", str(cache))
    expected = simulate(flags, tmp_path / "interpreted.json")
    assert simulate(flags, tmp_path / "compiled.json", "--compile") == expected
    (folder,) = (cache / "simulator").iterdir()
    built = {path.relative_to(folder).as_posix().partition(".")[0] for path in folder.rglob("*.so")}
    assert {module.removesuffix(".py") for module in compiled.MODULES} <= built


def test_modules_are_there_and_define_no_struct() -> None:
    folders = {package: next(ROOT.glob(f"*/{package}")) for package in compiled.PACKAGES}
    for module in compiled.MODULES:
        package, _, file = module.partition("/")
        assert "(Struct" not in (folders[package] / file).read_text(), f"mypyc cannot compile {module}"


def test_without_mypyc_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"has no mypyc and no setuptools\. Install them"):
        compiled.run(["simulate"])


@pytest.mark.slow
def test_without_a_compiler_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYBALL_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"(?s)mypyc ended with 1. It needs a C compiler.*no-such-compiler"):
        compiled.run(["simulate"])
    assert not any((tmp_path / "simulator").iterdir())


def test_modules_that_python_does_not_load_are_no_endless_chain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the copy were what runs, uncompiled."""
    monkeypatch.setattr(compiled, "_folder", lambda: tmp_path)
    monkeypatch.setattr(compiled, "_source", lambda package: tmp_path / package)
    with pytest.raises(ConfigError, match="this Python does not load the modules that were compiled in"):
        compiled.run(["simulate"])


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLYBALL_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"cannot write to .* Set FLYBALL_CACHE_DIR to a folder"):
        compiled.run(["simulate"])
