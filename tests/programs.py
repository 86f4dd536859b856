"""Programs that some tests run and that a machine may lack."""

import os
import shutil
import sysconfig
from pathlib import Path
from typing import NoReturn

import pytest

REQUIRE = "FLYBALL_REQUIRE_PROGRAMS"


def find(program: str, package: str | None = None) -> str:
    """Return the path of a program. Without it, skip the test, or fail it when FLYBALL_REQUIRE_PROGRAMS is 1, as CI sets it.

    Args:
        package: the Debian package that has the program; None when it has the program's name.
    """
    found = shutil.which(program)
    if found is None:
        _lack(f"{program} is not on PATH", package or program)
    return found


def python_headers() -> Path:
    """Return the path of Python.h, likewise."""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        _lack(f"{header} is not there", "python3-dev")
    return header


def _lack(what: str, package: str) -> NoReturn:
    missing = f"{what}. Install Debian's package {package}"
    if os.environ.get(REQUIRE) == "1":
        pytest.fail(f"{missing}: {REQUIRE}=1 allows no test to be skipped for it")
    pytest.skip(f"{missing}; {REQUIRE}=1 makes this a failure")
