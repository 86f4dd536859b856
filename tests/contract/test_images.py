"""What the images are built from."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_package_is_among_what_the_images_are_built_from() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = project["tool"]["setuptools"]["packages"]["find"]["where"]
    let_through = (ROOT / ".dockerignore").read_text().splitlines()
    assert [folder for folder in folders if f"!{folder}" not in let_through] == []
