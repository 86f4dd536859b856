"""The Triton kernels compile to machine code for GPUs that are not here, and fit them."""

import json
import os
import subprocess
import sys

import pytest

from flyball_kernels import aot

SHARED_BYTES_PER_BLOCK = 99 * 1024  # the least of the architectures since sm_80 (sm_86, sm_89)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """What each kernel needs on each architecture; compiled in a process of its own, outside the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-m", "flyball_kernels.aot", "--json"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_every_kernel_compiles_for_every_architecture(compiled):
    wanted = {(spec.name, f"sm_{architecture}") for spec in aot.specs() for architecture in aot.ARCHITECTURES}
    assert {(row["kernel"], row["architecture"]) for row in compiled} == wanted


def test_nothing_spills(compiled):
    # 8 bytes are one or two registers that wait on the stack until their loop ends
    assert [row for row in compiled if row["stack_bytes"] > 8] == []


def test_shared_memory_fits_every_architecture(compiled):
    assert [row for row in compiled if row["shared_bytes"] > SHARED_BYTES_PER_BLOCK] == []
