"""Print what pyproject.toml requires, with one extra: requirements.py EXTRA PYPROJECT [PACKAGE-TO-LEAVE-OUT ...]

So the packages are a layer of their own, which a change of Flyball's code leaves as it is.
"""

import sys
import tomllib
from pathlib import Path

extra, pyproject, *left_out = sys.argv[1:]
project = tomllib.loads(Path(pyproject).read_text())["project"]
required = [*project["dependencies"], *project["optional-dependencies"][extra]]
print("\n".join(line for line in required if not line.startswith(tuple(left_out))))
