"""Boot prior: what a new replica starts with, left by the operator for it to read."""

from msgspec import Struct

from flyball_protocol.limits import Limits, Revision
from flyball_protocol.step_model import StepModel


class BootPrior(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Content of the file that ``flyball serve --boot-prior`` reads: limits that served well, and their revision.

    Attributes:
        revision: in force from the start, so that older ones are stale.
        step_model: what a replica of this deployment has learned of its step time.
        key: of the replica that learned it (``Evidence.key``). A runtime of another key does not use the model.
    """

    revision: Revision
    limits: Limits
    step_model: StepModel | None = None
    key: str = ""
