"""Triton takes two names of one value for one variable of a loop that changes both; its interpreter does not."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import flyball_kernels

KERNELS = sorted(Path(flyball_kernels.__file__).parent.glob("*/kernel.py"))


def assigned(nodes: list[ast.stmt]) -> set[str]:
    names = (node for statement in nodes for node in ast.walk(statement) if isinstance(node, ast.Name))
    return {name.id for name in names if isinstance(name.ctx, ast.Store)}


def shared(source: str) -> Iterator[tuple[str, str]]:
    """Yield names of one value that a loop of the same function changes both."""
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        loops = [node for node in ast.walk(function) if isinstance(node, ast.While | ast.For)]
        copies = [
            (target.id, node.value.id, node.lineno)
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name)
            for target in node.targets
            if isinstance(target, ast.Name)
        ]
        for loop in loops:
            changed = assigned(loop.body)
            yield from ((one, other) for one, other, line in copies if line < loop.lineno and {one, other} <= changed)


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.parent.name)
def test_no_two_variables_of_a_loop_begin_as_one_value(path: Path) -> None:
    assert list(shared(path.read_text())) == []


def test_such_variables_are_found() -> None:
    source = (
        "def f():\n    a = zeros()\n    b = a\n    while a < 9:\n        if a > 1:\n            b = a\n        a += 1\n"
    )
    assert list(shared(source)) == [("b", "a")]
    assert list(shared(source.replace("b = a\n    while", "b = zeros()\n    while"))) == []
