"""Sampling on CPU against the torch reference.

python benchmarks/sampling.py
"""

import torch

from flyball_kernels import choose_backend, sample
from flyball_kernels.sampling import reference
from machine import compare, describe

FILTERS = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top_k 50": {"top_k": 50},
    "top_p 0.95": {"top_p": 0.95},
    "min_p 0.05": {"min_p": 0.05},
    "top_k 50, top_p 0.95": {"top_k": 50, "top_p": 0.95},
}


def settings(
    num_rows: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> list[torch.Tensor]:
    rows = torch.arange(num_rows)
    values = (torch.full((num_rows,), value) for value in (temperature, top_k, top_p, min_p))
    return [*values, rows, rows]


def main() -> None:
    backend = choose_backend("cpu")
    print(f"{describe()}; backend {backend.name}; logits normal with deviation 3")
    for num_rows, vocab in ((1, 8192), (64, 8192), (64, 151936)):
        logits = torch.randn(num_rows, vocab) * 3
        for name, filters in FILTERS.items():
            tensors = (logits, *settings(num_rows, **filters))
            ours, theirs = compare(
                lambda tensors=tensors: sample(*tensors, backend=backend),
                lambda tensors=tensors: reference.sample(*tensors),
            )
            shape = f"[{num_rows}, {vocab}]"
            times = f"ours {ours * 1e3:8.3f} ms  torch {theirs * 1e3:8.3f} ms  {theirs / ours:6.2f}x"
            print(f"{shape:14} {name:22} {times}", flush=True)


if __name__ == "__main__":
    main()
