"""Where threads run: those of this process, as Linux says it."""

import json
import os
import subprocess
import sys

import pytest

from flyball_kernels import Backend, place_threads

PLACED = """
import json, os, torch
from pathlib import Path
from flyball_kernels import choose_backend, place_threads

def places():
    texts = [(one / "status").read_text() for one in Path("/proc/self/task").iterdir()]
    return sorted(text.split("Cpus_allowed_list:")[1].split()[0] for text in texts)

torch.set_num_threads(2)
cores, backend = os.sched_getaffinity(0), choose_backend("cpu", "cpp")
before = places()
first, second = sorted(cores)[:2]
errors = [place_threads({first, second}, apart=True, backend=backend)]
apart = places()
errors.append(place_threads(cores, apart=False, backend=backend))
together = places()
errors.append(place_threads({100_000}, apart=True, backend=backend))
is_as_before = set(together) == set(before) and places() == together
print(json.dumps([errors[:2], errors[2] != 0, apart.count(str(first)), apart.count(str(second)), is_as_before]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_each_thread_gets_a_core_and_gives_it_back() -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core is all there is")
    result = subprocess.run([sys.executable, "-c", PLACED], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == [[0, 0], True, 1, 1, True]


def test_only_threads_of_the_cpp_ops_can_be_placed() -> None:
    with pytest.raises(ValueError, match="'torch' cannot be placed"):
        place_threads({0}, apart=True, backend=Backend("torch"))


def test_no_core_is_an_error() -> None:
    with pytest.raises(ValueError, match="no cores"):
        place_threads((), apart=True, backend=Backend("cpp"))
