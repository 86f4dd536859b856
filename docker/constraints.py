"""Read a report of ``pip install --report -``; print the version of each package, as constraints for pip."""

import json
import sys

found = (one["metadata"] for one in json.load(sys.stdin)["install"])
versions = {one["name"].lower().replace("_", "-"): one["version"] for one in found}
versions.pop("flyball")
print("# Written by `make lock`: the versions that set-up, CI and the images install")
for name in sorted(versions):
    print(f"{name}=={versions[name]}")
