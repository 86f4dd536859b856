"""Runs Triton kernels in the interpreter where there is no GPU; must happen before triton is imported."""

import os
import signal

import pytest
import torch
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

# How long an example takes says how busy the machine is, and nothing of the code.
settings.register_profile("flyball", deadline=None)
settings.load_profile("flyball")

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# The models of the tests are so small that a second thread costs more than it gives, most of all on a busy machine.
torch.set_num_threads(1)

# Shells ignore Ctrl-C for what they run in the background; tests that press it would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SPREAD = "tests/simulation/test_proof.py::"
"""Tests that share nothing and take minutes: workers take them one by one. Other files go to one worker as a whole."""


class Scheduling(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return nodeid if nodeid.startswith(SPREAD) else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Scheduling | None:
    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None
