"""Names of the runtime's metrics that the operator tells autoscalers to read."""

REQUESTS_WAITING = "flyball_requests_waiting"
"""Requests in a replica's queue."""
REQUESTS_RUNNING_RATIO = "flyball_requests_running_ratio"
"""Running requests of a replica over the most that may run now, 0 to 1."""
