"""The fast loop: learns how long steps take, and how long answers are, and says what fits. No torch, no I/O."""

from flyball_runtime.governor.drafting import Drafting
from flyball_runtime.governor.ghost_cache import GhostCache
from flyball_runtime.governor.learner import StepTimeLearner
from flyball_runtime.governor.lengths import OutputLengths
from flyball_runtime.governor.pace import MIN_CHUNK, Governor, usable_prior, work_of
from flyball_runtime.governor.work import Work

__all__ = [
    "MIN_CHUNK",
    "Drafting",
    "GhostCache",
    "Governor",
    "OutputLengths",
    "StepTimeLearner",
    "Work",
    "usable_prior",
    "work_of",
]
