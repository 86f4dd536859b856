"""Runs Triton kernels in the interpreter where there is no GPU; must happen before triton is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# The models of the tests are so small that a second thread costs more than it gives, most of all on a busy machine.
torch.set_num_threads(1)
