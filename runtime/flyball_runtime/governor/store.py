"""Steps of all kinds that were seen, a few of each, and the model that fits them best."""

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

from flyball_protocol import StepModel
from flyball_runtime.governor.nnls import Array, nnls_each
from flyball_runtime.governor.work import SCALES, Work

NUM_BUCKETS = 128
PER_BUCKET = 24
KNEES = (0.0, 64.0, 128.0, 192.0, 256.0, 320.0, 384.0, 512.0)
PAYS = 0.08
"""A knee or an interaction is used if it takes this share off the squared error."""
CHANGES = 0.04
"""And another knee than before if it takes this share off."""
MIN_STEPS = 24
OUT_OF_LINE = 3.0
"""Steps of one kind differ by less than this factor from their median, unless something interrupts them."""
INERTIA = 0.01
"""Weight of the model before in each fit: what the stored steps say little about changes little from fit to fit."""

_KNEE_SCALE = 256.0
_INTERACTION_SCALE = 2.0**13
_CONTEXT, _PAIRS, _INTERACTION = 1 + len(KNEES), 2 + len(KNEES), 3 + len(KNEES)

_CHOICES = tuple(
    np.array([[0, 1 + knee, _CONTEXT, _PAIRS, *more] for knee in range(len(KNEES))]) for more in ([], [_INTERACTION])
)
"""Features of a fit by knee, without and with an interaction."""


class StepStore:
    """The latest steps by kind: P, D, K and Q to a power of 2. The kind that was seen longest ago makes room.

    Rare kinds of steps keep their say beside the common one, whatever the load is now.

    Attributes:
        model: the last fit, None before the first.
    """

    def __init__(self) -> None:
        self.model: StepModel | None = None
        self._slots: OrderedDict[tuple[int, ...], int] = OrderedDict()
        self._num_in_slot = [0] * NUM_BUCKETS
        self._rows = np.zeros((NUM_BUCKETS * PER_BUCKET, 5))  # P, D, K, Q, seconds; seconds 0: empty
        self._new: dict[int, tuple[float, ...]] = {}  # rows that are to be written

    def add(self, work: Work, seconds: float) -> None:
        prefill, decodes, context, pairs = work
        kind = prefill.bit_length(), decodes.bit_length(), context.bit_length(), pairs.bit_length()
        slot = self._slots.get(kind)
        if slot is None:
            slot = self._slots[kind] = self._new_slot()
        else:
            self._slots.move_to_end(kind)
        num = self._num_in_slot[slot]
        self._new[slot * PER_BUCKET + num % PER_BUCKET] = prefill, decodes, context, pairs, seconds
        self._num_in_slot[slot] = num + 1

    def rescale(self, factor: float) -> None:
        """Everything takes ``factor`` times as long from now on."""
        self._write()
        self._rows[:, 4] *= factor
        if self.model is not None:
            self.model = rescaled(self.model, factor)

    def refit(self, weighting: StepModel | None) -> Iterator[None]:
        """Fit the stored steps anew, a small part of the work at a time.

        Args:
            weighting: the model in use, if there is one. Errors are relative to the times that it predicts.
        """
        self._write()
        rows = self._rows[_in_line(self._rows[:, 4].reshape(NUM_BUCKETS, PER_BUCKET)).ravel()]
        if len(rows) < MIN_STEPS:
            return
        yield
        features, relative = _features(rows, weighting)
        yield
        gram, moment, total = features.T @ features, features.T @ relative, float(relative @ relative)
        yield
        held, pull = (gram, moment) if weighting is None else _held(gram, moment, weighting)
        best: tuple[float, StepModel] | None = None
        for interaction, choices in enumerate(_CHOICES):
            fits = nnls_each(held[choices[:, :, None], choices[:, None, :]], pull[choices])
            yield
            errors = _squared_errors(gram, moment, total, choices, fits)
            for index, (found, error) in enumerate(zip(fits, errors.tolist(), strict=True)):
                differs = self.model is not None and KNEES[index] != self.model.knee_tokens
                cost = error * (1.0 + PAYS * ((index > 0) + interaction) + CHANGES * differs)
                if best is None or cost < best[0]:
                    best = cost, _model(found, KNEES[index])
            yield
        if best is not None:
            self.model = best[1]

    def _write(self) -> None:
        if self._new:
            self._rows[list(self._new)] = list(self._new.values())
            self._new.clear()

    def _new_slot(self) -> int:
        if len(self._slots) < NUM_BUCKETS:
            return len(self._slots)
        self._write()
        _, slot = self._slots.popitem(last=False)
        self._num_in_slot[slot] = 0
        self._rows[slot * PER_BUCKET : (slot + 1) * PER_BUCKET] = 0.0
        return slot


def _in_line(seconds: Array) -> Array:
    """Return which slots have a step that was not interrupted, bool like ``seconds`` [kinds, steps of a kind]."""
    num = np.count_nonzero(seconds, axis=1)
    ordered = np.sort(seconds, axis=1)  # empty slots, which are 0, come first
    median = ordered[np.arange(len(num)), PER_BUCKET - 1 - num // 2]
    found: Array = (seconds > 0.0) & (seconds < OUT_OF_LINE * median[:, None])
    return found


def rescaled(model: StepModel, factor: float) -> StepModel:
    return StepModel(
        base_s=model.base_s * factor,
        token_s=model.token_s * factor,
        knee_tokens=model.knee_tokens,
        context_token_s=model.context_token_s * factor,
        attention_pair_s=model.attention_pair_s * factor,
        interaction_s=model.interaction_s * factor,
    )


def _features(rows: Array, weighting: StepModel | None) -> tuple[Array, Array]:
    """Return all features that a fit may choose from, by row, and the times, both over the time that is expected."""
    prefill, decodes, context, pairs, seconds = rows.T
    tokens = prefill + decodes
    features = np.empty((len(rows), 4 + len(KNEES)))
    features[:, 0] = 1.0
    features[:, 1:_CONTEXT] = np.maximum(tokens[:, None] - np.array(KNEES), 0.0) / _KNEE_SCALE
    features[:, _CONTEXT] = context / SCALES[2]
    features[:, _PAIRS] = pairs / SCALES[3]
    features[:, _INTERACTION] = prefill * decodes / _INTERACTION_SCALE
    expected = seconds if weighting is None else np.maximum(_predicted(weighting, rows), 0.25 * seconds)
    features /= expected[:, None]
    return features, seconds / expected


def _predicted(model: StepModel, rows: Array) -> Array:
    prefill, decodes, context, pairs, _ = rows.T
    above = np.maximum(prefill + decodes - model.knee_tokens, 0.0)
    seconds: Array = (
        model.base_s
        + model.token_s * above
        + model.context_token_s * context
        + model.attention_pair_s * pairs
        + model.interaction_s * prefill * decodes
    )
    return seconds


def _held(gram: Array, moment: Array, before: StepModel) -> tuple[Array, Array]:
    """Return the matrix and the vector of fits that the model before pulls on; see INERTIA."""
    weights = INERTIA * np.diagonal(gram)
    token = before.token_s * _KNEE_SCALE
    scaled = (
        before.base_s,
        *(token for _ in KNEES),
        before.context_token_s * float(SCALES[2]),
        before.attention_pair_s * float(SCALES[3]),
        before.interaction_s * _INTERACTION_SCALE,
    )
    return gram + np.diag(weights), moment + weights * np.array(scaled)


def _squared_errors(gram: Array, moment: Array, total: float, choices: Array, fits: Array) -> Array:
    """Return what each fit leaves: coefficients ``[k, n]`` of the features ``choices[k, n]``."""
    parts = gram[choices[:, :, None], choices[:, None, :]]
    errors: Array = total - 2.0 * (moment[choices] * fits).sum(axis=1) + np.einsum("ki,kij,kj->k", fits, parts, fits)
    return np.maximum(errors, 0.0)


def _model(found: Array, knee_tokens: float) -> StepModel:
    """Return the model of a fit's coefficients."""
    base, token, context, pairs, *rest = found.tolist()
    return StepModel(
        base_s=base,
        token_s=token / _KNEE_SCALE,
        knee_tokens=knee_tokens,
        context_token_s=context / float(SCALES[2]),
        attention_pair_s=pairs / float(SCALES[3]),
        interaction_s=rest[0] / _INTERACTION_SCALE if rest else 0.0,
    )
