"""What a Tab completes, asked of each shell itself."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

import programs
from flyball_cli import build_parser, completion, main

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120

COMPLETED = {
    "re": {"render"},
    "l": {"local", "logs"},  # the internal listener is none of them
    "serve --max-num-s": {"--max-num-seqs"},
    "serve --device c": {"cpu", "cuda"},
    "status chat --name": {"--namespace"},
    "bench --burst": {"--burstiness"},
    "batch pypro": {"pyproject.toml"},
    "render -f pypro": {"pyproject.toml"},
    "serve pypro": {"pyproject.toml"},
    "completion z": {"zsh"},
}
"""What is typed after ``flyball`` in the root of the repository, and the words that a Tab offers."""


def ask(*command: str, **variables: str) -> str:
    environment = {**os.environ, **variables}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def script_file(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A shell's script, under the name that zsh wants for it."""
    path = tmp_path_factory.mktemp(request.param) / "_flyball"
    path.write_text(completion.script(request.param, build_parser()))
    return path


@pytest.mark.parametrize("script_file", ["bash"], indirect=True)
@pytest.mark.parametrize("typed", COMPLETED)
def test_bash_completes_commands_flags_values_and_files(typed: str, script_file: Path) -> None:
    words = typed.split(" ")
    offer = (
        f"COMP_WORDS=(flyball {typed}); COMP_CWORD={len(words)}; _shtab_flyball; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    offered = ask("bash", "-c", f"source {shlex.quote(str(script_file))}\n{offer}")
    assert {word.strip() for word in offered.splitlines()} == COMPLETED[typed]


@pytest.mark.parametrize("script_file", ["fish"], indirect=True)
@pytest.mark.parametrize("typed", COMPLETED)
def test_fish_completes_commands_flags_values_and_files(typed: str, script_file: Path, tmp_path: Path) -> None:
    offer = f"source {shlex.quote(str(script_file))}; complete --do-complete {shlex.quote(f'flyball {typed}')}"
    offered = ask(programs.find("fish"), "--no-config", "-c", offer, HOME=str(tmp_path), XDG_DATA_HOME=str(tmp_path))
    assert {line.partition("\t")[0] for line in offered.splitlines() if line} == COMPLETED[typed]


COMMON = {"l": "lo", "serve --device c": "c"}
"""What a Tab writes in place of the last word where it offers several."""

ZSHRC = """
PS1=ready
fpath=({folder} $fpath)
autoload -Uz compinit
compinit -D -u
note-line() {{ print -r -- "$BUFFER" >> {noted}; BUFFER= }}
zle -N note-line
bindkey '^X' note-line
"""
TYPE_LINES = """
zmodload zsh/zpty
zpty terminal zsh -i
zpty -r terminal seen '*ready*'
for line in "$@"; do zpty -w -n terminal "$line"$'\\t\\x18'; done
zpty -w -n terminal $'\\x04'
while zpty -r terminal seen; do :; done
"""


@pytest.mark.parametrize("script_file", ["zsh"], indirect=True)
def test_zsh_completes_commands_flags_values_and_files(script_file: Path, tmp_path: Path) -> None:
    """Lines are typed into a zsh in a terminal, each with a Tab after it; a Tab writes what is common to all that it offers."""
    zsh = programs.find("zsh")
    noted = tmp_path / "lines"
    (tmp_path / ".zshrc").write_text(ZSHRC.format(folder=script_file.parent, noted=noted))
    ask(zsh, "-fc", TYPE_LINES, "zsh", *(f"flyball {typed}" for typed in COMPLETED), ZDOTDIR=str(tmp_path), TERM="dumb")
    after = {typed: COMMON.get(typed) or "".join(words) + " " for typed, words in COMPLETED.items()}
    expected = [" ".join(("flyball", *typed.split(" ")[:-1], word)) for typed, word in after.items()]
    assert noted.read_text().splitlines() == expected


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_every_shell_gets_a_script_and_it_hides_the_listener(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    printed = capsys.readouterr()
    assert "--max-num-seqs" in printed.out
    assert "--namespace" in printed.out
    assert "listener" not in printed.out
    assert not printed.err
