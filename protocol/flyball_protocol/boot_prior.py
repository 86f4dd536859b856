"""Boot prior: the limits that a new replica starts with, left by the operator for it to read."""

from msgspec import Struct

from flyball_protocol.limits import Limits, Revision


class BootPrior(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of the file that ``flyball serve --boot-prior`` reads: limits that served well, and their revision.

    Attributes:
        revision: in force from the start, so that older ones are stale.
    """

    revision: Revision
    limits: Limits
