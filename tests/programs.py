"""Programs that some tests run and that a machine may lack."""

import os
import shutil

import pytest

REQUIRE = "FLYBALL_REQUIRE_PROGRAMS"


def find(program: str, package: str | None = None) -> str:
    """Return the path of a program. Without it, skip the test, or fail it when FLYBALL_REQUIRE_PROGRAMS is 1, as CI sets it.

    Args:
        package: the Debian package that has the program; None when it has the program's name.
    """
    found = shutil.which(program)
    if found is not None:
        return found
    missing = f"{program} is not on PATH. Install Debian's package {package or program}"
    if os.environ.get(REQUIRE) == "1":
        pytest.fail(f"{missing}: {REQUIRE}=1 allows no test to be skipped for it")
    pytest.skip(f"{missing}; {REQUIRE}=1 makes this a failure")
