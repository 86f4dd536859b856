"""What the images are built from."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_every_package_is_among_what_the_images_are_built_from() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = project["tool"]["setuptools"]["packages"]["find"]["where"]
    let_through = (ROOT / ".dockerignore").read_text().splitlines()
    assert [folder for folder in folders if f"!{folder}" not in let_through] == []


@pytest.mark.parametrize(
    ("extra", "has", "lacks"),
    [("runtime", {"torch", "aiohttp", "rich"}, {"kopf"}), ("operator", {"kopf"}, {"torch", "numpy"})],
)
def test_an_image_has_the_packages_of_its_extra_and_of_those_that_it_names(
    extra: str, has: set[str], lacks: set[str]
) -> None:
    command = (sys.executable, ROOT / "docker" / "requirements.py", extra, ROOT / "pyproject.toml")
    lines = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.splitlines()
    names = {line.partition(">")[0] for line in lines}
    assert has <= names
    assert not names & (lacks | {"flyball"})
    assert not [name for name in names if "[" in name]
