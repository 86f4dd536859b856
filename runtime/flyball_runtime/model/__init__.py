"""Torch modules, weight loading and sampling; the only layer that imports flyball_kernels."""
