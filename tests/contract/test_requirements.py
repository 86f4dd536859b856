"""What `pip install 'flyball[EXTRA]'` brings is all that the extra's packages import."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

EXTRAS = {
    "protocol": None,
    "cli": None,
    "kernels": "runtime",
    "runtime": "runtime",
    "operator": "operator",
    "clients": "clients",
    "simulation": "simulation",
}
"""The extra that has to bring what a package imports; None where that comes without any."""

BROUGHT = {"starlette": "fastapi", "multidict": "aiohttp", "yarl": "aiohttp"}
"""Packages whose types are part of another one's interface, which requires them."""


def required(extra: str | None) -> set[str]:
    """The packages that an extra requires, and those without any extra."""
    lines = [*PROJECT["dependencies"], *(PROJECT["optional-dependencies"][extra] if extra else ())]
    found = set()
    for line in lines:
        own = re.fullmatch(r"flyball\[(.*)\]", line)
        found |= set().union(*map(required, own[1].split(","))) if own else {normalized(re.split(r"[^\w.-]", line)[0])}
    return found


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def all_required() -> set[str]:
    return set().union(*map(required, PROJECT["optional-dependencies"]))


def test_each_package_has_a_version_for_set_up_and_images_that_pyproject_allows() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    versions = dict(line.split("==") for line in lines)
    assert all_required() <= versions.keys(), "run `make lock`"
    extras = PROJECT["optional-dependencies"].values()
    asked = [Requirement(line) for line in (*PROJECT["dependencies"], *(one for extra in extras for one in extra))]
    others = [one for one in asked if one.name != "flyball"]
    assert [str(one) for one in others if versions[normalized(one.name)] not in one.specifier] == []


distributions = cache(packages_distributions)


def imported(package: str) -> Iterator[str]:
    for file in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                yield node.module.partition(".")[0]


@pytest.mark.parametrize("package", EXTRAS)
def test_what_a_package_imports_comes_with_its_extra(package: str) -> None:
    known = required(EXTRAS[package])
    foreign = {name for name in imported(package) if name not in sys.stdlib_module_names and name[:8] != "flyball_"}
    brought_by = {name: {*map(normalized, distributions().get(name, ())), BROUGHT.get(name)} for name in foreign}
    assert {name for name, brings in brought_by.items() if not brings & known} == set()
