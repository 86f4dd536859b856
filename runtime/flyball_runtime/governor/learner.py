"""Learns how long steps take, from the steps that are taken."""

from collections import deque
from collections.abc import Iterator
from itertools import islice
from math import log, sqrt
from statistics import median

from msgspec import structs

from flyball_protocol import StepModel
from flyball_runtime.governor.recursive import RecursiveFit
from flyball_runtime.governor.store import StepStore, rescaled
from flyball_runtime.governor.work import Work

REFIT_STEPS = 64
"""Steps between two fits of the store; four times as many when it has seen a thousand."""

KEPT_RESIDUALS = 256
KEPT_INTERRUPTIONS = 128
"""Steps over which the share of interrupted ones is taken."""

SETTLED_STEPS = 256
SETTLED_STEPS_WITH_PRIOR = 32
SETTLED_ERROR = 0.35
"""Largest mean relative error of a model that may be planned with."""

PREFERENCE = 0.85
"""The recursive fit is used if its error is below this share of the others': it has forgotten more than they have."""

OUTLIER_SIGMAS = 2.5
SIGMA_STEPS = 16
"""Steps between two looks at the spread of the errors, which is that of the last four times as many."""

MAD_TO_SIGMA = 1.48
"""Standard deviation of normal errors over their median: a machine with many long steps has no wide bell."""

INTERRUPTED = 2.0
INTERRUPTED_SIGMAS = 5.0
"""A well-known step that takes this many times what is predicted, and more than chance explains, was interrupted."""

MOST_INTERRUPTED = 0.4
"""If more of the latest steps are that long, it is the prediction that is wrong."""

SHIFT_STEPS = 16
SHIFT_SIGMAS = 4.0
MIN_SHIFT = 0.1
"""If the median of the last SHIFT_STEPS ratios is off by more than this, and by more than SHIFT_SIGMAS of its own standard
deviation, that is no chance."""

KNOWN = 0.2
"""Largest leverage of a step that says something about everything: one that is known well enough."""

_TINY_S = 1e-9
_LONGEST_S = 3600.0
_LARGEST = 2**53


class _Candidate:
    """One source of models: what it predicts, and how well it did lately.

    Attributes:
        error: mean of ``|log(measured / predicted)|``, each at most 1.
    """

    def __init__(self, model: StepModel | None, error: float) -> None:
        self.model = model
        self.error = error
        self._num_scored = 0
        self._ratios: deque[float] = deque(maxlen=SHIFT_STEPS)
        self._last_distance = 0.0  # of the last ratio

    def score(self, seconds: float, predicted_s: float, well_known: bool, interrupted: bool) -> None:
        """Compare a step with what this predicted. One that was interrupted says nothing about the error."""
        ratio = seconds / predicted_s
        distance = abs(log(ratio))
        if not interrupted:
            self._num_scored = num = self._num_scored + 1
            self.error += ((distance if distance < 1.0 else 1.0) - self.error) / (num + 4 if num < 60 else 64)
        if well_known:
            self._ratios.append(ratio)
            self._last_distance = distance

    def shift(self) -> float:
        """Return the factor by which all well-known steps differ lately from what this predicts; 1.0 if it may be chance."""
        if self._last_distance < MIN_SHIFT or len(self._ratios) < SHIFT_STEPS:
            return 1.0
        shift = median(self._ratios)
        noise = 1.25 * max(_spread(self._ratios) / shift, 1.25 * self.error) / sqrt(SHIFT_STEPS)
        if abs(log(shift)) <= max(MIN_SHIFT, SHIFT_SIGMAS * noise):
            return 1.0
        return shift

    def forget_ratios(self) -> None:
        self._ratios.clear()


class StepTimeLearner:
    """Three models side by side, of which the one that predicted best lately is used.

    They are the prior, a recursive fit that follows drift, and a fit of stored steps of all kinds, which finds knees and
    interactions. They are of steps that are not interrupted; interruptions, as by a CPU limit, are a noise term of their own:
    a share of steps, and how much longer these take. Other outliers are cut down to what is likely. If the latest well-known
    steps took longer or shorter than both fits predict, everything is taken to have changed its speed, as beside a busy
    neighbour, and both are rescaled at once. The prior is rescaled by itself.

    Args:
        prior: what another runtime of the same key has learned.
    """

    def __init__(self, prior: StepModel | None = None) -> None:
        self.num_steps = 0
        self._recursive = RecursiveFit(prior)
        self._store = StepStore()
        self._prior = _Candidate(None if prior is None else rescaled(prior, 1.0), 0.3)
        self._linear = _Candidate(None, 0.5)
        self._fitted = _Candidate(None, 0.5)
        self._used = self._prior if prior is not None else self._linear
        self._refit: Iterator[None] = iter(())
        self._residuals: deque[float] = deque(maxlen=KEPT_RESIDUALS)
        self._sigma = 0.5
        self._extra_s: deque[float] = deque(maxlen=KEPT_INTERRUPTIONS)  # 0: not interrupted
        self._num_interrupted = 0

    @property
    def coefficients(self) -> StepModel | None:
        """The model in use, without what is known about it; None before the first step, if there was no prior."""
        return self._used.model

    @property
    def model(self) -> StepModel | None:
        """The model in use, with its residuals and covariance."""
        if (used := self._used.model) is None:
            return None
        ordered = sorted(self._residuals)
        return structs.replace(
            used,
            residual_p50=_quantile(ordered, 0.5),
            residual_p95=_quantile(ordered, 0.95),
            num_steps=self.num_steps,
            covariance=self._recursive.covariance() if self.num_steps else (),
            settled=self.is_settled,
            interrupted_share=self.interrupted_share,
            interruption_s=median(long) if (long := [one for one in self._extra_s if one]) else 0.0,
        )

    @property
    def interrupted_share(self) -> float:
        """Share of the latest steps that were interrupted; see INTERRUPTED."""
        return self._num_interrupted / max(1, len(self._extra_s))

    @property
    def is_settled(self) -> bool:
        needed = SETTLED_STEPS_WITH_PRIOR if self._used is self._prior else SETTLED_STEPS
        return self.num_steps >= needed and self._used.error <= SETTLED_ERROR

    @property
    def margin(self) -> float:
        """Share to add to predicted times for their errors: half a standard deviation, at least 2 %."""
        return max(0.02, 0.5 * self._sigma)

    def observe(self, work: Work, seconds: float) -> None:
        """Learn from one step. What no step can be (nothing computed, no time or an hour, NaN) is left out."""
        if not (_TINY_S < seconds < _LONGEST_S) or not _is_possible(*work):
            return
        self.num_steps += 1
        expected_s = 0.0
        if (model := self._used.model) is not None:
            expected_s = _predicted_s(model, work)
            well_known = self._recursive.leverage(work, 1.0 / expected_s) <= KNOWN
            was_interrupted = self._was_interrupted(seconds, expected_s, well_known)
            self._score(work, seconds, expected_s, well_known, was_interrupted)
            if was_interrupted:
                self._store.add(work, seconds)  # which tells by itself what is out of line
                self._fit_on()
                return
            seconds = self._judge(seconds, expected_s, well_known)
        self._learn(work, seconds, expected_s)
        self._used = self._best()

    def _was_interrupted(self, seconds: float, expected_s: float, well_known: bool) -> bool:
        """Note whether a step was so long that it must have been interrupted; return it if it may be left out."""
        factor = max(INTERRUPTED, 1.0 + INTERRUPTED_SIGMAS * self._sigma)
        is_long = well_known and self.num_steps >= SIGMA_STEPS and seconds > factor * expected_s
        if len(extra_s := self._extra_s) == KEPT_INTERRUPTIONS and extra_s[0] > 0.0:
            self._num_interrupted -= 1
        extra_s.append(seconds - expected_s if is_long else 0.0)
        self._num_interrupted += is_long
        return is_long and self.interrupted_share <= MOST_INTERRUPTED

    def _judge(self, seconds: float, expected_s: float, well_known: bool) -> float:
        """Note how far off the prediction was; return the step's time, or if it is an outlier the nearest likely one."""
        self._residuals.append(abs(seconds / expected_s - 1.0))
        if self.num_steps % SIGMA_STEPS == 0:
            self._sigma = MAD_TO_SIGMA * median(islice(reversed(self._residuals), 4 * SIGMA_STEPS))
        if not well_known or self.num_steps < SIGMA_STEPS:
            return seconds
        likely = OUTLIER_SIGMAS * self._sigma
        return min(max(seconds, expected_s * (1.0 - likely)), expected_s * (1.0 + likely))

    def _score(self, work: Work, seconds: float, expected_s: float, well_known: bool, interrupted: bool) -> None:
        """Compare a step with what each candidate predicts; the one in use predicts ``expected_s``."""
        prior, used = self._prior, self._used
        for one in (self._linear, self._fitted, prior):
            if (model := one.model) is not None:
                predicted_s = expected_s if one is used else _predicted_s(model, work)
                one.score(seconds, predicted_s, well_known or one is prior, interrupted)
        if prior.model is not None and (factor := prior.shift()) != 1.0:
            prior.model = rescaled(prior.model, factor)
            prior.forget_ratios()
        self._follow_shift()

    def _follow_shift(self) -> None:
        """Rescale both fits if both say so: where only one does, it is that one that is wrong."""
        shifts = []
        for one in (self._linear, self._fitted):
            if one.model is not None:
                if (shift := one.shift()) == 1.0:
                    return
                shifts.append(shift)
        if not shifts or len({one > 1.0 for one in shifts}) > 1:
            return
        factor = min(shifts, key=lambda one: abs(log(one)))
        self._recursive.rescale(factor)
        self._store.rescale(factor)
        self._refit = iter(())  # it was of the old speed
        self._extra_s.clear()  # they were the first of the new speed
        self._num_interrupted = 0
        for one in (self._linear, self._fitted):
            one.forget_ratios()

    def _learn(self, work: Work, seconds: float, expected_s: float) -> None:
        self._recursive.observe(work, seconds, 1.0 / max(expected_s, 0.25 * seconds))
        self._linear.model = self._recursive.model
        self._store.add(work, seconds)
        self._fit_on()

    def _fit_on(self) -> None:
        """Go on with the fit of the stored steps, or begin the next one."""
        if self.num_steps % (REFIT_STEPS if self.num_steps < 1024 else 4 * REFIT_STEPS) == 0:
            self._refit = self._store.refit(self._used.model)
        next(self._refit, None)
        self._fitted.model = self._store.model

    def _best(self) -> _Candidate:
        """Return the best candidate; see PREFERENCE."""
        prior, linear, fitted = self._prior, self._linear, self._fitted
        if fitted.model is None and prior.model is None:
            return linear
        best = prior if fitted.model is None or (prior.model is not None and prior.error <= fitted.error) else fitted
        return linear if linear.error < PREFERENCE * best.error else best


def _is_possible(prefill: int, decodes: int, context: int, pairs: int) -> bool:
    """Whether a step can compute so much."""
    return (
        0 <= prefill < _LARGEST
        and 0 <= decodes < _LARGEST
        and 0 <= context < _LARGEST
        and 0 <= pairs < _LARGEST
        and prefill + decodes > 0
    )


def _predicted_s(model: StepModel, work: Work) -> float:
    seconds = model.predict(*work)
    return seconds if seconds > _TINY_S else _TINY_S


def _spread(ratios: deque[float]) -> float:
    """Return the standard deviation that normal samples with this interquartile range have."""
    ordered = sorted(ratios)
    return (ordered[len(ordered) * 3 // 4] - ordered[len(ordered) // 4]) / 1.35


def _quantile(ordered: list[float], share: float) -> float | None:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None
