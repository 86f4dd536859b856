"""Runs Triton kernels in the interpreter where there is no GPU; must happen before triton is imported."""

import os
import signal

import torch
from hypothesis import settings

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
