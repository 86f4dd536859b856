"""The tuner by symptom and rule: the first one that Flyball had, kept as it was, to compare others with.

It knows no model of the step time: shares of samples over an objective, in buckets, lead to cuts by 0.7 and raises by 1.25,
each tried on one replica first. Nothing but the simulator uses it. A fault that is found in it stays.
"""

from flyball_simulation.baselines.rules.canary import advance
from flyball_simulation.baselines.rules.evidence import PodEvidence
from flyball_simulation.baselines.rules.knobs import as_change
from flyball_simulation.baselines.rules.spec import Bounds, Objectives, Range, Tuning
from flyball_simulation.baselines.rules.state import TunerState

__all__ = ["Bounds", "Objectives", "PodEvidence", "Range", "TunerState", "Tuning", "advance", "as_change"]
