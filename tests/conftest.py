"""Runs Triton kernels in the interpreter where there is no GPU; must happen before triton is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
