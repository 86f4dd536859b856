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


class RecursiveFit:
    """Recursive least squares with directional forgetting (Cao and Schwartz 2000), in the information form.

    A step forgets along its own direction only. So what steady load does not excite stays known: with exponential
    forgetting the filter's gain grows without bound there, and the first other step wrecks it. Errors are relative:
    each step counts by the inverse of its predicted time. Signs are left alone in the filter; its solution is taken with
    coefficients that are not negative.

    Attributes:
        model: the last solution.
    """

    def __init__(self, start: StepModel | None = None) -> None:
        self.model = start or StepModel(base_s=0.0, token_s=0.0)
        self._num_steps = 0
        self._info = np.diag(np.full(len(SCALES), _RIDGE))
        self._inverse = inverse(self._info)
        self._moment = self._info @ (_coefficients(self.model) * SCALES)

    def observe(self, work: Work, seconds: float, weight: float) -> None:
        """Learn from a step; ``weight`` is the inverse of the time that it was expected to take."""
        x = _features(work, weight)
        along = self._info @ x
        size = float(x @ along)
        if size > 0.0:
            gone = (1.0 - FORGETTING) / size
            self._moment -= along * (gone * float(x @ self._moment))
            self._info -= (gone * along)[:, None] * along
        self._info += x[:, None] * x
        self._moment += x * (seconds * weight)
        self._num_steps += 1
        if self._num_steps < 2 * EVERY or self._num_steps % EVERY == 0:
            self._solve()

    def leverage(self, work: Work, weight: float) -> float:
        """Return how little is known about such a step: the variance of its predicted time over that of one measurement.

        It is as of the last solution.
        """
        x = _features(work, weight)
        return float(x @ self._inverse @ x)

    def rescale(self, factor: float) -> None:
        """Everything takes ``factor`` times as long from now on; what was learned of it counts less."""
        self._info *= 0.25
        self._moment *= 0.25 * factor
        self._solve()

    def covariance(self) -> tuple[float, ...]:
        """See ``StepModel.covariance``."""
        return tuple(float(one) for one in self._inverse[np.triu_indices(len(SCALES))])

    def _solve(self) -> None:
        self._inverse = inverse(self._info)
        base, token, context, pair = (nnls(self._info, self._moment) / SCALES).tolist()
        self.model = StepModel(base_s=base, token_s=token, context_token_s=context, attention_pair_s=pair)


def _features(work: Work, weight: float) -> Array:
    prefill, decodes, context, pairs = work
    return np.array(
        (weight, (prefill + decodes) * weight * _PER_TOKEN, context * weight * _PER_CONTEXT, pairs * weight * _PER_PAIR)
    )


def _coefficients(model: StepModel) -> Array:
    return np.array((model.base_s, model.token_s, model.context_token_s, model.attention_pair_s))
