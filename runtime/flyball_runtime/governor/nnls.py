"""Least squares with coefficients that are not negative."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_RIDGE = 1e-9
"""Added to the diagonal of the scaled matrix: features that were always alike share their coefficient."""


def nnls(gram: Array, moment: Array) -> Array:
    """Return the ``c >= 0`` that minimizes ``c @ gram @ c - 2 * moment @ c`` (Lawson and Hanson 1974; Bro and de Jong 1997).

    Args:
        gram: ``X.T @ X``, float64 ``[n, n]``, positive semidefinite. A feature that was always 0 gets the coefficient 0.
        moment: ``X.T @ y``, float64 ``[n]``.
    """
    scale = np.sqrt(np.maximum(np.diagonal(gram), 0.0))
    used = np.flatnonzero(scale > 0.0)
    found = np.zeros(len(moment))
    if len(used):
        size = scale[used]
        unit = gram[used][:, used] / (size[:, None] * size)
        unit.flat[:: len(used) + 1] += _RIDGE
        found[used] = _active_set(unit, moment[used] / size) / size
    return found


def nnls_each(grams: Array, moments: Array) -> Array:
    """Return what ``nnls`` does for each of several problems: ``[k, n, n]`` and ``[k, n]`` in, ``[k, n]`` out.

    As long as the solutions without bounds are not negative, one call of each of numpy's operations serves all of them.
    """
    size = np.sqrt(np.maximum(np.diagonal(grams, axis1=1, axis2=2), 0.0))
    used = size > 0.0
    size[~used] = 1.0
    units = grams / (size[:, :, None] * size[:, None, :])
    at = np.arange(grams.shape[1])
    # a feature that was always 0 gets an equation of its own: 1 * c = 0
    units[:, at, at] += np.where(used, _RIDGE, 1.0)
    wanted = np.where(used, moments, 0.0) / size
    found: Array = np.linalg.solve(units, wanted[:, :, None])[:, :, 0]
    for one in np.flatnonzero(found.min(axis=1) < 0.0):
        found[one] = _active_set(units[one], wanted[one])
    found /= size
    return found


def inverse(gram: Array) -> Array:
    """Return the inverse of a positive semidefinite matrix without a 0 on its diagonal; see ``_RIDGE``."""
    size = np.sqrt(np.diagonal(gram))
    outer = size[:, None] * size
    unit = gram / outer
    unit.flat[:: len(size) + 1] += _RIDGE
    found: Array = np.linalg.inv(unit) / outer
    return found


def _active_set(gram: Array, moment: Array) -> Array:
    """Return the solution for a positive definite matrix of unit diagonal."""
    everything: Array = np.linalg.solve(gram, moment)
    if everything.min() >= 0.0:
        return everything
    found, free = np.zeros(len(moment)), np.zeros(len(moment), dtype=bool)
    tolerance = 1e-10 * float(np.abs(moment).max())
    for _ in range(3 * len(moment)):
        gradient = np.where(free, -np.inf, moment - gram @ found)
        if gradient.max() <= tolerance:
            break
        free[gradient.argmax()] = True
        found = _step_back(gram, moment, found, free)
    return found


def _step_back(gram: Array, moment: Array, found: Array, free: Array) -> Array:
    """Move from ``found`` to the solution over the free coefficients; those that would turn negative stop at 0.

    Each turn takes the one that reaches 0 first out of ``free`` by its index: rounding may leave it a trace above 0.
    """
    while free.any():
        wanted = np.zeros(len(moment))
        wanted[free] = np.linalg.solve(gram[free][:, free], moment[free])
        falling = np.flatnonzero(free & (wanted <= 0.0))
        if not len(falling):
            return wanted
        way = found[falling] / np.maximum(found[falling] - wanted[falling], 1e-300)
        found = np.maximum(found + float(way.min()) * (wanted - found), 0.0)
        found[falling[way.argmin()]] = 0.0
        free &= found > 0.0
        found[~free] = 0.0
    return found
