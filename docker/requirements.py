"""Print what pyproject.toml requires, with one extra: requirements.py EXTRA PYPROJECT [PACKAGE-TO-LEAVE-OUT ...]

So the packages are a layer of their own, which a change of Flyball's code leaves as it is.
"""

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

extra, pyproject, *left_out = sys.argv[1:]
project = tomllib.loads(Path(pyproject).read_text())["project"]


def of_extra(name: str) -> Iterator[str]:
    """Yield the requirements of an extra, and of the extras of Flyball that it names."""
    for line in project["optional-dependencies"][name]:
        if line.startswith("flyball["):
            yield from of_extra(line.removeprefix("flyball[").removesuffix("]"))
        else:
            yield line


required = dict.fromkeys((*project["dependencies"], *of_extra(extra)))
print("\n".join(line for line in required if not line.startswith(tuple(left_out))))
