"""A linear model of the step time, learned step by step."""

import numpy as np

from flyball_protocol import StepModel
from flyball_runtime.governor.nnls import Array, inverse, nnls
from flyball_runtime.governor.work import SCALES, Work

FORGETTING = 0.998
_RIDGE = 1e-6
_, _PER_TOKEN, _PER_CONTEXT, _PER_PAIR = (1.0 / SCALES).tolist()
EVERY = 16
"""Steps between two solutions; at first each step has one."""

_UPPER = np.triu_indices(len(SCALES))
"""Where the entries of a symmetric matrix stand that are kept: its upper triangle, row by row."""

_KEPT = np.zeros((len(SCALES), len(SCALES)), dtype=np.intp)
"""Where each entry of the matrix is kept."""
_KEPT[_UPPER] = _KEPT.T[_UPPER] = range(len(_UPPER[0]))


class RecursiveFit:
    """Recursive least squares with directional forgetting (Cao and Schwartz 2000), in the information form.

    A step forgets along its own direction only. So what steady load does not excite stays known: with exponential
    forgetting the filter's gain grows without bound there, and the first other step wrecks it. Errors are relative:
    each step counts by the inverse of its predicted time. Signs are left alone in the filter; its solution is taken with
    coefficients that are not negative.

    What is done in every step is written out in numbers: four features are so few that numpy's calls take several times as
    long as the arithmetic.

    Attributes:
        model: the last solution.
    """

    def __init__(self, start: StepModel | None = None) -> None:
        self.model = start or StepModel(base_s=0.0, token_s=0.0)
        self._num_steps = 0
        info = np.diag(np.full(len(SCALES), _RIDGE))
        self._info: list[float] = info[_UPPER].tolist()
        self._inverse: list[float] = inverse(info)[_UPPER].tolist()
        self._moment: list[float] = (info @ (_coefficients(self.model) * SCALES)).tolist()

    def observe(self, work: Work, seconds: float, weight: float) -> None:
        """Learn from a step; ``weight`` is the inverse of the time that it was expected to take."""
        w, x, y, z = _features(work, weight)
        ww, wx, wy, wz, xx, xy, xz, yy, yz, zz = self._info
        along_w = ww * w + wx * x + wy * y + wz * z
        along_x = wx * w + xx * x + xy * y + xz * z
        along_y = wy * w + xy * x + yy * y + yz * z
        along_z = wz * w + xz * x + yz * y + zz * z
        size = along_w * w + along_x * x + along_y * y + along_z * z
        gone = (1.0 - FORGETTING) / size if size > 0.0 else 0.0
        gone_w, gone_x, gone_y, gone_z = gone * along_w, gone * along_x, gone * along_y, gone * along_z
        self._info = [
            ww + w * w - gone_w * along_w,
            wx + w * x - gone_w * along_x,
            wy + w * y - gone_w * along_y,
            wz + w * z - gone_w * along_z,
            xx + x * x - gone_x * along_x,
            xy + x * y - gone_x * along_y,
            xz + x * z - gone_x * along_z,
            yy + y * y - gone_y * along_y,
            yz + y * z - gone_y * along_z,
            zz + z * z - gone_z * along_z,
        ]
        relative, (of_w, of_x, of_y, of_z) = seconds * weight, self._moment
        along = w * of_w + x * of_x + y * of_y + z * of_z
        self._moment = [
            of_w + w * relative - gone_w * along,
            of_x + x * relative - gone_x * along,
            of_y + y * relative - gone_y * along,
            of_z + z * relative - gone_z * along,
        ]
        self._num_steps += 1
        if self._num_steps < 2 * EVERY or self._num_steps % EVERY == 0:
            self._solve()

    def leverage(self, work: Work, weight: float) -> float:
        """Return how little is known about such a step: the variance of its predicted time over that of one measurement.

        It is as of the last solution.
        """
        w, x, y, z = _features(work, weight)
        ww, wx, wy, wz, xx, xy, xz, yy, yz, zz = self._inverse
        mixed = w * (wx * x + wy * y + wz * z) + x * (xy * y + xz * z) + yz * y * z
        return ww * w * w + xx * x * x + yy * y * y + zz * z * z + 2.0 * mixed

    def rescale(self, factor: float) -> None:
        """Everything takes ``factor`` times as long from now on; what was learned of it counts less."""
        self._info = [0.25 * one for one in self._info]
        self._moment = [0.25 * factor * one for one in self._moment]
        self._solve()

    def covariance(self) -> tuple[float, ...]:
        """See ``StepModel.covariance``."""
        return tuple(self._inverse)

    def _solve(self) -> None:
        info, moment = np.array(self._info)[_KEPT], np.array(self._moment)
        known = inverse(info)
        self._inverse = known[_UPPER].tolist()
        found = known @ moment
        if found.min() < 0.0:
            found = nnls(info, moment)
        base, token, context, pair = (found / SCALES).tolist()
        self.model = StepModel(base_s=base, token_s=token, context_token_s=context, attention_pair_s=pair)


def _features(work: Work, weight: float) -> tuple[float, float, float, float]:
    prefill, decodes, context, pairs = work
    tokens = prefill + decodes
    return weight, tokens * weight * _PER_TOKEN, context * weight * _PER_CONTEXT, pairs * weight * _PER_PAIR


def _coefficients(model: StepModel) -> Array:
    return np.array((model.base_s, model.token_s, model.context_token_s, model.attention_pair_s))
