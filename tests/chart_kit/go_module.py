"""Files of Go modules: where the custom resource definitions of others come from."""

import json
import os
import subprocess
from pathlib import Path


def module_folder(module: str, version: str) -> Path:
    """Return the folder of a module's source, downloaded if need be."""
    command = ("go", "mod", "download", "-json", f"{module}@{version}")
    done = subprocess.run(command, cwd=os.devnull.rpartition("/")[0], stdout=subprocess.PIPE, text=True, check=True)
    return Path(json.loads(done.stdout)["Dir"])
