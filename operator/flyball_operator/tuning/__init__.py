"""The slow loop: evidence of the running replicas -> ``decide()`` -> new limits. Only admin.py and loop.py do I/O."""

from flyball_operator.tuning.decide import decide
from flyball_operator.tuning.decision import Action, Decision, Findings, Reason
from flyball_operator.tuning.evidence import PodEvidence
from flyball_operator.tuning.knobs import Knob
from flyball_operator.tuning.state import Move, Trial, TunerState

__all__ = ["Action", "Decision", "Findings", "Knob", "Move", "PodEvidence", "Reason", "Trial", "TunerState", "decide"]
