"""Print what pyproject.toml requires, with one extra: requirements.py EXTRA PYPROJECT

So the packages are a layer of their own, which a change of Flyball's code leaves as it is.
"""

import sys
import tomllib
from pathlib import Path

extra, pyproject = sys.argv[1:]
project = tomllib.loads(Path(pyproject).read_text())["project"]
print("\n".join([*project["dependencies"], *project["optional-dependencies"][extra]]))
