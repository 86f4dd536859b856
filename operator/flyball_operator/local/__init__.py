"""Local mode: the objects that a cluster would run, run as processes on this machine."""

from flyball_operator.local.reports import Event
from flyball_operator.local.runner import LocalOptions, LocalRunner
from flyball_operator.local.snapshot import ReplicaSnapshot, Snapshot

__all__ = ["Event", "LocalOptions", "LocalRunner", "ReplicaSnapshot", "Snapshot"]
