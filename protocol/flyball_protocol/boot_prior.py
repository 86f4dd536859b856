"""Boot prior: the limits that a new replica starts with, left by the operator for it to read."""

from typing import Annotated

from msgspec import Meta, Struct

from flyball_protocol.limits import Limits


class BootPrior(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of the file that ``flyball serve --boot-prior`` reads: limits that served well, and their revision.

    Attributes:
        revision: in force from the start, so that older ones are stale.
    """

    revision: Annotated[int, Meta(ge=1)]
    limits: Limits
