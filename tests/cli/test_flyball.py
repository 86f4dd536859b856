"""The command `flyball`: which package runs a command, what is imported for it, and what it says where an extra is missing."""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flyball_cli import build_parser, main
from flyball_cli.commands import COMMANDS
from flyball_clients import cli as clients_cli
from flyball_operator import cli as operator_cli
from flyball_protocol import endpoints
from flyball_runtime import cli as runtime_cli
from flyball_simulation import cli as simulation_cli

ROOT = Path(__file__).parents[2]
EXAMPLE = str(ROOT / "examples" / "llmdeployment.yaml")
HEAVY = ("torch", "transformers", "fastapi", "aiohttp", "kopf", "kubernetes", "rich", "numpy", "flyball_runtime")


def python(code: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=variables, input=stdin, capture_output=True, text=True, timeout=120)


def loaded_by(*words: str, packages: tuple[str, ...] = HEAVY) -> list[str]:
    """Which of the packages are imported after a command has run in a process of its own."""
    done = python(
        "import sys\nfrom flyball_cli import main\n"
        f"try:\n    main({list(words)!r})\nexcept SystemExit:\n    pass\n"
        f"print(*[one for one in {packages!r} if one in sys.modules], file=sys.stderr)",
        stdin="hi",
    )
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()[-1].split()


@pytest.mark.parametrize("words", [("render", "-f", EXAMPLE), ("validate", "-f", EXAMPLE), ("crd",)])
def test_commands_on_manifests_load_no_server_and_no_torch(words: tuple[str, ...]) -> None:
    assert not loaded_by(*words)


@pytest.mark.parametrize("command", ["chat", "bench"])
def test_clients_load_neither_the_runtime_nor_the_operator(command: str) -> None:
    loaded = loaded_by(
        command, "--base-url=http://127.0.0.1:1", packages=("aiohttp", "flyball_runtime", "flyball_operator", "torch")
    )
    assert loaded == ["aiohttp"]


def test_simulate_loads_no_server_and_no_torch(tmp_path: Path) -> None:
    words = ["--workload", "code", "--request-rate", "1", "--minutes", "0.1", "--plant", "cpu"]
    files = ["--manifest", EXAMPLE, "--output", str(tmp_path / "out.json")]
    heavy = ("torch", "transformers", "fastapi", "aiohttp", "kopf", "kubernetes", "matplotlib", "flyball_runtime.model")
    assert not loaded_by("simulate", *words, *files, packages=heavy)
    assert (tmp_path / "out.json").exists()


@pytest.mark.parametrize("words", [("--help",), ("--version",)])
def test_help_and_version_load_no_other_package(words: tuple[str, ...]) -> None:
    assert not loaded_by(*words, packages=(*HEAVY, "flyball_operator"))


def test_help_lists_the_commands_that_users_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    listed = re.findall(r"^ {4}(\w+)", shown, flags=re.MULTILINE)
    assert listed == [*(name for name, command in COMMANDS.items() if command.summary is not None), "completion"]
    assert "listener" not in shown


def test_each_package_has_the_commands_that_flyball_hands_to_it_with_the_same_words() -> None:
    packages = {"runtime": runtime_cli, "operator": operator_cli, "clients": clients_cli, "simulation": simulation_cli}
    theirs = {extra: summaries(package.build_parser()) for extra, package in packages.items()}
    ours = summaries(build_parser())
    del ours["completion"]
    assert ours.items() <= {name: text for listed in theirs.values() for name, text in listed.items()}.items()
    for name, command in COMMANDS.items():
        assert theirs[command.extra].get(name) == command.summary
    assert theirs["operator"].keys() - COMMANDS.keys() == {"run"}


def summaries(parser: argparse.ArgumentParser) -> dict[str, str | None]:
    (action,) = (one for one in parser._actions if isinstance(one, argparse._SubParsersAction))
    return {one.dest: one.help for one in action._choices_actions}


NOT_INSTALLED = """
import sys

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name == {!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, NotInstalled())
"""


@pytest.mark.parametrize(
    ("missing", "words", "extra"),
    [
        ("flyball_runtime", ["serve", "m"], "runtime"),  # as in the operator's image
        ("torch", ["serve", "m"], "runtime"),
        ("flyball_clients", ["chat", "hi"], "clients"),
        ("aiohttp", ["chat", "hi"], "clients"),
        ("numpy", ["bench"], "clients"),
        ("flyball_operator", ["crd"], "operator"),  # as in the runtime's image
        ("yaml", ["render", "-f", EXAMPLE], "operator"),
    ],
)
def test_a_command_without_its_packages_names_the_extra(missing: str, words: list[str], extra: str) -> None:
    done = python(f"{NOT_INSTALLED.format(missing)}\nfrom flyball_cli import main\nsys.exit(main({words!r}))")
    assert done.returncode == endpoints.EXIT_CONFIG_ERROR
    (line,) = done.stderr.splitlines()
    assert f"{words[0]} needs the Python package {missing}" in line
    assert f"pip install 'flyball[{extra}]'" in line


def test_a_fault_of_our_own_is_not_taken_for_a_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flyball_operator.commands.crd", None)
    with pytest.raises(ModuleNotFoundError, match=r"flyball_operator\.commands\.crd"):
        main(["crd"])


def test_ctrl_c_while_a_package_is_imported_leaves_no_traceback() -> None:
    interrupted = """
import sys

class CtrlC:
    def find_spec(self, name, path=None, target=None):
        if name == "flyball_clients":
            raise KeyboardInterrupt

sys.meta_path.insert(0, CtrlC())
from flyball_cli import main
sys.exit(main(["chat", "hi"]))
"""
    done = python(interrupted)
    assert (done.returncode, done.stderr) == (130, "")


def test_exit_codes_and_errors_are_the_commands_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "-f", str(tmp_path / "none.yaml")]) == endpoints.EXIT_CONFIG_ERROR
    assert capsys.readouterr().err.startswith("flyball validate: ")
    assert main(["bench", "--base-url", "nowhere"]) == endpoints.EXIT_CONFIG_ERROR
    with pytest.raises(SystemExit) as ended:
        main(["bogus"])
    assert ended.value.code == endpoints.EXIT_CONFIG_ERROR


def test_completion_without_a_package_says_what_it_lacks() -> None:
    done = python(
        f"{NOT_INSTALLED.format('aiohttp')}\nfrom flyball_cli import main\nsys.exit(main(['completion', 'bash']))"
    )
    assert (done.returncode, done.stderr.count("\n")) == (0, 1)
    assert "aiohttp is not installed; install it with: pip install 'flyball[operator]'" in done.stderr
    assert "render" in done.stdout
