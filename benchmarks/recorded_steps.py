"""Run a server and note what each of its steps computed and how long it took.

    FLYBALL_BENCHMARK_STEPS=FILE python benchmarks/recorded_steps.py MODULE [ARGUMENT ...]

runs ``main(ARGUMENTS)`` of a module. Engine processes that it spawns append a record to FILE for each step that the governor
learns from: not those after idle time.
"""

import importlib
import os
import struct
import sys
from io import RawIOBase
from pathlib import Path
from typing import NamedTuple

from flyball_runtime.governor.learner import StepTimeLearner
from flyball_runtime.governor.work import Work

STEPS_ENV = "FLYBALL_BENCHMARK_STEPS"
_RECORD = struct.Struct("<4qd")


class Step(NamedTuple):
    """What a step computed, and the seconds from the end of the step before to its own."""

    work: Work
    seconds: float


class Steps:
    """Reads what a server appends to a file."""

    def __init__(self, path: Path) -> None:
        self._path, self._num_read = path, 0

    def new(self) -> list[Step]:
        """Return the steps since the last call."""
        with self._path.open("rb") as file:
            file.seek(self._num_read)
            data = file.read()
        data = data[: len(data) // _RECORD.size * _RECORD.size]
        self._num_read += len(data)
        return [Step(Work(*work), seconds) for *work, seconds in _RECORD.iter_unpack(data)]


def record(file: RawIOBase) -> None:
    """Have the learner of this process append each step that it gets to a file."""
    learn = StepTimeLearner.observe

    def observe(learner: StepTimeLearner, work: Work, seconds: float) -> None:
        file.write(_RECORD.pack(*work, seconds))
        learn(learner, work, seconds)

    StepTimeLearner.observe = observe  # type: ignore[method-assign]


if __name__ == "__mp_main__" and STEPS_ENV in os.environ:
    # as the main module of a process that multiprocessing spawns, for as long as it runs
    record(Path(os.environ[STEPS_ENV]).open("ab", buffering=0))  # noqa: SIM115

if __name__ == "__main__":
    sys.exit(importlib.import_module(sys.argv[1]).main(sys.argv[2:]))
